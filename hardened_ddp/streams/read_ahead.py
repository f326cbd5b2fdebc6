"""The samples of a rank's shards, read ahead of the steps that take them.

A shard is read in blocks, by the same worker as long as it lives; whichever worker answers, the
block is the same. Samples are shuffled within blocks: a run that resumes reads the block again, so
no buffer has to be saved. A shard that has another length than before is an error: what is behind
the end would never be read.
Does not own: reading a block (block_reader.py), the plan (planner.py), workers
(data/batches/loader.py).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hardened_ddp.data.batches.batch import BadSample, Batch, Request
from hardened_ddp.data.batches.loader import BatchReader
from hardened_ddp.errors import DataError
from hardened_ddp.streams.block_reader import BlockReader, unpack
from hardened_ddp.streams.planner import UNKNOWN, Numbers, StreamPosition, block_order, id_of
from hardened_ddp.streams.shard_reader import ReaderState
from hardened_ddp.streams.shard_sampler import ShardSampler

BLOCKS_AHEAD = 2  # blocks of each shard that workers read ahead of what is needed


@dataclass(slots=True)
class Items:
    """Samples in the order of the plan, bad ones too, each with its number.

    WHY two lists and no pairs: pairs are objects more for each sample, and Python's garbage
    collector looks at those that are held.
    """

    numbers: list[int] = field(default_factory=list)
    # Samples or BadSample. Any: whatever the stream gives.
    samples: list[Any] = field(default_factory=list)

    def part(self, start: int, stop: int) -> "Items":
        """Return the items at these positions."""
        return Items(self.numbers[start:stop], self.samples[start:stop])


@dataclass(slots=True)
class _Shard:
    """What this rank holds of one of its shards, in the order of the plan."""

    asked: int  # index of the first sample of the next block to ask for
    number: int  # among this rank's shards: decides which worker reads it
    numbers: deque[int] = field(default_factory=deque)
    samples: deque[Any] = field(default_factory=deque)  # as in Items
    end: int = UNKNOWN
    states: deque[ReaderState] = field(default_factory=deque)


class ReadAhead:
    """The samples of this rank's shards of one epoch, and what is under way."""

    def __init__(self, sampler: ShardSampler, reader: BatchReader) -> None:
        """reader: one whose fetcher is a BlockReader."""
        assert isinstance(reader.fetcher, BlockReader)
        self._sampler, self._batches = sampler, reader
        self._reader = reader.fetcher.reader
        self._block = sampler.shuffle_block
        self._epoch = -1
        self._wanted = -1  # the shard that is waited for

        # (num_shards,): the samples of each shard below this index are wanted.
        self._needed: Numbers = np.empty(0, dtype=np.int64)

        # (num_shards,): how many samples of each shard have come; those of other ranks' shards
        # count as all there, because nobody here waits for them.
        self._stored: Numbers = np.empty(0, dtype=np.int64)
        self._shards: dict[int, _Shard] = {}
        self._unfinished: dict[int, _Shard] = {}  # those whose end was not met yet
        self._answers: Iterator[Batch] = iter(())

    def begin(
        self, position: StreamPosition, shards: Sequence[int], saved: Mapping[int, ReaderState]
    ) -> None:
        """Start to read these shards from position on. saved: their readers' states, by shard."""
        self._epoch, self._wanted, self._shards = position.epoch, -1, {}
        self._needed = position.taken
        self._stored = np.full(len(position.taken), np.iinfo(np.int64).max)
        for number, shard in enumerate(shards):
            at = int(position.taken[shard])
            if 0 <= position.ends[shard] <= at:
                continue
            held = _Shard(at // self._block * self._block, number)
            self._stored[shard] = at
            self._shards[shard] = held
            if shard in saved:
                held.states.append(saved[shard])
        self._unfinished = dict(self._shards)
        self._reader.close()
        self._reader.states = dict(saved)
        self._answers = self._batches.batches(self._requests)

    def take(self, shards: Sequence[int], after: Numbers) -> tuple[Items, dict[int, int]]:
        """Return the next sample of a shard for each turn, and the ends of shards met in them.

        after: (num_shards,) the samples taken of each shard after these turns. Raises DataError if
        a shard has another length than before.
        """
        self._needed = after
        numbers: list[int] = []
        samples: list[Any] = []
        ends: dict[int, int] = {}
        for shard in shards:
            held = self._shards[shard]
            while not held.samples and held.end < 0:
                self._wanted = shard
                self._store(next(self._answers))
            if held.samples:
                numbers.append(held.numbers.popleft())
                samples.append(held.samples.popleft())
            else:  # WHY not when it was met: the plan goes by what its turns have found so far
                ends[shard] = held.end
        return Items(numbers, samples), ends

    def holds(self, after: Numbers) -> bool:
        """Return whether take() up to after needs to read nothing. after: as there."""
        return bool((after <= self._stored).all())

    def read_to_the_end(self) -> None:
        """Read each shard to its end: a shard that is longer than it said is found here."""
        self._needed = np.maximum(self._needed, self._sampler.sizes)
        for answer in self._answers:  # WHY all: the workers then wait for the next epoch
            self._store(answer)

    def states(self, position: StreamPosition) -> dict[int, ReaderState]:
        """Return the newest state of each shard up to position; forget those before it."""
        found = {}
        for shard, held in self._shards.items():
            taken, states = position.taken[shard], held.states
            while len(states) > 1 and states[1][1] <= taken:
                states.popleft()
            if states and states[0][1] <= taken:
                found[shard] = states[0]
        return found

    def _requests(self) -> Iterator[Request]:
        """Yield what is to be read next, until all of this rank's shards are read to their end."""
        empty = torch.empty(0, dtype=torch.int64)
        num_shards, block = self._sampler.num_shards, self._block
        while self._unfinished:
            shard = self._choose()
            if shard < 0:  # nothing to do for this worker at the moment
                yield self._epoch, empty
                continue
            held = self._unfinished[shard]
            first, count = held.asked, block
            held.asked += block
            if first <= (size := int(self._sampler.sizes[shard])) <= held.asked:
                count = size - first + 1  # WHY one more: so the end is met, too
            numbers = id_of(shard, first, num_shards), id_of(shard, first + count, num_shards)
            # WHY numpy: torch's arange takes twice as long, and this is for each block
            yield self._epoch, torch.from_numpy(np.arange(*numbers, num_shards))

    def _choose(self) -> int:
        """Return the shard of which the next worker is to read a block; -1: of none."""
        count, wanted = self._batches.num_workers, self._unfinished.get(self._wanted)
        if not count and wanted is not None and not wanted.samples:
            return self._wanted
        worker, limit = self._batches.next_worker, BLOCKS_AHEAD * self._block
        needed: list[int] = self._needed.tolist()
        ahead, shard = min(
            (
                (held.asked - needed[shard], shard)
                for shard, held in self._unfinished.items()
                if held.number % max(1, count) == worker
            ),
            default=(limit, -1),
        )
        return shard if ahead < limit else -1

    def _store(self, answer: Batch) -> None:
        """Add the samples of a block to those of its shard, in the order of the plan."""
        shard = answer.inputs["shard"]
        held = self._shards.get(shard)
        if held is None:  # nothing was asked of the worker
            return
        start = answer.inputs["start"]
        items = items_of(answer)
        numbers, samples = items.numbers, items.samples
        stop, state = start + len(numbers), answer.inputs["state"]
        end, size = answer.inputs["end"], int(self._sampler.sizes[shard])
        if answer.inputs["is_blocked"] and 0 <= size < stop:
            # No reader gets there, so only the size says where the bad samples end.
            numbers, samples = numbers[: size - start], samples[: size - start]
            stop = end = size
        if self._block > 1:
            order = block_order(self._sampler.seed, self._epoch, shard, start, len(numbers))
            numbers = list(map(numbers.__getitem__, order))
            samples = list(map(samples.__getitem__, order))
        # An epoch may be continued within a block: its first samples were taken before.
        if (first := int(self._stored[shard]) - start) > 0:
            numbers, samples = numbers[first:], samples[first:]
        held.numbers.extend(numbers)
        held.samples.extend(samples)
        self._stored[shard] = max(int(self._stored[shard]), stop)
        if end >= 0:
            held.end = end
            self._unfinished.pop(shard, None)
        if state is not None:
            held.states.append((self._epoch, stop, state))
            self._reader.states[shard] = held.states[-1]
        found = held.end if held.end >= 0 else stop
        if 0 <= size != found and (found > size or held.end >= 0):
            least = "" if held.end >= 0 else "at least "
            said = "sizes say" if self._sampler.declares_length else "in the epoch before"
            raise DataError(
                f"shard {shard} of the stream has {least}{found} samples in epoch {self._epoch}, "
                f"and not {size} as {said}",
                fix="make open() give the same number of samples in every epoch, and correct sizes",
            )


def items_of(answer: Batch) -> Items:
    """Return the samples of a block in the order of their shard, bad ones too."""
    numbers: list[int] = answer.indices.tolist()
    samples = unpack(answer.inputs["samples"], len(numbers))
    if not answer.bad:
        return Items(numbers, samples)
    found = dict(zip(numbers, samples, strict=True)) | {bad.index: bad for bad in answer.bad}
    return Items(sorted(found), [found[number] for number in sorted(found)])


def split_bad(items: Items) -> tuple[Items, tuple[BadSample, ...]]:
    """Return the good samples, and the bad ones."""
    bad = tuple(sample for sample in items.samples if isinstance(sample, BadSample))
    if not bad:  # the usual case, in each step
        return items, ()
    pairs = zip(items.numbers, items.samples, strict=True)
    numbers = [number for number, sample in pairs if not isinstance(sample, BadSample)]
    return Items(numbers, [s for s in items.samples if not isinstance(s, BadSample)]), bad
