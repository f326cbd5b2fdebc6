"""Samples and batches as datasets nest them: mappings, tuples, lists, dataclasses, None, strings.

What is no tensor and no container passes through unchanged.
Does not own: which part of a sample is its label, collating by a user's code (collate.py).
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply change to each tensor of a nested value. Any: a dataset's data."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return map_parts(value, lambda part: map_tensors(part, change))


def map_parts(value: Any, change: Callable[[Any], Any]) -> Any:  # Any: a dataset's data
    """Rebuild a container with change applied to each part; return anything else as it is."""
    parts = parts_in(value)
    return value if parts is None else _remade(value, [change(part) for part in parts])


def stack(samples: Sequence[Any]) -> Any:  # Any: foreign samples
    """Collate samples as torch's default_collate does, and dataclasses and None, too.

    None stays None; strings become a list.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        parts = [stack(column) for column in zip(*samples, strict=True)]
        return _remade(first, parts) if hasattr(first, "_fields") else parts
    if is_dataclass(first):
        columns = ([getattr(sample, name) for sample in samples] for name in fields_of(first))
        return _remade(first, [stack(column) for column in columns])
    if first is None:
        if any(sample is not None for sample in samples):
            raise TypeError("some samples have None where others have a value")
        return None
    # WHY not default_collate: in a worker it allocates shared memory, which may be full
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        samples = [torch.as_tensor(sample) for sample in samples]
    if isinstance(samples[0], torch.Tensor):
        return torch.stack(list(samples))
    return default_collate(list(samples))


def pick(value: Any, positions: Sequence[int], *, num_samples: int) -> Any:  # Any: as in stack
    """Take the samples at positions out of a batch of num_samples that stack made.

    Tensors have the sample as their first dimension; a list of strings has one for each sample.
    Anything else is not of a single sample, and stays.
    """
    index = torch.as_tensor(list(positions), dtype=torch.int64)

    def taken(part: Any) -> Any:  # Any: as above
        if isinstance(part, torch.Tensor):
            if part.dim() == 0 or len(part) != num_samples:
                return part
            rows = part[index.to(part.device)]
            return rows.pin_memory() if part.is_pinned() else rows
        if isinstance(part, list) and part and all(isinstance(p, str | bytes) for p in part):
            return [part[i] for i in positions] if len(part) == num_samples else part
        return map_parts(part, taken)

    return taken(value)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:  # Any: a dataset's data
    return (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the ordinary tensors that hold the values of a sparse, nested or ordinary one."""
    if tensor.is_nested:
        return list(tensor.unbind())
    match tensor.layout:
        case torch.sparse_coo:
            whole = tensor.coalesce()
            return [whole.indices(), whole.values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case _:
            return [tensor]


def leaves(value: Any) -> Iterator[Any]:  # Any: a dataset's data
    """Yield what a nested value holds: tensors, strings, None, and what has no parts."""
    parts = parts_in(value)
    if parts is None:
        yield value
        return
    for part in parts:
        yield from leaves(part)


def parts_in(value: Any) -> Sequence[Any] | None:  # Any: a dataset's data
    """Return the parts of a container; None: value is none."""
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, Mapping):
        return list(value.values())
    return list(fields_of(value).values()) if is_dataclass(value) else None


def is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> dict[str, Any]:  # Any: an instance of any dataclass
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _remade(value: Any, parts: Sequence[Any]) -> Any:  # Any: a container
    """Make a container like value, of other parts."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # WHY tuple's: a class such as PackedSequence may take other arguments than its parts
        return tuple.__new__(type(value), parts)
    if isinstance(value, tuple | list):
        return type(value)(parts)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return dict(zip(value, parts, strict=True))
    # WHY a copy: a mapping of a library, such as a tokenizer's, has methods of its own; and
    # dataclasses.replace would run the checks of __post_init__ on collated values, and refuses
    # fields that __init__ does not take. WHY object's: a dataclass may be frozen.
    clone = copy.copy(value)
    is_mapping = isinstance(value, Mapping)
    put = clone.__setitem__ if is_mapping else partial(object.__setattr__, clone)
    for name, part in zip(value if is_mapping else fields_of(value), parts, strict=True):
        put(name, part)
    return clone
