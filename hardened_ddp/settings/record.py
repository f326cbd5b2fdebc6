"""Settings written down, beside a run.

The YAML reads back to the same values with document.py, and with any other YAML reader: words that
YAML 1.1 takes for truth values are quoted. config.yaml at the top is written in the same form, by
python -m tests.documents: after a change of a setting.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from hardened_ddp.settings.config import Config
from hardened_ddp.settings.document import plain_value
from hardened_ddp.settings.schema import AUTO, DEFAULT, SETTINGS, TITLES, flatten, names_of

WIDTH = 100
_SOURCE_COLUMN = 40
_PLAIN_WORD = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
_YAML_1_1_BOOLS = frozenset({"y", "n", "yes", "no", "on", "off"})
_DUMP_HEAD = """\
# All settings of this run, and where each value came from: default, a line of a file (config.yaml
# beside the script, or --config FILE), run (the run that was continued), or the command line.

"""


def dump(config: Config, sources: Mapping[str, str]) -> str:
    """Write all settings as YAML, each with its source as a comment."""
    values = flatten(config)
    lines = [_DUMP_HEAD]
    for section, title in TITLES.items():
        lines.append(f"# {title}\n")
        for name in names_of(section):
            line = f"{name}: {yaml_word(values[name])}"
            source = sources.get(name, DEFAULT)
            # WHY ascii: a file name may hold a line break, which would end the comment
            safe = source if source.isprintable() else ascii(source)
            lines.append(f"{line:<{_SOURCE_COLUMN}}  # {safe}\n")
        lines.append("\n")
    return "".join(lines).rstrip("\n") + "\n"


def read_back(text: str) -> tuple[tuple[str, str, str], ...]:
    """Read what dump wrote: of each setting its name, its value as YAML, and where it came from."""
    found = []
    for line in text.splitlines():
        name, has_colon, rest = line.partition(":")
        if has_colon and name.isidentifier():
            value, _, source = rest.rpartition("  # ") if "  # " in rest else (rest, "", "")
            found.append((name, value.strip(), source.strip()))
    return tuple(found)


def agreed_settings(config: Config) -> dict[str, str]:
    """Give the settings, as text, that all ranks must agree on.

    Left out is what has may_differ: it changes neither what a run computes nor when its ranks meet,
    such as data_dir and num_workers. All others are in, also those that change no weight: a rank
    with another eval_every would wait for ranks that never come.
    """
    values = flatten(config)
    return {
        f"--{name}": json.dumps(values[name], sort_keys=True)
        for name, setting in SETTINGS.items()
        if not setting.may_differ
    }


@functools.cache
def code_hash() -> str:
    """Hash this program's own source files, as they are when this process asks first."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in [root.parent / "ddp_training.py", *sorted(root.rglob("*.py"))]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def yaml_word(value: object) -> str:
    """Write a value in one line of YAML, of a mapping as JSON. At the top None reads auto."""
    if value is None:
        return AUTO
    if isinstance(value, str) and _PLAIN_WORD.fullmatch(value):
        is_text = isinstance(plain_value(value), str) and value.lower() not in _YAML_1_1_BOOLS
        if is_text:
            return value
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "." not in text:
        text = text.replace("e", ".0e")  # WHY: YAML 1.1 reads 1e-05 as text
    # WHY not by json: it writes a letter above U+FFFF as two
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
