"""The settings as one flat table, and whether a value fits its setting.

Types are strict, as in YAML: an integer fits a float, but true fits no number, 3.0 no integer and
3 no text. Where the type is "X | None", the word auto stands for None.
Does not own: rules that tie two settings, and where values come from (layers.py).
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hardened_ddp.settings.config import (
    IS_PLACE,
    MAY_DIFFER,
    NOT_EMPTY,
    Bounds,
    Config,
    ImportPath,
    Shape,
)
from hardened_ddp.settings.document import Misfit, plain_value, read_word
from hardened_ddp.settings.wording import shown, url_problem

AUTO = "auto"
# Where a value comes from, besides FILE:LINE.
DEFAULT, RUN, COMMAND_LINE = "default", "run", "command line"
_TYPE_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    dict: "a mapping such as {size: 28}",
}
_FOUND_WORDS = {**_TYPE_WORDS, bool: "a boolean", dict: "a mapping", list: "a list"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    section: str
    type: type  # bool, int, float, str or dict
    default: Any  # Any: of the type above
    choices: tuple[str, ...]
    bounds: Bounds | None
    shape: Shape  # what a text must look like
    has_auto: bool
    takes_path: bool  # also what a user wrote, as an ImportPath, beside its words
    may_differ: bool
    is_place: bool

    @property
    def is_switch(self) -> bool:
        """Whether the flag may stand without a value, and --no_flag exists."""
        return self.type is bool or "on" in self.choices


@dataclass(kw_only=True, slots=True)
class Layer:
    """The values that one place sets, as far as they fit."""

    values: dict[str, Any] = field(default_factory=dict)  # Any: the type of the setting
    sources: dict[str, str] = field(default_factory=dict)  # FILE:LINE, or one of the above
    problems: list[str] = field(default_factory=list)
    bad_names: set[str] = field(default_factory=set)
    # False: a part could not be read at all, so it is not known what it sets.
    is_complete: bool = True


def read_table() -> dict[str, Setting]:
    """Read the sections of Config. Names are unique over all of them."""
    table: dict[str, Setting] = {}
    for section in dataclasses.fields(Config):
        assert isinstance(section.type, type)
        for row in dataclasses.fields(section.type):
            assert row.name not in table, f"two settings are called {row.name}"
            kind, *others = _parts(row.type)
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            table[row.name] = Setting(
                name=row.name,
                section=section.name,
                type=str if choices else dict if get_origin(kind) is Mapping else kind,
                default=getattr(section.type(), row.name),
                choices=choices,
                bounds=next((part for part in others if isinstance(part, Bounds)), None),
                shape=next((part for part in others if isinstance(part, Shape)), NOT_EMPTY),
                has_auto=NoneType in others,
                takes_path=ImportPath in others,
                may_differ=MAY_DIFFER in others,
                is_place=IS_PLACE in others,
            )
    return table


def _parts(kind: Any) -> Iterator[Any]:  # Any: an annotation
    """Give the types that an annotation is made of, and what stands beside them."""
    is_marked = get_origin(kind) is Annotated
    if is_marked or get_origin(kind) in (UnionType, Union):
        for part in (kind.__origin__,) if is_marked else get_args(kind):
            yield from _parts(part)
        yield from getattr(kind, "__metadata__", ())
    else:
        yield kind


SETTINGS: Mapping[str, Setting] = read_table()
TITLES: Mapping[str, str] = {
    section.name: section.metadata["title"] for section in dataclasses.fields(Config)
}


def names_of(section: str) -> list[str]:
    return [name for name, setting in SETTINGS.items() if setting.section == section]


def flatten(config: Config) -> dict[str, Any]:  # Any: each value has the type of its setting
    """Give all values by name, in the order of the table."""
    return {
        name: getattr(getattr(config, setting.section), name) for name, setting in SETTINGS.items()
    }


def assemble(values: Mapping[str, Any]) -> Config:  # Any: as in flatten
    """Build a Config from values that fit; what is missing has its default."""
    config = Config()
    for section in TITLES:
        given = {name: values[name] for name in names_of(section) if name in values}
        changed = dataclasses.replace(getattr(config, section), **given)
        config = dataclasses.replace(config, **{section: changed})
    return config


def from_text(setting: Setting, text: str) -> Any:  # Any: the type of the setting
    """Read a word of the command line. Raises Misfit."""
    if setting.type is not str:
        return fit(setting, read_word(text) if setting.type is dict else plain_value(text))
    return fit(setting, text)


def fit(setting: Setting, value: Any) -> Any:  # Any: from YAML; to the type of the setting
    """Give the value as the setting takes it. Raises Misfit if it does not fit."""
    if value is None:
        raise Misfit(f"has no value, needs {needs(setting)}")
    if setting.has_auto and value == AUTO:
        return None
    word = str(value).lower()
    if setting.is_switch and word in ("true", "false", "on", "off"):
        is_on = word in ("true", "on")
        return is_on if setting.type is bool else "on" if is_on else "off"
    if setting.type is float and type(value) is int:
        value = float(str(value))  # WHY str: of 400 digits it is infinite, and no OverflowError
    if (kind := type(value)) is not setting.type:
        found = f"{shown(value)} ({_FOUND_WORDS.get(kind, kind.__name__)})"
        raise Misfit(f"found {found}, needs {needs(setting)}")
    is_path = setting.takes_path and ":" in value
    if setting.choices and not is_path:
        is_fit = value in setting.choices
    elif setting.type is str:
        _check_text(setting, value)
        is_fit = re.fullmatch(setting.shape.pattern, value) is not None
    elif setting.type is dict:  # in YAML {depth:18} is the key "depth:18" without a value
        for key in (key for key in value if not key.isidentifier()):
            raise Misfit(f"found the key {shown(key)}, needs NAME: VALUE, with a space between")
        is_fit = True
    else:
        is_fit = setting.bounds is None or setting.bounds.holds(value)
    if not is_fit:
        raise Misfit(f"found {shown(value)}, needs {needs(setting)}")
    return ImportPath(value) if is_path else value


def needs(setting: Setting) -> str:
    """Say in words what the setting takes."""
    if setting.choices:
        words = ("one of " if len(setting.choices) > 1 else "") + ", ".join(setting.choices)
        return f"{words}, or {setting.shape.words}" if setting.takes_path else words
    words = setting.shape.words if setting.type is str else _TYPE_WORDS[setting.type]
    if setting.bounds:
        words += f", {setting.bounds.words(in_full=True)}"
    if setting.has_auto:
        words = f"auto, {words}" if setting.type is bool else f"auto or {words}"
    return words


def _check_text(setting: Setting, value: str) -> None:
    """Raise Misfit if a text can't be used, whatever its setting takes."""
    if any("\udc80" <= letter <= "\udcff" for letter in value):
        why = "of bytes that are no text in this locale (LANG, LC_ALL); needs one of UTF-8: "
        raise Misfit(f"found {shown(value)}, {why}export LC_ALL=C.UTF-8")
    if not value.isprintable():
        raise Misfit(f"found {shown(value)}, needs text without control characters")
    if setting.is_place and (problem := url_problem(value)):
        raise Misfit(problem)
    if value.startswith("~"):
        raise Misfit(f"found {shown(value)}, needs the whole path: only the shell knows ~")
