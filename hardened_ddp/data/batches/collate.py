"""How samples become a batch: torch's way, or a function of the user's.

The function is --collate, or the dataset's own collate_fn. Its errors name the samples, and the
line of the user's code.
Does not own: reading the samples (fetch.py).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from hardened_ddp.data.batches.batch import BadSample, Batch
from hardened_ddp.data.batches.nesting import fields_of, is_dataclass, stack
from hardened_ddp.data.foreign_code import describe, import_callable, line_of_user
from hardened_ddp.errors import ANY_FAILURE, DataError, SampleError

# Takes the samples of a batch, as the dataset returns them; returns what split_targets takes.
Collate = Callable[[list[Any]], Any]

# Names that the target may have in a sample that is a mapping.
LABEL_NAMES = ("labels", "label", "targets", "target")
_MAX_TEXT = 400  # characters of the text that describes a sample's shape


def find_collate(dataset: Any, setting: str) -> Collate | None:  # Any: a map-style dataset
    """Return the function that makes batches of dataset; None: torch's way. Raises DataError.

    setting: the value of --collate. auto: the dataset's collate_fn, if it has one.
    """
    if setting == "auto":
        while isinstance(dataset, Subset) and not hasattr(dataset, "collate_fn"):
            dataset = dataset.dataset
        own: Collate | None = getattr(dataset, "collate_fn", None)
        return own
    return import_callable(setting, setting="collate", error=DataError)


def split_targets(data: Any) -> tuple[Any, Any]:  # Any: a foreign sample, or a batch of them
    """Split data into inputs and targets; targets are None if there are none.

    A pair is (inputs, targets). A longer tuple has its targets last. A mapping has them under one
    of LABEL_NAMES. Anything else is inputs only. Raises TypeError for what is no data of a sample.
    """
    is_pair = isinstance(data, tuple | list) and len(data) == 2
    if is_dataclass(data):
        data = fields_of(data)
    elif hasattr(data, "_asdict") and not is_pair:
        data = data._asdict()
    if isinstance(data, Mapping):
        for name in LABEL_NAMES:
            if name in data:
                return {key: data[key] for key in data if key != name}, data[name]
        return data, None
    if is_pair:
        return data[0], data[1]
    if isinstance(data, tuple | list) and data:
        return (data[0], None) if len(data) == 1 else (tuple(data[:-1]), data[-1])
    if data is None or isinstance(data, str | int | float | tuple | list):
        raise TypeError(
            f"a sample is a {type(data).__name__}; need an input tensor, (input tensor, label), or "
            "a mapping"
        )
    return data, None


def collate(
    samples: Sequence[Any],  # Any: as the dataset returns them
    numbers: Sequence[int],
    bad: tuple[BadSample, ...] = (),
    *,
    by: Collate | None = None,
) -> Batch:
    """Collate samples as stack does, or by the user's function. Raises SampleError.

    A sample whose shape differs from that of most, or that the function can't take even alone, is
    bad.
    """
    if not samples:
        empty = torch.empty(0, dtype=torch.int64)
        return Batch(torch.empty(0), empty, empty, bad)
    try:
        inputs, targets = split_targets((by or stack)(list(samples)))
    except ANY_FAILURE as error:  # WHY broad: the user's code; default_collate raises what it meets
        found = _misshapen(samples) if by is None else _failing_places(by, samples)
        if len(found) in (0, len(samples)):  # no single sample is the cause
            raise _failure(numbers, error, is_own=by is not None) from error
        kept = [place for place in range(len(samples)) if place not in found]
        bad += tuple(BadSample(numbers[place], text) for place, text in found.items())
        return collate([samples[p] for p in kept], [numbers[p] for p in kept], bad, by=by)
    # WHY only rows of numbers: a collate may pack several samples into one row, and then it has
    # fewer rows than samples; but one label for each sample is left out if there are fewer.
    is_row = isinstance(targets, torch.Tensor) and targets.dim() == 1
    if by is not None and is_row and len(targets) < len(samples):
        raise SampleError(
            f"collate failed on samples {[*numbers[:4]]}: it returned {len(targets)} labels for "
            f"{len(samples)} samples: some are left out",
            fix="keep every sample: to leave one out, make the dataset shorter",
        )
    # WHY numpy: torch.tensor takes five times as long for a list
    return Batch(inputs, targets, torch.from_numpy(np.array(numbers)), bad)


def _failure(numbers: Sequence[int], error: BaseException, *, is_own: bool) -> SampleError:
    """Return the error if no batch can be made, though no sample alone is the cause."""
    if is_own:
        what = f"collate failed on samples {[*numbers[:4]]}"
        fix = "it takes a list of samples, as dataset[i] returns them, and returns (inputs, "
        fix += "labels), or a mapping with 'labels'"
    else:
        what = f"samples {[*numbers[:4]]} can't be made into a batch"
        fix = "make __getitem__ return (input tensor, label), all of one shape; or make batches "
        fix += "yourself, with --collate package.module:callable"
    return SampleError(f"{what}: {describe(error)}{line_of_user(error)}", fix=fix)


def _misshapen(samples: Sequence[Any]) -> dict[int, str]:
    """Return by position what is wrong with the shapes that differ from that of most."""
    shapes = [_shape(sample) for sample in samples]
    usual, count = Counter(shapes).most_common(1)[0]
    # WHY no majority: samples that all differ are meant to, and none of them is wrong.
    if 2 * count <= len(shapes) != 2:
        return {}
    return {
        place: f"it is {shape}, where the others are {usual}"[:_MAX_TEXT]
        + "; if samples may differ, set --collate"
        for place, shape in enumerate(shapes)
        if shape != usual
    }


def _failing_places(by: Collate, samples: Sequence[Any]) -> dict[int, str]:
    """Return the samples, by position, that a collate can't take alone, each with its error."""
    found = {}
    for place, sample in enumerate(samples):
        try:
            by([sample])
        except ANY_FAILURE as error:  # WHY broad: the user's code; reported for its sample
            found[place] = f"collate: {describe(error)}{line_of_user(error)}"
    return found


def _shape(data: Any) -> str:  # Any: a foreign sample
    """Describe what must be equal for collating: types, names, and the shapes of tensors."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return f"{type(data).__name__} of {tuple(data.shape)} {data.dtype}"
    if isinstance(data, tuple | list):
        return "(" + ", ".join(map(_shape, data)) + ")"
    named = data if isinstance(data, Mapping) else fields_of(data) if is_dataclass(data) else None
    if named is None:
        return type(data).__name__
    kind = "" if named is data else type(data).__name__
    return kind + "{" + ", ".join(f"{name}: {_shape(named[name])}" for name in named) + "}"
