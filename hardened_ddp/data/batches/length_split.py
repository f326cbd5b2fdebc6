"""A micro-batch in two parts, the shorter and the longer samples: then less of both is padding.

Owns where it is cut. It follows from the samples' shapes alone, never from a measurement, so two
runs of one seed, and a resumed one, cut alike.
Does not own: whether a run does this at all (preflight/padding.py), collating (fetch.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardened_ddp.data.batches.nesting import parts_in

FEWEST_SAMPLES = 8
"""Of a micro-batch that is cut."""

_FEWEST_IN_PART = 2
LEAST_SHARE = 0.15
"""Of the values of a micro-batch, padding included."""

_Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LengthSplit:
    """Cuts where that leaves out enough padding."""

    least_values: int
    """Padding to be left out, in values of inputs and labels; beside LEAST_SHARE of all values."""

    def places(self, samples: Sequence[Any]) -> tuple[list[int], list[int]] | None:
        """Return the places of the shorter and of the longer samples; None: it does not pay.

        Any: as the dataset returns them. It counts as if each were padded to the largest size of
        its part, in every dimension.
        """
        number = len(samples)
        if number < FEWEST_SAMPLES:
            return None
        shapes = [tuple(_shapes_in(sample)) for sample in samples]
        if len(set(shapes)) == 1 or len({tuple(map(len, shape)) for shape in shapes}) > 1:
            return None
        sizes = [sum(map(math.prod, shape)) for shape in shapes]
        order = sorted(range(number), key=sizes.__getitem__)
        shorter = _padded_sizes([shapes[place] for place in order])
        longer = _padded_sizes([shapes[place] for place in reversed(order)])
        whole = shorter[-1]

        def size_of(cut: int) -> int:
            return shorter[cut - 1] + longer[number - cut - 1]

        cut = min(range(_FEWEST_IN_PART, number - _FEWEST_IN_PART + 1), key=size_of)
        if whole - size_of(cut) < max(self.least_values, LEAST_SHARE * whole):
            return None
        return sorted(order[:cut]), sorted(order[cut:])


def _padded_sizes(shapes: Sequence[_Shapes]) -> list[int]:
    """Return for each n how many values the first n samples have when they are padded."""
    most, found = shapes[0], []
    for number, shape in enumerate(shapes, start=1):
        if shape != most:
            pairs = zip(most, shape, strict=True)
            most = tuple(tuple(map(max, one, other)) for one, other in pairs)
        found.append(number * sum(map(math.prod, most)))
    return found


def _shapes_in(value: Any) -> Iterator[tuple[int, ...]]:  # Any: a dataset's sample
    """Yield the shapes of all tensors, arrays and lists of numbers in a sample."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield tuple(value.shape)
    elif isinstance(value, list) and (not value or isinstance(value[0], int | float)):
        yield (len(value),)  # such as a tokenizer's
    else:
        for part in parts_in(value) or ():
            yield from _shapes_in(part)
