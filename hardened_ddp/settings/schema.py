"""The settings as one flat table, and whether a value fits its setting.

Types are strict, as in YAML: an integer fits a float, but true fits no number, 3.0 no integer and
3 no text. Where the type is "X | None", the word auto stands for None.
Does not own: rules that tie two settings (rules.py); where values come from (layers.py).
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from hardened_ddp.settings.config import Config
from hardened_ddp.settings.declare import (
    IMPORT_PATH,
    LARGEST_COUNT,
    Bounds,
    Facts,
    ImportPath,
)
from hardened_ddp.settings.document import plain_value, read_word
from hardened_ddp.settings.wording import nearest, shown, url_problem

AUTO = "auto"
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
    has_auto: bool
    choices: tuple[str, ...]
    default: Any  # Any: of the type above
    facts: Facts

    @property
    def is_switch(self) -> bool:
        """Whether the flag may stand without a value, and --no_flag exists."""
        return self.type is bool or bool(self.facts.bare)


class Misfit(ValueError):
    """A value does not fit its setting; the text says what was found and what is needed."""


def read_table() -> dict[str, Setting]:
    """Read the sections of Config. Names are unique over all of them."""
    table: dict[str, Setting] = {}
    for section in dataclasses.fields(Config):
        assert isinstance(section.type, type)
        defaults = section.type()
        for field in dataclasses.fields(section.type):
            assert field.name not in table, f"two settings are called {field.name}"
            is_union = get_origin(field.type) in (UnionType, Union)
            kind: Any = get_args(field.type)[0] if is_union else field.type
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            table[field.name] = Setting(
                name=field.name,
                section=section.name,
                type=str if choices else dict if get_origin(kind) is Mapping else kind,
                has_auto=is_union and NoneType in get_args(field.type),
                choices=choices,
                default=getattr(defaults, field.name),
                facts=field.metadata["facts"],
            )
    return table


SETTINGS: Mapping[str, Setting] = read_table()
TITLES: Mapping[str, str] = {
    section.name: section.metadata["title"] for section in dataclasses.fields(Config)
}


def flatten(config: Config) -> dict[str, Any]:  # Any: each value has the type of its setting
    """Give all values by name, in the order of the table."""
    return {
        name: getattr(getattr(config, setting.section), name) for name, setting in SETTINGS.items()
    }


def assemble(values: Mapping[str, Any]) -> Config:  # Any: as in flatten
    """Build a Config from values that fit; what is missing has its default."""
    config = Config()
    for section in TITLES:
        given = {n: value for n, value in values.items() if SETTINGS[n].section == section}
        changed = dataclasses.replace(getattr(config, section), **given)
        config = dataclasses.replace(config, **{section: changed})
    return config


def from_text(setting: Setting, text: str) -> Any:  # Any: the type of the setting
    """Read a word of the command line. Raises Misfit."""
    if setting.type is dict:
        try:
            value = read_word(text)
        except ValueError as error:
            raise Misfit(str(error)) from error
        return fit(setting, value)
    return fit(setting, text if setting.type is str else plain_value(text))


def fit(setting: Setting, value: Any) -> Any:  # Any: from YAML; to the type of the setting
    """Give the value as the setting takes it. Raises Misfit if it does not fit."""
    if value is None:
        raise Misfit(f"has no value, needs {needs(setting)}")
    if setting.has_auto and value == AUTO:
        return None
    if setting.facts.bare and str(value).lower() in ("true", "false"):
        return "on" if str(value).lower() == "true" else "off"
    if setting.type is bool and str(value).lower() in ("on", "off"):  # as the start summary says it
        return str(value).lower() == "on"
    number = value
    if setting.type is float and type(value) is int:
        number = float(str(value))  # WHY str: of 400 digits it is infinite, and no OverflowError
    if type(number) is not setting.type:
        kind = _FOUND_WORDS.get(type(value), "")
        is_unquoted = setting.type is str and not setting.choices and type(value) in (int, float)
        hint = f'; as text it is written "{value}"' if is_unquoted else ""
        raise Misfit(f"found {shown(value)} ({kind}), needs {needs(setting)}{hint}")
    if setting.facts.path and ":" in value:
        if not re.fullmatch(IMPORT_PATH.pattern, value):
            raise Misfit(f"found {shown(value)}, needs {needs(setting)}")
        return ImportPath(value)
    _check(setting, number, given=value)
    return number


def needs(setting: Setting, *, found: float = 0) -> str:
    """Say in words what the setting takes; found: the number that it does not take."""
    if setting.choices:
        words = ("one of " if len(setting.choices) > 1 else "") + ", ".join(setting.choices)
        return f"{words}, or {setting.facts.path}" if setting.facts.path else words
    words = setting.facts.shape.words if setting.type is str else _TYPE_WORDS[setting.type]
    if setting.facts.bounds:
        words += f", {range_words(setting.facts.bounds, found=found)}"
    if setting.has_auto:
        words = f"auto, {words}" if setting.type is bool else f"auto or {words}"
    return words


def limits(setting: Setting) -> str:
    """Say in short, beside an example or a default, what the setting takes; empty for any."""
    if setting.choices:
        return " | ".join([*setting.choices, *filter(None, [setting.facts.path])])
    if setting.has_auto and setting.type is bool:
        return "auto | true | false"
    words = range_words(setting.facts.bounds) if setting.facts.bounds else ""
    return f"auto | {words}" if setting.has_auto else words


def range_words(bounds: Bounds, *, found: float = 0) -> str:
    low = f"above {bounds.low:g}" if bounds.is_low_open else f"{bounds.low:g} or more"
    if isinstance(found, float) and not math.isfinite(found):
        return f"{low}, finite"
    # WHY: that a count must fit into 32 bits matters only to someone who exceeded it
    if math.isinf(bounds.high) or (bounds.high >= LARGEST_COUNT and found <= bounds.high):
        return low
    return f"{low}, {'below' if bounds.is_high_open else 'at most'} {bounds.high}"


def is_within(value: float, bounds: Bounds) -> bool:
    """Say whether value is a finite number between the ends."""
    is_above = value > bounds.low if bounds.is_low_open else value >= bounds.low
    is_below = value < bounds.high if bounds.is_high_open else value <= bounds.high
    return is_above and is_below and value < math.inf


def _check(setting: Setting, value: Any, *, given: object) -> None:  # Any: the type of the setting
    """Raise Misfit if a value of the right type is not one of those that the setting takes."""
    hint = ""
    if setting.choices:
        is_fit = value in setting.choices
        near = "" if is_fit else nearest(value, setting.choices)
        hint = f"; did you mean {near}?" if near else ""
    elif setting.type is str:
        is_fit = re.fullmatch(setting.facts.shape.pattern, value) is not None
        if any("\udc80" <= letter <= "\udcff" for letter in value):
            raise Misfit(
                f"found {shown(value)}, of bytes that are no text in this locale (LANG, LC_ALL); "
                "needs one of UTF-8: export LC_ALL=C.UTF-8"
            )
        if not value.isprintable():
            raise Misfit(f"found {shown(value)}, needs text without control characters")
        if setting.facts.is_place and (problem := url_problem(value)):
            raise Misfit(problem)
        if value.startswith("~"):
            raise Misfit(f"found {shown(value)}, needs the whole path: only the shell knows ~")
    elif setting.type is dict:
        is_fit = True
        for key in value:
            if not key.isidentifier():
                # WHY the hint: in YAML {depth:18} is the key "depth:18" without a value
                hint = "; is a space missing after the colon?" if ":" in key else ""
                raise Misfit(f"found the key {shown(key)}, needs the name of an argument{hint}")
    else:
        is_fit = setting.facts.bounds is None or is_within(value, setting.facts.bounds)
    if not is_fit:
        found = 0 if isinstance(value, str) else value
        raise Misfit(f"found {shown(given)}, needs {needs(setting, found=found)}{hint}")
