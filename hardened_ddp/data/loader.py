"""Batches for each step, in order, whatever happens to a worker.

Owns the stream of micro-batches: read in this process, or by worker processes (crew.py). What was
asked for and not handed out is remembered, so a worker that dies costs nothing: new workers, half
as many, start at the first micro-batch that was not handed out.

WHY no DataLoader without workers: it would cost a tiny model 8 % of each step.
What goes wrong here: workers killed for memory, hung, or out of shared memory: see _recover.
"""

import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from hardened_ddp.data.crew import Crew, CrewLost
from hardened_ddp.data.fetch import BadSample, Batch, Fetcher, Request
from hardened_ddp.data.sampler import Window, WindowSampler, share_of, split_micro_batches
from hardened_ddp.data.workers import WorkerPlan, raise_open_file_limit
from hardened_ddp.errors import LoaderError, SampleError
from hardened_ddp.settings.config import DataConfig

__all__ = ["BadSample", "Batch", "BatchStream", "EvalLoader", "TrainLoader", "Window"]

log = logging.getLogger(__name__)

Requests = Callable[[], Iterator[Request]]
MAX_LOST_PER_BATCH = 3  # more than these, and the storage is to blame, not the samples
_LOST = "its worker was lost"


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

        self._crew: Crew | None = None
        self._is_idle = True  # the crew has answered all requests of the last epoch
        self._waited_for: Request | None = None
        self._suspect: Request | None = None  # what was waited for when workers were lost
        for reason in plan.reasons:
            log.warning("%s", reason)
        if self.num_workers > 0:
            raise_open_file_limit()
            self._check_picklable()

    def batches(self, requests: Requests) -> Iterator[Batch]:
        """Give the batch of each request, in order, none twice and none left out.

        Raises LoaderError if one sample after the other kills or hangs its reader.
        """
        tape = _Tape(requests())
        while self.num_workers > 0:
            try:
                crew = self._start(tape.read())
                while (batch := self._receive(crew, tape)) is not None:
                    if not (tape.unanswered and _answers(batch, tape.unanswered[0])):
                        raise CrewLost("a batch came that was not asked for")
                    tape.unanswered.popleft()
                    yield batch
                if tape.unanswered:
                    raise CrewLost("workers ended before they had answered all requests")
                self._is_idle = True
                if not self.config.persistent_workers:
                    self.close()
                return
            except CrewLost as lost:
                yield from self._recover(lost, tape.unanswered)
        for request in tape.read():
            self._waited_for = tape.unanswered.popleft()
            yield self.fetcher[request]

    def being_read(self) -> list[int]:
        """Name the sample that this rank waits for, or all of its batch. For any thread."""
        request, crew = self._waited_for, self._crew
        if request is None:
            return []
        found = crew.being_read() if crew is not None else [self.fetcher.reading[0]]
        awaited: list[int] = request[1].tolist()
        return [index for index in found if index in awaited] or awaited

    def stacks(self) -> dict[int, str]:
        """Give the Python stacks of the workers by pid. For any thread."""
        crew = self._crew
        return crew.stacks() if crew is not None else {}

    def close(self) -> None:
        """End the workers."""
        if self._crew is not None:
            self._crew.close(is_broken=not self._is_idle)
            self._crew = None

    def _start(self, requests: Iterator[Request], *, num_workers: int = 0) -> Crew:
        """Set the workers to work: those of the last epoch if they are idle, or new ones."""
        if self._crew is None or not self._is_idle:
            self.close()
            is_single = num_workers > 0
            plan = replace(
                self.plan,
                num_workers=num_workers or self.num_workers,
                # WHY: with one request under way, it is known which one a worker died of.
                prefetch_factor=1 if is_single else self.plan.prefetch_factor,
            )
            self._crew = Crew(
                self.fetcher,
                plan,
                pin_memory=self.pin_memory,
                timeout_s=self.config.loader_timeout_s,
                is_lasting=self.config.persistent_workers and not is_single,
            )
        self._is_idle = False
        self._crew.start(requests)
        if self.after_start is not None:
            self.after_start()
        return self._crew

    def _receive(self, crew: Crew, tape: "_Tape") -> Batch | None:
        self._waited_for = tape.unanswered[0] if tape.unanswered else None
        return crew.receive()

    def _recover(self, lost: CrewLost, unanswered: deque[Request]) -> Iterator[Batch]:
        """Go on with half the workers, at last without any; give what had to be read singly.

        WHY singly, before reading in this process: a sample that crashes its reader would take the
        rank with it; one that hangs would cost a timeout for each halving.
        """
        self.close()
        asked, self.num_workers = self.num_workers, self.num_workers // 2
        is_again = bool(unanswered) and unanswered[0] is self._suspect
        self._suspect = unanswered[0] if unanswered else None
        batches: list[Batch] = []
        if is_again and not lost.is_dangerous:
            self.num_workers = 0  # fewer workers did not help; without any, the error has a name
        elif unanswered and lost.is_dangerous and (asked == 1 or is_again):
            log.warning("DataLoader: %s. Reading the next samples singly, to find the cause", lost)
            batches = [self._read_singly(request) for request in unanswered]
            if any(bad.error.startswith(_LOST) for batch in batches for bad in batch.bad):
                self.num_workers = asked  # the workers were not to blame
            unanswered.clear()
        if self.num_workers < asked:
            log.warning(
                "DataLoader: %s. No sample is lost: going on at the same one with %s instead of %d "
                "workers",
                lost,
                self.num_workers or "no",
                asked,
            )
        yield from batches

    def _read_singly(self, request: Request) -> Batch:
        """Read one sample after the other in a worker; those that cost it its life are bad."""
        epoch, indices = request
        left, good, bad = indices.tolist(), [], []
        while left:
            singles = [(epoch, torch.tensor([index])) for index in left]
            try:
                crew = self._start(iter(singles), num_workers=1)
                while left and crew.receive() is not None:
                    good.append(left.pop(0))
            except CrewLost as lost:
                index = left.pop(0)
                if lost.is_dangerous:
                    bad.append(BadSample(index, f"{_LOST} ({lost})"))
                else:
                    good.append(index)
            finally:
                self.close()
            if len(bad) > MAX_LOST_PER_BATCH:
                raise LoaderError(
                    f"reading samples {', '.join(str(b.index) for b in bad)} ended or hung the "
                    f"worker each time: {bad[-1].error}",
                    fix="look at the storage and the memory of this node; --num_workers 0 reads "
                    "in the training process, and shows where it crashes",
                )
        batch = self.fetcher[(epoch, torch.tensor(good, dtype=torch.int64))]
        return replace(batch, bad=batch.bad + tuple(bad))

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
        next(batches, None)  # WHY: so that the stream sees its end, and keeps its idle workers

    def sample_batches(self, device: torch.device) -> list[Batch]:
        """Read two batches of two samples, other ones on each rank, for a look at the model.

        Raises SampleError if none of the first samples can be read.
        """
        sampler, found = self.sampler, []
        size = sampler.num_total
        for number in range(8):
            first = (sampler.rank * 2 + number * 2 * sampler.num_replicas) % size
            indices = sampler.order(0).take(first, first + min(2, size - first))
            batch = self.stream.fetcher[(0, indices)]
            if batch.num_samples:
                found.append(batch.to(device))
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
        largest_share = -(-size // world_size)
        self.most_batches = -(-largest_share // batch_size)
        """Batches of the rank that has most: a loop over them is equally long on all ranks."""


    def __iter__(self) -> Iterator[Batch]:
        def requests() -> Iterator[Request]:
            for start, stop in split_micro_batches(self.last - self.first, self.batch_size):
                yield 0, torch.arange(self.first + start, self.first + stop)

        return self.stream.batches(requests)

    def close(self) -> None:
        """End the workers."""
        self.stream.close()


class _Tape:
    """Requests, and which of them have no answer yet."""

    def __init__(self, source: Iterator[Request]) -> None:
        self.unanswered: deque[Request] = deque()
        self._source = source

    def read(self) -> Iterator[Request]:
        """Give those without an answer once more, and then new ones."""
        yield from tuple(self.unanswered)
        for request in self._source:
            self.unanswered.append(request)
            yield request


def _answers(batch: Batch, request: Request) -> bool:
    indices = request[1]
    if batch.bad:
        return batch.num_samples + len(batch.bad) == len(indices)
    return torch.equal(batch.indices, indices)
