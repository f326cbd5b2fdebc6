"""Reading the samples of one micro-batch, in this process or in a worker.

Owns what a batch is, and what becomes of a sample that can't be read: it is set aside with its
reason, and the batch holds the rest; the caller decides what that means.
WHY errors never leave as exceptions: one that can't be pickled would hang a worker's reader, and
one sample's error would cost the whole batch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from hardened_ddp.data.memory import MemoryImages
from hardened_ddp.ranks.seeding import seed_sample

RETRY_WAITS_S = (0.1, 0.5, 2.0)
"""A network disk often answers the second time; a broken file never does."""

Request = tuple[int, torch.Tensor]
"""(epoch, indices of one micro-batch)."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that can't be read."""

    index: int
    error: str


@dataclass(slots=True)
class Batch:
    """One micro-batch. Any: a tensor, or what the dataset nests tensors in."""

    inputs: Any
    targets: torch.Tensor
    """(num_samples,) int64."""

    indices: torch.Tensor
    """(num_samples,) int64: which samples these are."""

    bad: tuple[BadSample, ...] = ()

    @property
    def num_samples(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device, *, channels_last: bool = False) -> "Batch":
        """Give the batch on device; images with channels last if asked."""
        if device.type == "cpu" and not channels_last:
            return self
        inputs = _map_tensors(self.inputs, lambda tensor: tensor.to(device, non_blocking=True))
        if channels_last and isinstance(inputs, torch.Tensor) and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        targets = self.targets.to(device, non_blocking=True)
        return Batch(inputs, targets, self.indices, self.bad)

    def pin_memory(self) -> "Batch":
        """Give the batch in page-locked memory; torch's DataLoader calls this."""
        inputs = _map_tensors(self.inputs, lambda tensor: tensor.pin_memory())
        return Batch(inputs, self.targets.pin_memory(), self.indices, self.bad)

    def size_bytes(self) -> int:
        """Count the bytes of all tensors."""
        sizes: list[int] = []
        _map_tensors((self.inputs, self.targets), lambda tensor: sizes.append(tensor.nbytes))
        return sum(sizes)


class Fetcher:
    """Reads micro-batches of one dataset. Picklable if the dataset is."""

    def __init__(self, dataset: Any, *, seed: int) -> None:  # Any: a map-style dataset
        self.dataset = dataset
        self.seed = seed
        self.reads_batches = hasattr(dataset, "__getitems__")

    def __getitem__(self, request: Request) -> Batch:
        """Read one micro-batch. The name is what torch's DataLoader calls in a worker."""
        epoch, indices = request
        if isinstance(self.dataset, MemoryImages):
            return Batch(*self.dataset.fetch(indices, seed=self.seed, epoch=epoch), indices)
        if self.reads_batches:
            try:
                return self._read_batch(indices)
            except Exception:  # WHY broad and then on: sample by sample it will be known which
                return self._read_samples(epoch, indices)
        return self._read_samples(epoch, indices)

    def _read_batch(self, indices: torch.Tensor) -> Batch:
        """Read all at once: a collated batch, or a list of samples, both are in use."""
        found = self.dataset.__getitems__(indices.tolist())
        if isinstance(found, list):
            found = default_collate(found)
        inputs, targets = found
        return Batch(inputs, targets, indices)

    def _read_samples(self, epoch: int, indices: torch.Tensor) -> Batch:
        samples, good, bad = [], [], []
        for index in indices.tolist():
            # WHY per sample: its augmentation must not depend on which rank or worker reads it.
            seed_sample(self.seed, epoch, index)
            try:
                inputs, target = self._read_sample(index)
                samples.append((inputs, torch.as_tensor(target)))
                good.append(index)
            except Exception as error:  # WHY broad: the user's code; reported with its index
                bad.append(BadSample(index, f"{type(error).__name__}: {error}"))
        if not samples:
            empty = torch.empty(0, dtype=torch.int64)
            return Batch(torch.empty(0), empty, empty, tuple(bad))
        inputs, targets = default_collate(samples)
        return Batch(inputs, targets, torch.tensor(good), tuple(bad))

    def _read_sample(self, index: int) -> Any:  # Any: whatever the dataset returns
        """Read one sample; after an OSError that a second try may not meet, wait and try again."""
        for wait_s in RETRY_WAITS_S:
            try:
                return self.dataset[index]
            except (FileNotFoundError, PermissionError, IsADirectoryError):
                raise
            except OSError as error:
                if error.errno is None:  # raised by a decoder on bad bytes: no disk is to blame
                    raise
                time.sleep(wait_s)
        return self.dataset[index]


def _map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_map_tensors(part, change) for part in value)
    return value
