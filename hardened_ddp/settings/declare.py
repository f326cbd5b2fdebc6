"""How a setting is declared: its default, its text, and the values that it takes.

The text beside a setting is its only documentation: --help and config.yaml show it.
WHY not a docstring under the field: Python throws those away, so there would be a second copy.
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST_COUNT = 2**31 - 1  # counts end up in C ints somewhere: batch sizes, worker counts
ONE_WEEK_S = 7 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The numbers that a setting may take; an open end is not one of them."""

    low: float
    high: float
    is_low_open: bool = False
    is_high_open: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a text must look like: a regular expression, and the same in words."""

    pattern: str
    words: str


class ImportPath(str):
    """A user's class or function, package.module:name, where a setting also has words."""

    __slots__ = ()


IMPORT_PATH = Shape(
    pattern=r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*",
    words="package.module:name",
)
COUNT = Bounds(low=1, high=LARGEST_COUNT)
COUNT_OR_ZERO = Bounds(low=0, high=LARGEST_COUNT)
SECONDS = Bounds(low=0, high=ONE_WEEK_S, is_low_open=True)
SECONDS_OR_ZERO = Bounds(low=0, high=ONE_WEEK_S)
FRACTION = Bounds(low=0, high=1, is_high_open=True)
NOT_NEGATIVE = Bounds(low=0, high=float("inf"))
ANY_TEXT = Shape(pattern=".*", words="text")
NOT_EMPTY = Shape(pattern=".+", words="text that is not empty")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a setting beside its name, type and default."""

    text: str  # what it does
    bounds: Bounds | None = None
    bare: str = ""  # what the flag means without a value
    shape: Shape = NOT_EMPTY  # what a text must look like
    may_differ: bool = False  # ranks may have different values, such as a path on their own disk
    is_place: bool = False  # it names a folder or a file of this machine, so a URL is refused
    path: str = ""  # what a setting of type `Literal[...] | ImportPath` takes beside its words


def setting(default: T, text: str, **facts: Any) -> T:  # Any: the other fields of Facts
    """Declare a field of a section: its default, what it does, and what values it takes."""
    metadata = {"facts": Facts(text=text, **facts)}
    if isinstance(default, dict):  # an empty one
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)
