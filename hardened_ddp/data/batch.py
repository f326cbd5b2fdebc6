"""A batch: the samples of one micro-batch, and those that could not be read.

Owns splitting a batch and moving it. Tensors may be nested as the dataset nests them.
Does not own: reading one (fetch.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

Request = tuple[int, torch.Tensor]
"""(epoch, indices of one micro-batch)."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that can't be read, or has a value that the model can't take."""

    index: int
    error: str
    file: str = ""
    """The file it is in, if that is known."""

    @property
    def name(self) -> str:
        """Its number, and its file if that is known."""
        return f"{self.index} ({self.file})" if self.file else str(self.index)


@dataclass(slots=True)
class Batch:
    """One micro-batch. Any: a tensor, or what the dataset nests tensors in."""

    inputs: Any
    targets: torch.Tensor
    """(num_samples,) int64."""

    indices: torch.Tensor
    """(num_samples,) int64: which samples these are."""

    bad: tuple[BadSample, ...] = ()
    troubles: tuple[str, ...] = ()
    """Errors of reads that were retried."""

    @property
    def num_samples(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device, *, channels_last: bool = False) -> "Batch":
        """Return the batch on device; with channels_last, images in that memory format."""
        if device.type == "cpu" and not channels_last:
            return self
        inputs = map_tensors(self.inputs, lambda tensor: tensor.to(device, non_blocking=True))
        if channels_last and isinstance(inputs, torch.Tensor) and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        targets = self.targets.to(device, non_blocking=True)
        return Batch(inputs, targets, self.indices, self.bad)

    def size_bytes(self) -> int:
        """Count the bytes of all tensors."""
        sizes: list[int] = []
        map_tensors((self.inputs, self.targets), lambda tensor: sizes.append(tensor.nbytes))
        return sum(sizes)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply change to each tensor in nested mappings, tuples and lists. Any: a dataset's data."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple takes them as *args
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(part, change) for part in value)
    return value


def stack(samples: Sequence[Any]) -> Any:
    """Collate samples as torch's default_collate does, but never in shared memory."""
    first = samples[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(samples))
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        return torch.stack([torch.as_tensor(sample) for sample in samples])
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        parts = [stack(column) for column in zip(*samples, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else parts
    return default_collate(list(samples))


def split(batches: Sequence[Batch], most_samples: int) -> list[Batch]:
    """Split batches into micro-batches of at most most_samples; 0: don't split. Drops empty ones."""
    found = []
    for batch in batches:
        size = batch.num_samples
        step = most_samples if 0 < most_samples < size else max(1, size)
        if step == size:
            found.append(batch)
        else:
            found += [take(batch, range(i, min(i + step, size))) for i in range(0, size, step)]
    return [batch for batch in found if batch.num_samples]


def take(batch: Batch, positions: Sequence[int]) -> Batch:
    """Return some samples of a batch. The first dimension of its input tensors is the sample."""
    index = torch.as_tensor(list(positions), dtype=torch.int64)

    def pick(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[index] if tensor.dim() and len(tensor) == batch.num_samples else tensor

    inputs = map_tensors(batch.inputs, pick)
    return Batch(inputs, batch.targets[index], batch.indices[index])
