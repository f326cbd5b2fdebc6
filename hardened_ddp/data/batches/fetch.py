"""Reading the samples of one micro-batch, in this process or in a worker.

A sample that can't be read is retried, then reported with its reason, and the batch holds the other
samples; so does one with a value that the model can't take (checks.py). The caller decides what to
do.
WHY errors are not raised as exceptions: one that can't be pickled would hang a worker's reader, and
one sample's error would cost the whole batch.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from hardened_ddp.data.batches.batch import BadSample, Batch, Request, take
from hardened_ddp.data.batches.checks import Checks
from hardened_ddp.data.batches.collate import Collate, collate, split_targets
from hardened_ddp.data.batches.images import MemoryImages
from hardened_ddp.data.batches.read_errors import BadSamples, file_of, is_transient, retry_read
from hardened_ddp.data.foreign_code import describe, import_torchvision
from hardened_ddp.errors import ANY_FAILURE
from hardened_ddp.ranks.seeding import seed_sample


def reads_batches(dataset: Any) -> bool:
    """Return whether a map-style dataset is read a batch at a time, as torch's DataLoader would."""
    # WHY: a Subset always has __getitems__. If its dataset has none, reading sample by sample is
    # the same work, and each sample gets its own seed.
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


class Fetcher:
    """Reads micro-batches of one dataset. Picklable if the dataset is."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        checks: Checks | None = None,
        collate: Collate | None = None,
    ) -> None:
        """dataset: a map-style one. checks: what makes a sample unusable. collate: the user's."""
        self.dataset = dataset
        self.seed = seed
        self.collate = collate
        self.checks = checks or Checks()
        # The sample that is being read, if read one by one; other processes may read this.
        self.reading: list[int] | memoryview[int] = [-1]

        self.reads_batches = reads_batches(dataset)
        is_random = not isinstance(dataset, TensorDataset)
        self.uses_randomness = getattr(dataset, "uses_randomness", is_random)
        # WHY: a part of a collated batch is read again, and must get the same random numbers.
        if collate is not None and self.uses_randomness:
            self.reads_batches = False

    def __getstate__(self) -> dict[str, Any]:
        # WHY first: unpickling a torchvision dataset imports torchvision, and a worker must repair
        # that import before if this process had to.
        needed = {"_needed": _Torchvision()} if "torchvision" in sys.modules else {}
        return {**needed, **self.__dict__, **needed, "reading": [-1]}

    def __getitem__(self, request: Request) -> Batch:
        """Read one micro-batch. torch's DataLoader calls this in a worker."""
        epoch, indices = request
        if isinstance(self.dataset, MemoryImages) and self.collate is None:
            images, labels = self.dataset.fetch(indices, seed=self.seed, epoch=epoch)
            batch = Batch(images, labels, indices)
            return batch if self.checks.is_clean else self._checked(batch, epoch)
        read = self._read_whole if self.reads_batches else self._read_samples
        return self._checked(read(epoch, indices), epoch)

    def name_of(self, index: int) -> str:
        """Return the file of a sample, if it is known."""
        return file_of(self.dataset, index)

    def pass_over(self, epoch: int, index: int, error: str) -> None:
        """Do nothing: a bad sample of a map-style dataset keeps nobody from the others."""

    def with_parts(self, batch: Batch, epoch: int) -> Batch:
        """Let parts of a batch that this fetcher read, here or in a worker, be read again.

        WHY: what a user's collate made can't be cut by samples: it pads, packs and joins them.
        """
        if self.collate is not None:
            batch.read_part = partial(self._read_part, epoch)
        return batch

    def _read_part(self, epoch: int, indices: torch.Tensor) -> Batch:
        return self.with_parts(self[(epoch, indices)], epoch)

    def assemble(self, epoch: int, samples: Sequence[Any], numbers: Sequence[int]) -> Batch:
        """Make a batch of samples that were read already. Any: as the dataset returns them."""
        return self._checked(collate(samples, numbers, by=self.collate), epoch)

    def _read_whole(self, epoch: int, indices: torch.Tensor) -> Batch:
        """Read all at once; if that fails, sample by sample, which finds the bad one."""
        read = partial(self._read_batch, epoch, indices)
        troubles: list[str] = []
        try:
            try:
                return read()
            except ANY_FAILURE as error:  # WHY broad: the user's code
                if not is_transient(error):
                    raise
                return replace(retry_read(read, error, troubles), troubles=tuple(troubles))
        except MemoryError:
            raise
        except ANY_FAILURE as error:  # WHY broad: as above; _read_samples reports it
            troubles += [describe(error)] if troubles else []
        return self._read_samples(epoch, indices, troubles)

    def _read_batch(self, epoch: int, indices: torch.Tensor) -> Batch:
        """Read all at once; the dataset returns a collated batch or a list of samples."""
        numbers: list[int] = indices.tolist()
        if self.uses_randomness:
            seed_sample(self.seed, epoch, numbers[0])
        found = self.dataset.__getitems__(numbers)
        if isinstance(found, list) and len(found) == len(numbers):
            return collate(found, numbers, by=self.collate)
        if self.collate is not None:
            raise TypeError(
                f"__getitems__ returned a {type(found).__name__}, not a list of samples to collate"
            )
        return Batch(*split_targets(found), indices)

    def _read_samples(
        self, epoch: int, indices: torch.Tensor, troubles: Sequence[str] = ()
    ) -> Batch:
        samples: list[Any] = []
        good: list[int] = []
        bad = BadSamples()
        told = list(troubles)
        dataset, reading, seeds = self.dataset, self.reading, self.uses_randomness
        for index in indices.tolist():
            reading[0] = index
            try:
                try:
                    if seeds:  # as _read_sample does, without a call for each sample
                        seed_sample(self.seed, epoch, index)
                    samples.append(dataset[index])
                except Exception as error:  # WHY broad: the user's code
                    read = partial(self._read_sample, epoch, index)
                    samples.append(retry_read(read, error, told))
                good.append(index)
            except BaseException as error:  # WHY broad: the user's code; see BadSamples
                bad.add(index, error, file_of(self.dataset, index, error))
        batch = collate(samples, good, tuple(bad), by=self.collate)
        return replace(batch, troubles=tuple(told)) if told else batch

    def _read_sample(self, epoch: int, index: int) -> Any:  # Any: the dataset's sample
        # WHY per sample: its augmentation must not depend on which rank or worker reads it, nor on
        # a retry.
        if self.uses_randomness:
            seed_sample(self.seed, epoch, index)
        return self.dataset[index]

    def _checked(self, batch: Batch, epoch: int) -> Batch:
        """Move the samples that the model can't take to bad, and make labels int64."""
        if any(not bad.file for bad in batch.bad):  # of another shape: collate knows no file
            files = [bad.file or file_of(self.dataset, bad.index) for bad in batch.bad]
            named = zip(batch.bad, files, strict=True)
            batch.bad = tuple(replace(bad, file=file) for bad, file in named)
        if wrong := self._find_wrong(batch, epoch):
            numbers = batch.indices.tolist()
            bad = tuple(
                BadSample(numbers[place], text, file_of(self.dataset, numbers[place]))
                for place, text in sorted(wrong.items())
            )
            good = [place for place in range(batch.num_samples) if place not in wrong]
            kept = take(self.with_parts(batch, epoch), good)
            kept.read_part = None  # WHY: a worker sends the batch, and this can't be sent
            batch = replace(kept, bad=batch.bad + bad, troubles=batch.troubles)
        if self.checks.num_classes and batch.targets.dtype != torch.int64:
            batch.targets = batch.targets.to(torch.int64)
        return batch

    def _find_wrong(self, batch: Batch, epoch: int) -> Mapping[int, str]:
        """Return what is wrong with samples of a batch, by position; usually empty."""
        if self.collate is None:
            return self.checks.find(batch, (take(batch, [i]) for i in range(batch.num_samples)))
        # WHY read again: no row of what the collate made need be a sample
        again = (self._read_samples(epoch, index.view(1)) for index in batch.indices)
        return self.checks.find(batch, again)


class _Torchvision:
    """Imports torchvision where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return import_torchvision, ()
