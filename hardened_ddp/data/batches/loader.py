"""The loaders of a rank: its share of each training window, and of the test set.

Owns which batches are requested, and in which order. Whatever happens to a worker, they arrive in
this order, each exactly once.
Does not own: reading them (batch_reader.py), which rank gets which samples (sampler.py).
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from hardened_ddp.data.batches.batch import Batch, Request, apart
from hardened_ddp.data.batches.batch_reader import BatchReader
from hardened_ddp.data.batches.checks import fix_for_all
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.length_split import LengthSplit
from hardened_ddp.data.batches.sampler import (
    Window,
    WindowSampler,
    num_micro_batches,
    share_of,
    split_evenly,
)
from hardened_ddp.errors import SampleError

_FIRST_SAMPLES = 8  # of the test set: a wrong form shows in the first ones


class TrainLoader:
    """The training windows of this rank, with their micro-batches."""

    def __init__(self, sampler: WindowSampler, reader: BatchReader) -> None:
        self.sampler = sampler
        self.reader = reader
        self.split: LengthSplit | None = None
        """Micro-batches come in two parts, where that leaves out enough padding."""

    def split_by_length(self, split: LengthSplit | None) -> None:
        """Cut micro-batches by this from now on. Before the first window."""
        assert isinstance(self.reader.fetcher, Fetcher)
        self.split = self.reader.fetcher.split = split

    def windows(
        self, epoch: int, start: int, step: int = 0
    ) -> Iterator[tuple[Window, list[Batch]]]:
        """Yield each window from the cursor start on, and this rank's share, which may be empty.

        step: the steps done before; of a map-style dataset nothing depends on it.
        """
        sampler = self.sampler
        sampler.set_epoch(epoch)

        def requests() -> Iterator[Request]:
            for window in sampler.windows(start):
                for indices in sampler.micro_batches(window):
                    yield epoch, indices

        batches = self.reader.batches(requests)
        for window in sampler.windows(start):
            # WHY without a call for one: this is the usual case, in each step
            is_one = (
                sampler.num_replicas <= window.size <= sampler.batch_size * sampler.num_replicas
            )
            number = 1 if is_one else len(sampler.micro_batch_sizes(window))
            share = [next(batches) for _ in range(number)]
            if self.split is not None:
                share = apart(share)
            yield window, [self.reader.fetcher.with_parts(batch, epoch) for batch in share]
        next(batches, None)  # WHY: the stream then reaches its end, and keeps its idle workers

    def sample_batches(self, device: torch.device) -> list[Batch]:
        """Read two batches of two samples, different ones on each rank, to probe the model.

        Raises SampleError if none of the first samples can be read.
        """
        sampler, found = self.sampler, []
        size = sampler.num_total
        for number in range(8):
            first = (sampler.rank * 2 + number * 2 * sampler.num_replicas) % size
            indices = sampler.order(0).take(first, first + min(2, size - first))
            batch = self.reader.fetcher[(0, indices)]
            if batch.num_samples:
                found.append(self.reader.fetcher.with_parts(batch, 0).to(device))
            if len(found) == 2:
                return found
        if not found:
            raise SampleError(
                f"none of the first samples can be read: {batch.bad[0].error}",
                fix=fix_for_all(batch.bad[0].error),
            )
        return found

    def open_folder(self, run: Path) -> None:
        """Take the run folder: a map-style dataset has nothing to keep there."""

    def close(self) -> None:
        """End the workers."""
        self.reader.close()


class EvalLoader:
    """This rank's share of the test set, each sample once."""

    def __init__(
        self, size: int, reader: BatchReader, *, batch_size: int, rank: int, world_size: int
    ) -> None:
        self.reader = reader
        self.size, self.batch_size = size, batch_size
        self.first, self.last = share_of(size, rank=rank, world_size=world_size)
        self.most_batches = num_micro_batches(size, batch_size=batch_size, world_size=world_size)
        """Batches of each rank that has samples for them: a loop over them is equally long."""

    def __iter__(self) -> Iterator[Batch]:
        def requests() -> Iterator[Request]:
            for start, stop in split_evenly(self.last - self.first, self.most_batches):
                yield 0, torch.arange(self.first + start, self.first + stop)

        return self.reader.batches(requests)

    def first_samples(self) -> Batch:
        """Read the first samples of this rank's share, at most 8, in this process."""
        # WHY from 0 of a stream: anything behind it is reached by reading all before it.
        in_order = getattr(self.reader.fetcher.dataset, "is_read_in_order", False)
        first = 0 if in_order or self.first >= self.last else self.first
        most = min(first + _FIRST_SAMPLES, self.size)
        return self.reader.fetcher[(0, torch.arange(first, most))]

    def close(self) -> None:
        """End the workers."""
        self.reader.close()
