"""Batches in order, each exactly once, whatever happens to a worker: of training and of the test.

Batches are read in this process, or by worker processes (worker_pool.py). When a worker dies, hangs
or runs out of shared memory, no sample is lost: new workers start at the first unanswered request.
There are then half as many, or batches come through pipes, until there was no fault for some time.
WHY no DataLoader without workers: it costs a tiny model 8 % of each step.
Does not own: which rank gets which samples (sampler.py), making a batch of them (fetch.py).
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from hardened_ddp.data.batches.batch import BadSample, Batch, BatchSource, Request
from hardened_ddp.data.batches.checks import none_readable
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.sampler import (
    Window,
    WindowSampler,
    num_micro_batches,
    share_of,
    split_evenly,
)
from hardened_ddp.data.batches.worker_pool import WorkerPool, WorkersLost, plan_sending
from hardened_ddp.data.batches.workers import WorkerPlan
from hardened_ddp.errors import LoaderError
from hardened_ddp.ranks.resources import raise_open_file_limit
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.settings.config import DataConfig

log = logging.getLogger(__name__)

Requests = Callable[[], Iterator[Request]]
MAX_LOST_PER_BATCH = 3  # with more, the cause is the storage, not the samples
_FIRST_SAMPLES = 8  # of the test set: a wrong form shows in the first ones
_LOST = "its worker was lost"


class BatchReader:
    """Reads the batches of requests, with the workers of one rank."""

    def __init__(
        self, fetcher: BatchSource, plan: WorkerPlan, config: DataConfig, *, pin_memory: bool
    ) -> None:
        self.fetcher, self.config, self.pin_memory = fetcher, config, pin_memory
        self._num_retried = 0  # reads
        self._after_start: Callable[[], None] = lambda: None
        self._pool: WorkerPool | None = None
        self._is_idle = True  # the worker pool has answered all requests of the last epoch
        self._unanswered: deque[Request] = deque()
        self._num_requested = 0  # since the current workers started
        self._waited_for: Request | None = None
        self._suspect: Request | None = None  # the one we waited for when workers were lost
        if plan.reason:
            log.warning("%s", plan.reason, extra=ON_EVERY_RANK)
        if plan.num_workers > 0:
            raise_open_file_limit()
            plan = plan_sending(fetcher, plan)
        self.level = self._top = plan  # as it is now, and as it is without faults
        self._fault_at = time.monotonic()

    @property
    def num_workers(self) -> int:
        return self.level.num_workers

    @property
    def next_worker(self) -> int:
        """The worker that will get the next request: they get them in turn."""
        return self._num_requested % max(1, self.num_workers)

    def batches(self, requests: Requests) -> Iterator[Batch]:
        """Yield the batch of each request, in order, each exactly once.

        Raises LoaderError if several samples in a row kill or hang their reader.
        """
        self._unanswered, self._num_requested = deque(), 0
        new = requests()
        while True:
            self._go_up_if_quiet()
            read = self._read_by_workers if self.num_workers else self._read_here
            is_below = self.level is not self._top
            try:
                for batch in read(self._requested(new)):
                    self._unanswered.popleft()
                    if batch.troubles:
                        self.tell_retries(batch.troubles)
                    yield batch
                    if is_below and self._is_quiet():
                        break  # to continue with more workers
                else:
                    return
            except WorkersLost as lost:
                yield from self._recover(lost)

    def tell_retries(self, troubles: Sequence[str]) -> None:
        """Log reads that were retried: the first, and whenever their number has doubled."""
        before, self._num_retried = self._num_retried, self._num_retried + len(troubles)
        if before.bit_length() < self._num_retried.bit_length():
            what = "the storage had errors: %d reads were retried, the last one after %s"
            log.warning(what, self._num_retried, troubles[-1])

    def _requested(self, new: Iterator[Request]) -> Iterator[Request]:
        """Yield the unanswered requests again, and then new ones."""
        self._num_requested, num_again = 0, len(self._unanswered)
        for request in chain(tuple(self._unanswered), new):
            self._num_requested += 1
            if self._num_requested > num_again:
                self._unanswered.append(request)
            yield request

    def _read_by_workers(self, requests: Iterator[Request]) -> Iterator[Batch]:
        pool = self._start(requests)
        while True:
            self._waited_for = self._unanswered[0] if self._unanswered else None
            if (batch := pool.receive()) is None:
                break
            yield batch
        if self._unanswered:
            raise WorkersLost("workers ended before they had answered all requests")
        self._is_idle = True
        if not self.config.persistent_workers:
            self.close()

    def _read_here(self, requests: Iterator[Request]) -> Iterator[Batch]:
        for request in requests:
            self._waited_for = request
            try:
                batch = self.fetcher[request]
            except MemoryError as error:
                raise LoaderError(
                    f"out of memory while reading samples {request[1][:4].tolist()} ...: {error}",
                    fix="lower --batch_size or --prefetch_factor, then --resume the run",
                ) from error
            if self.pin_memory:
                batch.pin()
            yield batch

    def call_after_start(self, call: Callable[[], None]) -> None:
        """Register a function to call when workers have started: torch then replaced SIGCHLD."""
        self._after_start = call

    def show_reading(self, word: "memoryview[int]") -> None:
        """Use word for the sample that is being read, so that other processes can read it."""
        self.fetcher.reading = word

    def being_read(self) -> list[int]:
        """Return the sample that this rank waits for, else all of its batch. For any thread."""
        request, pool = self._waited_for, self._pool
        if request is None:
            return []
        found = pool.being_read() if pool is not None else [self.fetcher.reading[0]]
        awaited: list[int] = request[1].tolist()
        return [index for index in found if index in awaited] or awaited

    def stacks(self) -> dict[int, str]:
        """Return the Python stacks of the workers by pid. For any thread."""
        pool = self._pool
        return pool.stacks() if pool is not None else {}

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close(is_broken=not self._is_idle)
            self._pool = None

    def _start(self, requests: Iterator[Request], *, is_single: bool = False) -> WorkerPool:
        """Start the workers on requests: those of the last epoch if they are idle, or new ones."""
        if not self._is_idle:
            self.close()
        if self._pool is None:
            plan = self.level
            if is_single:
                # WHY pipes: a worker that dies in the next request would take shared memory with
                # it. WHY 1: with one request in flight, it is known which one killed the worker.
                plan = replace(plan, num_workers=1, shares_memory=False, prefetch_factor=1)
            self._pool = WorkerPool(
                self.fetcher,
                plan,
                pin_memory=self.pin_memory,
                timeout_s=self.config.loader_timeout_s,
                is_lasting=self.config.persistent_workers and not is_single,
            )
        self._is_idle = False
        self._pool.start(requests)
        self._after_start()
        return self._pool

    def _recover(self, lost: WorkersLost) -> Iterator[Batch]:
        """Go one level down, depending on the fault; yield the batches that were read one by one.

        WHY one by one, before reading in this process: a sample that crashes its reader would crash
        the rank too; one that hangs would cost a timeout at each halving.
        """
        self.close()
        unanswered, before = self._unanswered, self.level
        after = replace(before, num_workers=before.num_workers // 2)
        is_again = bool(unanswered) and unanswered[0] is self._suspect
        self._suspect = unanswered[0] if unanswered else None
        batches: list[Batch] = []
        if lost.is_about_sharing and before.shares_memory:
            after = replace(before, shares_memory=False, copies_data=True)
        elif is_again and not lost.is_dangerous:
            # fewer workers did not help; without any, the error has a name
            after = replace(before, num_workers=0)
        elif unanswered and lost.is_dangerous and (before.num_workers == 1 or is_again):
            log.warning("DataLoader: %s. Reading samples one by one to find the cause", lost)
            batches = [self._read_singly(request) for request in unanswered]
            if any(bad.error.startswith(_LOST) for batch in batches for bad in batch.bad):
                after = before  # the number of workers was not the cause
            unanswered.clear()
        self._fault_at = time.monotonic()
        self.level = after
        if after != before:
            log.warning(
                "DataLoader: %s. No sample is lost: continuing at the same sample with %s instead "
                "of %s",
                *(lost, after, before),
            )
        yield from batches

    def _is_quiet(self) -> bool:
        """Return whether all workers may come back: there was no fault for long enough."""
        passed_s = time.monotonic() - self._fault_at
        return self.level is not self._top and 0 < self.config.loader_quiet_s <= passed_s

    def _go_up_if_quiet(self) -> None:
        """Go up if there was no fault for long enough; prefetched batches are read again."""
        if not self._is_quiet():
            return
        self.close()
        log.warning(
            "DataLoader: no fault for %.0f s. Continuing at the same sample with %s instead of %s",
            *(self.config.loader_quiet_s, self._top, self.level),
        )
        self.level = self._top

    def _read_singly(self, request: Request) -> Batch:
        """Read one sample after the other in a worker; a sample that kills two workers is bad.

        WHY two: the first time may be a coincidence. A sample that hangs is not retried.
        """
        epoch, indices = request
        left, good, bad = indices.tolist(), [], []
        doubted = -1
        while left:
            singles = [(epoch, torch.tensor([index])) for index in left]
            try:
                pool = self._start(iter(singles), is_single=True)
                while left and pool.receive() is not None:
                    good.append(left.pop(0))
            except WorkersLost as lost:
                if not lost.is_dangerous:
                    good.append(left.pop(0))
                elif not lost.is_hang and doubted != left[0]:
                    doubted = left[0]
                    log.warning("DataLoader: %s; sample %d is retried once", lost, doubted)
                else:
                    index = left.pop(0)
                    bad.append(BadSample(index, f"{_LOST} ({lost})", self.fetcher.name_of(index)))
                    self.fetcher.pass_over(epoch, index, bad[-1].error)
            finally:
                self.close()
            if len(bad) > MAX_LOST_PER_BATCH:
                raise LoaderError(
                    f"reading samples {', '.join(b.name for b in bad)} ended or hung the "
                    f"worker each time: {bad[-1].error}",
                    fix="check the storage and the memory of this node; --num_workers 0 reads "
                    "in the training process, and shows where it crashes",
                )
        batch = self.fetcher[(epoch, torch.tensor(good, dtype=torch.int64))]
        return replace(batch, bad=batch.bad + tuple(bad))


class TrainLoader:
    """The training windows of this rank, with their micro-batches."""

    def __init__(self, sampler: WindowSampler, reader: BatchReader) -> None:
        assert isinstance(reader.fetcher, Fetcher)
        self.sampler, self.reader, self._fetcher = sampler, reader, reader.fetcher

    def windows(
        self, epoch: int, start: int, step: int = 0
    ) -> Iterator[tuple[Window, list[Batch]]]:
        """Yield each window from the cursor start on, and this rank's share, which may be empty.

        step: nothing depends on it, unlike of a stream.
        """
        sampler = self.sampler
        sampler.set_epoch(epoch)
        batches = self.reader.batches(
            lambda: (
                (epoch, indices)
                for window in sampler.windows(start)
                for indices in sampler.micro_batches(window)
            )
        )
        for window in sampler.windows(start):
            ranks, size = sampler.num_replicas, window.size
            # WHY without a call for one: this is the usual case, in each step
            is_one = ranks <= size <= sampler.batch_size * ranks
            number = 1 if is_one else len(sampler.parts_of(window))
            share = [next(batches) for _ in range(number)]
            if self._fetcher.collate is not None:
                share = [self._fetcher.with_parts(batch, epoch) for batch in share]
            yield window, share
        next(batches, None)  # WHY: the stream then reaches its end, and keeps its idle workers

    def sample_batches(self, device: torch.device) -> list[Batch]:
        """Read two batches of two samples, different ones on each rank, to probe the model.

        Raises SampleError if none of the first samples can be read.
        """
        sampler, found = self.sampler, []
        for number in range(8):
            first = 2 * (sampler.rank + number * sampler.num_replicas) % sampler.end
            indices = sampler.order(0).take(first, min(first + 2, sampler.end))
            batch = self._fetcher[(0, indices)]
            if batch.num_samples:
                found.append(self._fetcher.with_parts(batch, 0).to(device))
            if len(found) == 2:
                break
        if not found:
            raise none_readable(batch.bad[0].error)
        return found

    def open_folder(self, run: Path) -> None:
        """Take the run folder: a map-style dataset has nothing to keep there."""

    def close(self) -> None:
        self.reader.close()


class EvalLoader:
    """This rank's share of the test set, each sample once; or of a part of it."""

    def __init__(
        self,
        num_all: int,
        reader: BatchReader,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        max_batches: int = 0,
    ) -> None:
        """max_batches: measure so many batches of the whole set, over all ranks; 0: all."""
        self.reader, self._num_all = reader, num_all
        self.size = size = min(num_all, max_batches * batch_size or num_all)
        self.batch_size, self.is_partial = batch_size, size < num_all
        # A stream is read from its start: anything behind that is reached by reading all before it.
        self._in_order = getattr(reader.fetcher.dataset, "is_read_in_order", False)
        self.first, self.last = share_of(size, rank=rank, world_size=world_size)
        # Batches of each rank that has samples for them: a loop over them is equally long.
        self.most_batches = num_micro_batches(size, batch_size=batch_size, world_size=world_size)

    def __iter__(self) -> Iterator[Batch]:
        def requests() -> Iterator[Request]:
            for start, stop in split_evenly(self.last - self.first, self.most_batches):
                part = torch.arange(self.first + start, self.first + stop)
                # WHY spread: test sets are often sorted by class.
                yield 0, part if self._in_order else part * self._num_all // self.size

        return self.reader.batches(requests)

    def first_samples(self) -> Batch:
        """Read the first samples of this rank's share, at most 8, in this process."""
        first = 0 if self._in_order or self.first >= self.last else self.first
        most = min(first + _FIRST_SAMPLES, self.size)
        return self.reader.fetcher[(0, torch.arange(first, most))]

    def close(self) -> None:
        self.reader.close()
