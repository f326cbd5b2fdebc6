"""A batch: the samples of one micro-batch, and those that could not be read.

Tensors may be nested as the dataset nests them (nesting.py).
Does not own: reading one (fetch.py).
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from hardened_ddp.data.batches.nesting import dense_parts, map_parts, map_tensors, pick, tensors_of

_LEAST_SHARE = 0.15  # of a batch's places, padding that a cut must leave out

Request = tuple[int, torch.Tensor]  # (epoch, indices of one micro-batch)


class BatchSource(Protocol):
    """Reads the batch of a request: a Fetcher for a map-style dataset, else a stream's reader."""

    dataset: Any  # the user's
    # The sample that is being read; other processes may read this.
    reading: "list[int] | memoryview[int]"  # WHY quoted: no type at run time before Python 3.14

    def __getitem__(self, request: Request) -> "Batch":
        """Read the batch of a request."""

    def name_of(self, index: int) -> str:
        """Return the file or the place of a sample, for messages; empty if it has none."""

    def pass_over(self, epoch: int, index: int, error: str) -> None:
        """Never read this sample again: it ends the process that reads it."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that can't be read, or has a value that the model can't take."""

    index: int
    error: str
    file: str = ""  # the file it is in, or its place in a stream, if that is known

    @property
    def name(self) -> str:
        return f"{self.index} ({self.file})" if self.file else str(self.index)


@dataclass(slots=True)
class Batch:
    """One micro-batch. Any: a tensor, or what the dataset nests tensors in."""

    inputs: Any
    targets: Any  # the labels; of classes (num_samples,) int64
    indices: torch.Tensor  # (num_samples,) int64: which samples these are
    bad: tuple[BadSample, ...] = ()
    troubles: tuple[str, ...] = ()  # errors of reads that were retried

    # Reads some of its samples, given their indices, as a batch of their own. None: they can be cut
    # out of this one, whose tensors have the sample as their first dimension.
    read_part: "Callable[[torch.Tensor], Batch] | None" = None

    # Its metrics are wanted. Not in training's steps between two reports: there a task may save the
    # cost of a metric, and give (0, 0).
    is_measured: bool = True

    @property
    def num_samples(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device, *, channels_last: bool = False) -> "Batch":
        """Return the batch on device; with channels_last, images in that memory format."""
        if device.type == "cpu" and not channels_last:
            return self
        inputs = move(self.inputs, device)
        if channels_last and isinstance(inputs, torch.Tensor) and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return replace(self, inputs=inputs, targets=move(self.targets, device), troubles=())

    def pin(self) -> None:
        """Move its tensors to page-locked memory: the host need not wait for copies to a GPU.

        One that a dataset has on a GPU stays as it is.
        """
        self.inputs, self.targets = map_tensors(
            (self.inputs, self.targets), lambda part: part.pin_memory() if part.is_cpu else part
        )

    def copied(self) -> "Batch":
        """Return the batch with copies of its data, for a forward that changes its inputs."""
        return replace(self, inputs=_copied(self.inputs), targets=_copied(self.targets))

    def size_bytes(self) -> int:
        tensors = tensors_of((self.inputs, self.targets))
        return sum(part.nbytes for tensor in tensors for part in dense_parts(tensor))


def _copied(value: Any) -> Any:  # Any: a dataset's data
    if isinstance(value, torch.Tensor):
        return value.clone()
    parts = map_parts(value, _copied)
    return copy.deepcopy(value) if parts is value else parts


def move(value: Any, device: torch.device) -> Any:  # Any: a dataset's data
    """Move all tensors of a nested value to device; what is no tensor passes through."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    # WHY first: a packed sequence or a graph knows which of its tensors stay on the CPU.
    if not isinstance(value, type) and callable(own := getattr(value, "to", None)):
        moved = own(device)
        return value if moved is None else moved
    return map_parts(value, lambda part: move(part, device))


def split(batches: Sequence[Batch], max_micro_batch: int) -> list[Batch]:
    """Split batches into micro-batches of at most max_micro_batch samples; 0: no limit.

    Empty ones are dropped.
    """
    found = []
    for batch in batches:
        size = batch.num_samples
        step = max_micro_batch if 0 < max_micro_batch < size else max(1, size)
        parts = [range(i, min(i + step, size)) for i in range(0, size, step)]
        found += [batch] if step == size else [take(batch, part) for part in parts]
    return [batch for batch in found if batch.num_samples]  # a part may lose its only sample


def take(batch: Batch, positions: Sequence[int]) -> Batch:
    indices = batch.indices[torch.as_tensor(list(positions), dtype=torch.int64)]
    if batch.read_part is not None:
        return batch.read_part(indices)
    whole = (batch.inputs, batch.targets)
    inputs, targets = pick(whole, positions, num_samples=batch.num_samples)
    return Batch(inputs, targets, indices)


def cut_by_length(batch: Batch, ignored: int, least_padding: int) -> list[Batch]:
    """Return the shorter and the longer samples, if that leaves out enough padding; else the batch.

    Padding begins behind a row's last label that is not ignored, and is one value in each input.
    least_padding: places to be left out, and a share of all; 0: any. Where it is cut follows from
    the batch alone, so a retry and a resumed run cut alike.
    """
    labels, number = batch.targets, batch.num_samples
    size = labels.numel()
    needed = least_padding and max(least_padding, _LEAST_SHARE * size)
    if number < 2 or size <= needed or labels.dim() != 2 or len(labels) != number:
        return [batch]
    ends = np.arange(1, labels.shape[1] + 1)
    is_used = (labels != ignored).numpy()
    shortest = int((is_used * ends).max(axis=1).argmin())
    for tensor in tensors_of(batch.inputs):
        if tensor.shape == labels.shape:
            is_used |= (tensor != tensor[shortest, -1]).numpy()
    lengths = (is_used * ends).max(axis=1)
    order = lengths.argsort(kind="stable")
    counts = np.arange(1, number)  # of the shorter samples
    sizes = counts * lengths[order[:-1]] + (number - counts) * lengths.max()
    if size - sizes.min() <= needed:
        return [batch]
    parts = [np.sort(part).tolist() for part in np.split(order, [counts[sizes.argmin()]])]
    return [_narrow(batch, part, max(1, int(lengths[part].max()))) for part in parts]


def _narrow(batch: Batch, positions: Sequence[int], length: int) -> Batch:
    """Return some samples; their labels, and inputs of the same shape, end at length."""
    shape, whole = batch.targets.shape, (batch.inputs, batch.targets)
    short = map_tensors(whole, lambda part: part[:, :length] if part.shape == shape else part)
    inputs, targets = pick(short, positions, num_samples=batch.num_samples)
    indices = batch.indices[torch.as_tensor(positions)]
    return replace(batch, inputs=inputs, targets=targets, indices=indices)
