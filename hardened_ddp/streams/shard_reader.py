"""Reading the shards of a stream, in this process or in a worker.

Owns the open readers and their positions. The samples of a shard come in their order, so the same
reader goes on; for another position it is opened anew, from the nearest state before it.
What goes wrong here: a reader raises. It is opened anew and tried again, because a generator that
raised is over and looks as if its shard had ended. A sample that fails twice is reported by shard
and position. The samples behind it can be read if the reader has skip(), if it goes on after an
error, or if its state has moved on.
"""

import contextlib
import copy
import inspect
import itertools
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

from hardened_ddp.data.batches.read_errors import is_transient, retry_read
from hardened_ddp.data.foreign_code import describe
from hardened_ddp.errors import ANY_FAILURE, SampleError
from hardened_ddp.ranks.seeding import seed_sample
from hardened_ddp.streams.contract import Stream
from hardened_ddp.streams.planner import UNKNOWN, id_of

log = logging.getLogger(__name__)

# (epoch, position, state): a reader opened with this state gives sample number position first.
ReaderState = tuple[int, int, Any]


class EndOfShard(Exception):
    """The shard has no such sample: it ends before."""

    def __init__(self, end: int) -> None:
        super().__init__(f"the shard has {end} samples")
        self.end = end


class SampleIsError(Exception):
    """A reader gave an exception as its sample: that one is bad, and the reader goes on."""

    def __init__(self, error: Exception) -> None:
        super().__init__(describe(error))
        self.error = error


def behind(place: int, error: str) -> SampleError:
    """Return the error of a sample that can't be read because of one before it in its shard."""
    return SampleError(f"sample {place} of its shard ended the reader: {error}")


@dataclass(slots=True)
class OpenShard:
    """A reader, and the index of the sample that it gives next."""

    epoch: int
    position: int
    samples: Iterator[Any]
    after_error: str = ""  # it raised, and was asked to go on: its end may be no end of the shard
    state_after_error: Any = None  # its state then, if it has one


# WHY: the process has one such variable, and each of two threads would see the other's
_one_reads = threading.RLock()


@contextlib.contextmanager
def seen_by_user(stream: Stream, shard: int) -> Iterator[None]:
    """Hide from the stream's code that it runs in a DataLoader worker: it would split once more.

    A stream that splits by worker sees its shard as the worker. Where this version of torch has no
    such variable, nothing is changed.
    """
    worker: Any = getattr(getattr(torch.utils.data, "_utils", None), "worker", None)
    if not hasattr(worker, "_worker_info"):
        yield
        return
    shown = None
    if getattr(stream, "splits_by_worker", False) and hasattr(worker, "WorkerInfo"):
        shown = worker.WorkerInfo(id=shard, num_workers=stream.num_shards, seed=0, dataset=None)
    with _one_reads:
        before, worker._worker_info = worker._worker_info, shown
        try:
            yield
        finally:
            worker._worker_info = before


_END = object()


class ShardReader:
    """Reads single samples of a stream. Picklable if the stream is."""

    def __init__(self, stream: Stream, *, seed: int) -> None:
        self.stream = stream
        self.seed = seed
        # By shard: what is known from the last worker, or the run before.
        self.states: dict[int, ReaderState] = {}
        self._uses_randomness = getattr(stream, "uses_randomness", True)
        self._open: dict[int, OpenShard] = {}
        self._ends: dict[tuple[int, int], int] = {}
        # (epoch, shard) -> the sample that no reader goes beyond, and its error.
        self._blocked: dict[tuple[int, int], tuple[int, str]] = {}

        # (epoch, shard) -> the samples that failed, and behind which their reader goes on.
        self._passed: dict[tuple[int, int], set[int]] = {}

        # (epoch, shard) -> the samples that no reader is asked for again, each with its error.
        self._deadly: dict[tuple[int, int], dict[int, str]] = {}
        self._failed: OpenShard | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_failed": None}  # WHY: readers can't be sent

    def read_run(
        self, epoch: int, shard: int, index: int, count: int, troubles: list[str]
    ) -> list[Any]:
        """Read up to count samples from index on, as many as come without trouble; it may be none.

        What ends the run is found by read() of the next sample. Any: what the stream gives.
        """
        found: list[Any] = []
        if (epoch, shard) in self._deadly:
            return found
        reader = self._open.get(shard)
        try:
            if reader is None and index == 0:
                reader = self._open_at(epoch, shard, 0)
            is_there = reader is not None and (reader.epoch, reader.position) == (epoch, index)
            if reader is None or not is_there or reader.after_error:
                return found
            samples = self._seeded(reader, shard) if self._uses_randomness else reader.samples
            with seen_by_user(self.stream, shard):
                found.extend(itertools.islice(samples, count))  # it keeps what came before an error
        except ANY_FAILURE as error:  # WHY broad: the user's code; read() tries it again
            log.debug("shard %d, sample %d", shard, index + len(found), exc_info=True)
            self._open.pop(shard, None)
            if is_transient(error):
                troubles.append(describe(error))
            return found
        reader.position += len(found)
        if len(found) < count:
            del self._open[shard]
            self._ends[epoch, shard] = reader.position
        return found

    def _seeded(self, reader: OpenShard, shard: int) -> Iterator[Any]:
        """Yield the reader's samples, each read with random numbers of its own."""
        first = id_of(shard, reader.position, self.stream.num_shards)
        for number in itertools.count(first, self.stream.num_shards):
            seed_sample(self.seed, reader.epoch, number)
            if (sample := next(reader.samples, _END)) is _END:
                return
            yield sample

    def read(self, epoch: int, shard: int, index: int, troubles: list[str]) -> Any:
        """Read one sample, with retries. Any: what the stream gives.

        Raises EndOfShard behind the last sample, else the error of the reader.
        """
        while True:
            if 0 <= (end := self.end_of(epoch, shard)) <= index:
                raise EndOfShard(end)
            place, text = self._blocked.get((epoch, shard), (index, ""))
            if place < index:
                raise behind(place, text)
            if text := self._deadly.get((epoch, shard), {}).get(index, ""):
                raise SampleError(text)
            try:
                return self._read_with_retries(epoch, shard, index, troubles)
            except (MemoryError, EndOfShard, SampleIsError):
                raise
            except ANY_FAILURE as error:  # WHY broad: the user's code
                if self._go_beyond(epoch, shard, index, error) == index:
                    raise  # else one before it is bad, and is now left out

    def _read_with_retries(self, epoch: int, shard: int, index: int, troubles: list[str]) -> Any:
        try:
            return self._read_once(epoch, shard, index)
        except (EndOfShard, SampleIsError):
            raise
        except ANY_FAILURE as error:  # WHY broad: as above
            first: BaseException = error

        def again() -> Any:  # Any: as above
            try:
                return self._read_once(epoch, shard, index)
            except EndOfShard:
                raise first from None  # the shard is not over: there was an error here before

        return retry_read(again, first, troubles)

    def pass_over(self, epoch: int, shard: int, index: int, error: str) -> None:
        """Never ask a reader for this sample again: it ends the process that reads it.

        A reader with skip() goes on behind it; else the rest of its shard can't be read.
        """
        self._open.pop(shard, None)
        self._deadly.setdefault((epoch, shard), {})[index] = error

    def state_of(self, shard: int) -> Any:
        """Return the state of a shard's reader, None if it has none. Any: the stream's own."""
        reader = self._open.get(shard)
        return None if reader is None else self._copy_state(reader, shard)

    def _copy_state(self, reader: OpenShard, shard: int) -> Any:
        if not hasattr(reader.samples, "state_dict"):
            return None
        with seen_by_user(self.stream, shard):
            # WHY a copy: many readers give their own dict, and change it with the next sample
            return copy.deepcopy(reader.samples.state_dict())

    def end_of(self, epoch: int, shard: int) -> int:
        """Return the number of samples of a shard; UNKNOWN if its end was not met."""
        return self._ends.get((epoch, shard), UNKNOWN)

    def is_blocked(self, epoch: int, shard: int) -> bool:
        """Return whether no reader gets to the end of a shard, because of an error in it."""
        return (epoch, shard) in self._blocked

    def close(self) -> None:
        self._open.clear()

    def _read_once(self, epoch: int, shard: int, index: int) -> Any:
        self._failed = None
        reader = self._open.get(shard)
        if reader is None or reader.epoch != epoch or reader.position > index:
            reader = self._open_at(epoch, shard, index)
        return self._next(self._advance(reader, shard, index), shard)

    def _advance(self, reader: OpenShard, shard: int, index: int) -> OpenShard:
        """Read on to a sample, and pass over those before it that are known to be bad."""
        deadly = self._deadly.get((reader.epoch, shard), {})
        passed = self._passed.get((reader.epoch, shard), set())
        while (place := reader.position) < index:
            if place in deadly:
                self._skip(reader, shard, deadly[place])
                continue
            try:
                with contextlib.suppress(SampleIsError):
                    self._next(reader, shard)
            except ANY_FAILURE as error:  # WHY broad: the user's code
                if place not in passed or self._failed is not reader:
                    raise
                self._go_on(reader, shard, error)
            reader = self._open[shard]  # WHY: behind a bad sample it may be another one
        return reader

    def _skip(self, reader: OpenShard, shard: int, error: str) -> None:
        """Let the reader pass over its next sample without making it. Raises SampleError."""
        if not callable(getattr(reader.samples, "skip", None)):
            self._open.pop(shard, None)
            self._blocked[reader.epoch, shard] = (reader.position, error)
            raise behind(reader.position, error)
        with seen_by_user(self.stream, shard):
            reader.samples.skip()  # type: ignore[attr-defined]  # looked for above
        reader.position += 1

    def _open_at(self, epoch: int, shard: int, index: int) -> OpenShard:
        """Open a shard anew, at its start or at a state at or before index.

        A state that open() does not take costs time, never a sample: it may be older than the
        user's code, or hold what JSON changes, such as tuples.
        """
        found = self.states.get(shard)
        if found is not None and found[0] == epoch and found[1] <= index:
            try:
                return self._open_reader(epoch, shard, found[1], found[2])
            except ANY_FAILURE as error:  # WHY broad: the user's code
                if is_transient(error):
                    raise
                log.warning(
                    "shard %d is read from its start: it can't be opened at the state of its "
                    "sample %d: %s",
                    *(shard, found[1], describe(error)),
                )
                del self.states[shard]
        return self._open_reader(epoch, shard, 0, None)

    def _open_reader(self, epoch: int, shard: int, position: int, state: Any) -> OpenShard:
        """Open a shard where its sample number position comes next. Any: the stream's own."""
        if self._uses_randomness:
            seed_sample(self.seed, epoch, -1 - shard)
        with seen_by_user(self.stream, shard):
            samples = iter(self.stream.open(shard, epoch=epoch, state=state))
        self._open[shard] = OpenShard(epoch, position, samples)
        return self._open[shard]

    def _next(self, reader: OpenShard, shard: int) -> Any:
        """Take the reader's next sample; a reader that raises is not used again."""
        if self._uses_randomness:
            # WHY also for samples that are skipped: they may decide at random what comes next.
            number = id_of(shard, reader.position, self.stream.num_shards)
            seed_sample(self.seed, reader.epoch, number)
        try:
            with seen_by_user(self.stream, shard):
                sample = next(reader.samples)
        except StopIteration:
            del self._open[shard]
            if reader.after_error:
                return self._read_behind(reader, shard)
            self._ends[reader.epoch, shard] = reader.position
            raise EndOfShard(reader.position) from None
        except BaseException:
            self._failed = self._open.pop(shard, None)
            raise
        reader.position += 1
        reader.after_error = ""
        if isinstance(sample, Exception):
            raise SampleIsError(sample)
        return sample

    def _go_beyond(self, epoch: int, shard: int, index: int, error: BaseException) -> int:
        """Prepare to read behind a sample that failed twice, if the reader allows it; say which."""
        failed = self._failed
        place = index if failed is None else failed.position
        if failed is not None and callable(getattr(failed.samples, "skip", None)):
            self.pass_over(epoch, shard, place, describe(error))
        elif failed is None or inspect.isgenerator(failed.samples):
            self._blocked.setdefault((epoch, shard), (place, describe(error)))
        else:
            self._passed.setdefault((epoch, shard), set()).add(place)
            self._go_on(failed, shard, error)
        return place

    def _go_on(self, failed: OpenShard, shard: int, error: BaseException) -> None:
        """Keep a reader that raised: it may go on behind the bad sample."""
        failed.position, failed.after_error = failed.position + 1, describe(error)
        failed.state_after_error = self._copy_state(failed, shard)
        self._open[shard] = failed

    def _read_behind(self, over: OpenShard, shard: int) -> Any:
        """Read the sample behind a bad one, at which the reader ended, from a state. Any: as above.

        That works if the reader's state after the error was not the one before the bad sample:
        opened there, it would give the bad sample once more.
        """
        place, after = over.position - 1, over.state_after_error
        if after is not None:
            reader = self._advance(self._open_at(over.epoch, shard, place), shard, place)
            if self._copy_state(reader, shard) != after:
                self.states[shard] = (over.epoch, place + 1, after)
                reader = self._open_at(over.epoch, shard, place + 1)
                if reader.position == place + 1:
                    return self._next(reader, shard)
            self._open.pop(shard, None)
        self._blocked[over.epoch, shard] = (place, over.after_error)
        raise behind(place, over.after_error) from None
