"""YAML text as keys and values, each with the line that it stands on.

A value that can't be read is a problem of its entry, so that all of a file are told at once.
A plain word is read by the rules of YAML 1.2, also on the command line: 1e-4 is a number; yes, on
and off are words. WHY not PyYAML's own rules: they are those of YAML 1.1, where 1e-4 is text, off
is false, and 1:30 is ninety.

Does not own: which keys exist and what they take (schema.py).
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hardened_ddp.settings.wording import as_word, shown

# YAML 1.2.2, section 10.3.2 (core schema)
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_WORDS: dict[str, float | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
_WORDS |= {form: value for word, value in _WORDS.items() for form in (word.title(), word.upper())}
_WORDS |= {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}  # as json writes them
LARGEST_FILE_BYTES = 2**20  # a checkpoint named by mistake must not be read as a whole
DEEPEST = 50  # far above any argument of a model, far below Python's recursion limit
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One key of a YAML mapping. The value is a str, number, bool, None, list or dict."""

    key: str
    value: Any  # Any: whatever the user wrote; schema.py decides whether it fits
    line: int
    problem: str = ""  # why the value can't be read


class Misfit(ValueError):
    """A text or a value can't be taken; the message says what was found and what is needed."""

    def __init__(self, why: str, *, line: int = 0) -> None:
        super().__init__(why)
        self.line = line


def plain_value(text: str) -> Any:  # Any: see Entry
    """Give the value that an unquoted word stands for; text if it is nothing else."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        if _INT.fullmatch(text):
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    except ValueError:  # Python reads no integer of more than 4300 digits
        return text
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def read_file(path: str) -> list[Entry]:
    """Read the YAML file of settings at path. Rank-local. Raises Misfit."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(LARGEST_FILE_BYTES + 1)
        if len(raw) > LARGEST_FILE_BYTES:
            raise Misfit("is too large for a settings file")
        return read_text(raw.decode("utf-8-sig"))
    except Misfit as error:
        raise Misfit(f"{path}{f':{error.line}' if error.line else ''}: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: no such name can be, or it is no UTF-8
        name = path if isinstance(error, OSError) else shown(path)
        raise Misfit(f"{name}: can't be read: {getattr(error, 'strerror', error)}") from error


def read_text(text: str) -> list[Entry]:
    """Read YAML text whose top level is a mapping; an empty text is an empty mapping.

    Raises Misfit if nobody knows what it sets.
    """
    root = _compose(text)
    if root is None or (root.tag == "plain" and plain_value(root.value) is None):
        return []
    if root.id != "mapping":
        why = f'found {root.id}, needs lines such as "batch_size: 64"'
        raise Misfit(why, line=root.start_mark.line + 1)
    return list(_entries(root, set(), depth=0))


def read_word(text: str) -> Any:  # Any: see Entry
    """Read one YAML value, such as {size: 28}. Raises Misfit."""
    root = _compose(text)
    return None if root is None else _value(root, set())


def _compose(text: str) -> Any:  # Any: a yaml.Node or None
    """Parse text to a tree with line numbers. Raises Misfit."""
    import yaml  # WHY here: --help and runs without a file need not wait for it

    try:
        return yaml.compose(text, Loader=_loader_class())
    except yaml.MarkedYAMLError as error:
        # WHY the context's first: there begins a key without ":", or an open quote
        mark = error.context_mark or error.problem_mark
        told = ", ".join(part for part in (error.context, error.problem) if part)
        raise Misfit(f"is not YAML: {told}", line=mark.line + 1 if mark else 0) from error
    except yaml.reader.ReaderError as error:
        # WHY not error.position: the C parser counts bytes, the other one characters
        line = text.count("\n", 0, text.find(chr(error.character))) + 1
        why = f"is not YAML: character U+{error.character:04X}"
        raise Misfit(why, line=line) from error
    except UnicodeEncodeError as error:  # the shell handed over bytes that are not UTF-8
        raise Misfit(f"is not YAML: byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise Misfit("is nested too deeply") from error


@cache
def _loader_class() -> Any:  # Any: a class made at run time, which mypy can't check
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is not in every build
    rules = {None: [("plain", re.compile(""))]}  # our tag for every word without quotes
    return type("CoreLoader", (base,), {"yaml_implicit_resolvers": rules})


def _entries(mapping: Any, seen: set[int], *, depth: int) -> Iterator[Entry]:  # Any: a yaml.Node
    """Read the pairs of a mapping."""
    lines: dict[str, int] = {}
    for key_node, value_node in mapping.value:
        key = str(key_node.value) if key_node.id == "scalar" else f"a {key_node.id}"
        line = key_node.start_mark.line + 1
        try:
            if key in lines:
                raise Misfit(f"{as_word(key)}: is already set in line {lines[key]}", line=line)
            lines[key] = line
            yield Entry(key=key, value=_value(value_node, seen, depth=depth + 1), line=line)
        except Misfit as error:
            yield Entry(key=key, value=None, line=error.line, problem=str(error))


def _value(node: Any, seen: set[int], *, depth: int = 0) -> Any:  # Any: a yaml.Node; see Entry
    """Give the value of a node; seen: the nodes that have been read. Raises Misfit."""
    line = node.start_mark.line + 1
    if id(node) in seen:
        # WHY: an alias may contain itself, and a few lines of them can fill the memory
        why = "uses an alias (*name), which is not supported: write the value out"
        raise Misfit(why, line=line)
    if depth > DEEPEST:
        raise Misfit(f"is nested more than {DEEPEST} levels deep", line=line)
    seen.add(id(node))
    match node.id, node.tag.removeprefix(_TAG):
        case "scalar", "plain":
            return plain_value(node.value)
        case "scalar", "str":  # in quotes
            return node.value
        case "sequence", "seq":
            return [_value(child, seen, depth=depth + 1) for child in node.value]
        case "mapping", "map":
            found = list(_entries(node, seen, depth=depth))
            for bad in (entry for entry in found if entry.problem):
                raise Misfit(bad.problem, line=bad.line)
            return {entry.key: entry.value for entry in found}
    raise Misfit(f"has the tag {node.tag}, which is not supported: remove it", line=line)
