"""Batches for each step, in order, whatever happens to a worker.

Owns the stream of micro-batches: read in this process, or by worker processes through torch's
DataLoader. A stream is asked for by position, so a worker that dies costs nothing: the loader is
built again, with fewer workers, at the first micro-batch that was not handed out.

WHY no DataLoader without workers: it would cost a tiny model 8 % of each step.
What goes wrong here: workers killed for memory, hung, or out of shared memory: see _degrade.
"""

import ctypes
import functools
import itertools
import logging
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from hardened_ddp.data.fetch import BadSample, Batch, Fetcher, Request
from hardened_ddp.data.sampler import Window, WindowSampler, share_of, split_micro_batches
from hardened_ddp.data.workers import WorkerPlan, raise_open_file_limit
from hardened_ddp.errors import SampleError
from hardened_ddp.settings.config import DataConfig

__all__ = ["BadSample", "Batch", "BatchStream", "EvalLoader", "TrainLoader", "Window"]

log = logging.getLogger(__name__)

Requests = Callable[[], Iterator[Request]]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class BatchStream:
    """Turns requests into batches, with the workers of one rank."""

    def __init__(
        self, fetcher: Fetcher, plan: WorkerPlan, config: DataConfig, *, pin_memory: bool
    ) -> None:
        self.fetcher = fetcher
        self.num_workers = plan.num_workers
        self.plan = plan
        self.config = config
        self.pin_memory = pin_memory
        self.after_start: Callable[[], None] | None = None
        """Called when workers have started: torch has then taken over SIGCHLD."""

        self._loader: DataLoader[Batch] | None = None
        self._requests = _RequestSampler()
        for reason in plan.reasons:
            log.warning("%s", reason)
        if self.num_workers > 0:
            raise_open_file_limit()
            self._check_picklable()

    def batches(self, requests: Requests) -> Iterator[Batch]:
        """Give the batch of each request, in order, none twice and none left out."""
        num_given = 0
        while True:
            if self.num_workers == 0:
                for request in _skip(requests, num_given):
                    yield self.fetcher[request]
                return
            self._requests.make = functools.partial(_skip, requests, num_given)
            try:
                for batch in self._start():
                    num_given += 1
                    yield batch
                return
            except (RuntimeError, OSError, EOFError, pickle.PickleError) as error:
                # WHY not next() again: torch would silently leave out the batch that was lost.
                self._degrade(error)

    def close(self) -> None:
        """End the workers."""
        self._loader = None

    def _start(self) -> Iterator[Batch]:
        if self._loader is None:
            context = multiprocessing.get_context(self.plan.start_method)
            if self.plan.start_method == "forkserver":
                context.set_forkserver_preload(["torch", "hardened_ddp.data.fetch"])
            self._loader = DataLoader(
                self.fetcher,  # type: ignore[arg-type]  # a Dataset but for the base class
                batch_size=None,
                sampler=self._requests,
                num_workers=self.num_workers,
                prefetch_factor=self.plan.prefetch_factor,
                persistent_workers=self.config.persistent_workers,
                pin_memory=self.pin_memory,
                timeout=self.config.loader_timeout_s,
                worker_init_fn=_prepare_worker,
                multiprocessing_context=context,
            )
        batches = iter(self._loader)
        if self.after_start is not None:
            self.after_start()
        return batches

    def _degrade(self, error: Exception) -> None:
        """Go on with half the workers, at last without any."""
        asked = self.num_workers
        self._loader = None
        self.num_workers = asked // 2
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log.warning(
            "DataLoader: %s. No sample is lost: going on at the same one with %s instead of %d "
            "workers",
            reason,
            self.num_workers or "no",
            asked,
        )

    def _check_picklable(self) -> None:
        if self.plan.start_method == "fork":
            return
        try:
            pickle.dumps(self.fetcher)
        except Exception as error:  # WHY broad: pickling runs the user's own code
            log.warning(
                "num_workers %d asked, running 0: the dataset can't be sent to a worker (%s)",
                self.num_workers,
                error,
            )
            self.num_workers = 0


class TrainLoader:
    """The training windows of this rank, with their micro-batches."""

    def __init__(self, sampler: WindowSampler, stream: BatchStream) -> None:
        self.sampler = sampler
        self.stream = stream

    def windows(self, epoch: int, start: int) -> Iterator[tuple[Window, list[Batch]]]:
        """Give each window from the cursor start on with this rank's share, maybe empty."""
        sampler = self.sampler
        sampler.set_epoch(epoch)

        def requests() -> Iterator[Request]:
            for window in sampler.windows(start):
                for indices in sampler.micro_batches(window):
                    yield epoch, indices

        batches = self.stream.batches(requests)
        for window in sampler.windows(start):
            first, last = share_of(window.size, rank=sampler.rank, world_size=sampler.num_replicas)
            num_micro_batches = -(-(last - first) // sampler.batch_size)
            yield window, [next(batches) for _ in range(num_micro_batches)]

    def sample_batches(self, device: torch.device, *, channels_last: bool) -> list[Batch]:
        """Read two batches of two samples, other ones on each rank, for a look at the model.

        Raises SampleError if none of the first samples can be read.
        """
        sampler, found = self.sampler, []
        size = sampler.size
        for number in range(8):
            first = (sampler.rank * 2 + number * 2 * sampler.num_replicas) % size
            indices = sampler.order(0).take(first, first + min(2, size - first))
            batch = self.stream.fetcher[(0, indices)]
            if batch.num_samples:
                found.append(batch.to(device, channels_last=channels_last))
            if len(found) == 2:
                return found
        if not found:
            raise SampleError(
                f"none of the first samples can be read: {batch.bad[0].error}",
                fix="check the dataset: every sample seems to be broken",
            )
        return found

    def close(self) -> None:
        """End the workers."""
        self.stream.close()


class EvalLoader:
    """This rank's share of the test set, each sample once."""

    def __init__(
        self, size: int, stream: BatchStream, *, batch_size: int, rank: int, world_size: int
    ) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.first, self.last = share_of(size, rank=rank, world_size=world_size)

    def __iter__(self) -> Iterator[Batch]:
        def requests() -> Iterator[Request]:
            for start, stop in split_micro_batches(self.last - self.first, self.batch_size):
                yield 0, torch.arange(self.first + start, self.first + stop)

        return self.stream.batches(requests)

    def close(self) -> None:
        """End the workers."""
        self.stream.close()


class _RequestSampler(Sampler[Request]):
    """What torch's DataLoader draws from: whatever requests are wanted at the moment."""

    def __init__(self) -> None:
        self.make: Callable[[], Iterator[Request]] = lambda: iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.make()


def _skip(requests: Requests, count: int) -> Iterator[Request]:
    return itertools.islice(requests(), count, None)


def _prepare_worker(worker_id: int) -> None:
    """Make a worker die with its rank, leave Ctrl-C to the rank, and use one thread."""
    libc: Any = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
