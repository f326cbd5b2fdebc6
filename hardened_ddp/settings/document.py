"""YAML text as keys and values, each with the line that it stands on.

Owns reading YAML: what a plain word means, duplicate keys, and what is wrong on which line. All
problems are collected; nothing here raises for what a user wrote.

A plain word is read by the rules of YAML 1.2, and by the same rules on the command line: 1e-4 is a
number; yes, on and off are words. WHY not PyYAML's own rules: they are those of YAML 1.1, where
1e-4 is text, off is false, and 1:30 is ninety.

Does not own: which keys exist and what they take (schema.py).
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hardened_ddp.settings.wording import as_word, shown

# YAML 1.2.2, section 10.3.2 (core schema)
_CORE_RULES = (
    ("null", re.compile(r"(?:null|Null|NULL|~|)\Z")),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")),
    ("int", re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")),
    (
        "float",
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
    ),
)
LARGEST_FILE_BYTES = 2**20  # a checkpoint named by mistake must not be read as a whole
DEEPEST = 50  # far above any argument of a model, far below Python's recursion limit
_TAG = "tag:yaml.org,2002:"
_KINDS = {
    "scalar": ("null", "bool", "int", "float", "str"),
    "mapping": ("map",),
    "sequence": ("seq",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One key of a YAML mapping. The value is a str, number, bool, None, list or dict."""

    key: str
    value: Any  # Any: whatever the user wrote; schema.py decides whether it fits
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """What a YAML text says, and what is wrong with it."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]
    bad_keys: frozenset[str] = frozenset()
    """Keys whose value can't be read."""

    is_whole: bool = True
    """False: the text can't be read at all, so nobody knows what it sets."""


def plain_value(text: str) -> Any:  # Any: see Entry
    """Give the value that an unquoted word stands for; text if it is nothing else."""
    for tag, rule in _CORE_RULES:
        if rule.match(text):
            try:
                return _construct(tag, text)
            except ValueError:  # Python reads no integer of more than 4300 digits
                return text
    return text


def read_file(path: str) -> Document:
    """Read the YAML file of settings at path. Rank-local."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(LARGEST_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        return _broken(f"{path}: can't be read: {error.strerror}")
    except UnicodeDecodeError as error:
        return _broken(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}")
    except ValueError as error:  # no file can have such a name
        return _broken(f"{shown(path)}: can't be read: {error}")
    if len(raw) > LARGEST_FILE_BYTES:
        return _broken(f"{path}: is too large for a settings file")
    return read_text(text, where=path)


def read_text(text: str, *, where: str) -> Document:
    """Read YAML text whose top level is a mapping; an empty text is an empty mapping."""
    import yaml  # WHY here: --help and runs without a file need not wait for it

    root = _compose(text, where)
    if isinstance(root, str):
        return _broken(root)
    if root is None or root.tag == f"{_TAG}null":
        return Document(entries=(), problems=())
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1
        return _broken(f'{where}:{line}: found {root.id}, needs lines such as "batch_size: 64"')
    reader = _Reader(where)
    entries = tuple(reader.entries(root))
    bad_keys = frozenset(reader.bad_keys)
    return Document(entries=entries, problems=tuple(reader.problems), bad_keys=bad_keys)


def read_word(text: str, *, where: str) -> tuple[Any, tuple[str, ...]]:  # Any: see Entry
    """Read one YAML value, such as {size: 28}; give it with the problems found."""
    root = _compose(text, where)
    if isinstance(root, str):
        return None, (root,)
    reader = _Reader(where)
    return (None if root is None else reader.value(root)), tuple(reader.problems)


def _broken(problem: str) -> Document:
    return Document(entries=(), problems=(problem,), is_whole=False)


def _compose(text: str, where: str) -> Any:  # Any: a yaml.Node, None, or a problem as str
    """Parse text to a tree with line numbers, or say what is wrong with it."""
    import yaml

    try:
        return yaml.compose(text, Loader=_loader_class())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{where}:{mark.line + 1}" if mark else where
        context, began = error.context, error.context_mark
        if context and mark and began and began.line != mark.line:
            context += f" that begins in line {began.line + 1}"  # a key without ":", an open quote
        told = ", ".join(part for part in (context, error.problem) if part)
        return f"{at}: is not YAML: {told}"
    except yaml.reader.ReaderError as error:
        # WHY not error.position: the C parser counts bytes, the other one characters
        line = text.count("\n", 0, text.find(chr(error.character))) + 1
        return f"{where}:{line}: is not YAML: character U+{error.character:04X}"
    except UnicodeEncodeError as error:  # the shell handed over bytes that are not UTF-8
        return f"{where}: is not YAML: byte {error.start} is not UTF-8"
    except RecursionError:
        return f"{where}: is nested too deeply"


@cache
def _loader_class() -> Any:  # Any: a class made at run time, which mypy can't check
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is not in every build
    rules = [(_TAG + tag, rule) for tag, rule in _CORE_RULES]
    return type("CoreLoader", (base,), {"yaml_implicit_resolvers": {None: rules}})


def _construct(tag: str, text: str) -> Any:  # Any: see Entry
    """Turn the text of a scalar to the value of its tag. Raises ValueError if it has none."""
    match tag:
        case "null":
            return None
        case "bool":
            return {"true": True, "false": False}[text.lower()]
        case "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Reader:
    """Turns the tree of one document to values, collecting what is wrong on the way."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[str] = []
        self.bad_keys: set[str] = set()
        self._seen: set[int] = set()
        self._num_aliases = 0

    def entries(self, node: Any, *, depth: int = 0) -> list[Entry]:  # Any: yaml is imported late
        """Give the pairs of a mapping; a key that comes twice is a problem."""
        first_lines: dict[str, int] = {}
        entries = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = str(key_node.value) if key_node.id == "scalar" else f"a {key_node.id}"
            known_problems = len(self.problems) + self._num_aliases
            value = self.value(value_node, depth=depth + 1)
            if key in first_lines:
                self._add(line, f"{as_word(key)}: is already set in line {first_lines[key]}")
            elif (
                len(self.problems) + self._num_aliases > known_problems
            ):  # WHY no entry: one mistake, one line
                self.bad_keys.add(key)
            else:
                entries.append(Entry(key=key, value=value, line=line))
            first_lines.setdefault(key, line)
        return entries

    def value(self, node: Any, *, depth: int = 0) -> Any:  # Any: yaml is imported late; see Entry
        """Give the value of a node."""
        line = node.start_mark.line + 1
        if id(node) in self._seen:
            # WHY: an alias may contain itself, and a few lines of them can fill the memory
            if not self._num_aliases:  # WHY once: one anchor may have dozens of them
                self._add(
                    line, "uses an alias (*name), which is not supported: write the value out"
                )
            self._num_aliases += 1
            return None
        if depth > DEEPEST:
            self._add(line, f"is nested more than {DEEPEST} levels deep")
            return None
        self._seen.add(id(node))
        kind = node.tag.removeprefix(_TAG)
        if kind not in _KINDS[node.id]:
            self._add(line, f"has the tag {node.tag}, which is not supported: remove it")
        elif node.id == "mapping":
            return {entry.key: entry.value for entry in self.entries(node, depth=depth)}
        elif node.id == "sequence":
            return [self.value(child, depth=depth + 1) for child in node.value]
        else:
            return self._scalar(node, kind, line)
        return None

    def _scalar(self, node: Any, kind: str, line: int) -> Any:  # Any: as above
        try:
            return _construct(kind, node.value)
        except (ValueError, KeyError):
            self._add(line, f"{shown(node.value)} can't be read as {kind}")
            return None

    def _add(self, line: int, problem: str) -> None:
        self.problems.append(f"{self.where}:{line}: {problem}")
