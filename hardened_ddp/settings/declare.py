"""How a setting is declared: by a type that says which values it takes, and a docstring.

    batch_size: Count = 32
    \"\"\"Samples per rank in one forward and backward.\"\"\"

The docstring is its only documentation: --help and config.yaml show it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

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

    def holds(self, value: float) -> bool:
        """Say whether value is a finite number between the ends."""
        is_above = value > self.low if self.is_low_open else value >= self.low
        is_below = value < self.high if self.is_high_open else value <= self.high
        return is_above and is_below and value < math.inf

    def words(self, *, found: float = 0) -> str:
        """Say which numbers these are; found: the one that is none of them."""
        low = f"above {self.low:g}" if self.is_low_open else f"{self.low:g} or more"
        if isinstance(found, float) and not math.isfinite(found):
            return f"{low}, finite"
        # WHY: that a count must fit into 32 bits matters only to someone who exceeded it
        if math.isinf(self.high) or (self.high >= LARGEST_COUNT and found <= self.high):
            return low
        return f"{low}, {'below' if self.is_high_open else 'at most'} {self.high}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a text must look like: a regular expression, and the same in words."""

    pattern: str
    words: str


class ImportPath(str):
    """A user's class or function, package.module:name, where a setting also has words."""

    __slots__ = ()


IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
ANY_TEXT = Shape(pattern=".*", words="text")
NOT_EMPTY = Shape(pattern=".+", words="text that is not empty")
IS_PLACE = "it names a folder or a file of this machine, so a URL is refused"
MAY_DIFFER = "ranks may have different values, such as a path on their own disk"

Count = Annotated[int, Bounds(low=1, high=LARGEST_COUNT)]
CountOrZero = Annotated[int, Bounds(low=0, high=LARGEST_COUNT)]
Seconds = Annotated[float, Bounds(low=0, high=ONE_WEEK_S, is_low_open=True)]
SecondsOrZero = Annotated[float, Bounds(low=0, high=ONE_WEEK_S)]
Fraction = Annotated[float, Bounds(low=0, high=1, is_high_open=True)]
NotNegative = Annotated[float, Bounds(low=0, high=math.inf)]
Text = Annotated[str, ANY_TEXT]
Place = Annotated[str, IS_PLACE]
PlaceOrNone = Annotated[str, ANY_TEXT, IS_PLACE]
OwnClass = Annotated[ImportPath, Shape(pattern=IMPORT_PATH, words="package.module:Class")]
OwnCallable = Annotated[ImportPath, Shape(pattern=IMPORT_PATH, words="package.module:callable")]
Arguments = Mapping[str, Any]  # Any: those of a callable that we don't know
Local = Annotated[T, MAY_DIFFER]
