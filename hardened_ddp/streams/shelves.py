"""The samples of a rank's shards, read ahead of the steps that take them.

Owns what is asked for, in which order, and the samples that have come but were not taken yet. A
shard is read in blocks, by the same worker as long as it lives; whichever worker answers, the block
is the same. Samples are shuffled within blocks: a run that resumes reads the block again, so no
buffer has to be saved.
Does not own: reading a block (shard_reader.py), the plan (shards.py), workers (stream.py).
What goes wrong here: a shard has another length than before. That is an error: what is behind the
end would never be read.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch

from hardened_ddp.data.batches.batch import BadSample, Batch, Request
from hardened_ddp.data.batches.stream import BatchStream
from hardened_ddp.errors import DataError
from hardened_ddp.streams.block_reader import BlockReader
from hardened_ddp.streams.open_shard import Shortcut
from hardened_ddp.streams.packing import unpack
from hardened_ddp.streams.shard_sampler import ShardSampler
from hardened_ddp.streams.shards import UNKNOWN, Facts, Numbers, block_order, id_of

log = logging.getLogger(__name__)

BLOCKS_AHEAD = 2
"""Blocks of each shard that workers read ahead of what is needed."""

_MANY_SAMPLES = 10_000  # reading so many again is worth a warning


@dataclass(slots=True)
class Items:
    """Samples in the order of the plan, bad ones too, each with its number.

    WHY two lists and no pairs: pairs are objects more for each sample, and Python's garbage
    collector looks at those that are held.
    """

    numbers: list[int] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    """Samples or BadSample. Any: whatever the stream gives."""

    def part(self, start: int, stop: int) -> "Items":
        """Return the items at these positions."""
        return Items(self.numbers[start:stop], self.samples[start:stop])


@dataclass(slots=True)
class _Shelf:
    """What this rank holds of one of its shards, in the order of the plan."""

    asked: int
    """Index of the first sample of the next block to ask for."""

    number: int
    """Among this rank's shards: decides which worker reads it."""

    numbers: deque[int] = field(default_factory=deque)
    samples: deque[Any] = field(default_factory=deque)
    """As in Items."""

    end: int = UNKNOWN
    shortcuts: deque[Shortcut] = field(default_factory=deque)


class Shelves:
    """The samples of this rank's shards of one epoch, and what is under way."""

    def __init__(self, sampler: ShardSampler, stream: BatchStream) -> None:
        """stream: one whose fetcher is a BlockReader."""
        assert isinstance(stream.fetcher, BlockReader)
        self._sampler, self._stream = sampler, stream
        self._reader = stream.fetcher.reader
        self._block = sampler.shuffle_block
        self._epoch = -1
        self._wanted = -1
        """The shard that is waited for."""

        self._needed: Numbers = np.empty(0, dtype=np.int64)
        """(num_shards,): the samples of each shard below this index are wanted."""

        self._stored: Numbers = np.empty(0, dtype=np.int64)
        """(num_shards,): index of the sample behind the last one held; of other ranks' shards a
        number above all."""

        self._shelves: dict[int, _Shelf] = {}
        self._unfinished: dict[int, _Shelf] = {}
        """Those whose end was not met yet."""

        self._answers: Iterator[Batch] = iter(())

    def begin(self, facts: Facts, shards: Sequence[int], saved: Mapping[int, Shortcut]) -> None:
        """Start to read these shards from facts on. saved: states of their readers, by shard."""
        self._epoch, self._wanted, self._shelves, num_again = facts.epoch, -1, {}, 0
        self._needed = facts.taken
        self._stored = np.full(len(facts.taken), np.iinfo(np.int64).max)
        for number, shard in enumerate(shards):
            at = int(facts.taken[shard])
            if 0 <= facts.ends[shard] <= at:
                continue
            shelf = _Shelf(at // self._block * self._block, number)
            self._stored[shard] = at
            self._shelves[shard] = shelf
            if shard in saved:
                shelf.shortcuts.append(saved[shard])
            num_again += at - (saved[shard][1] if shard in saved else 0)
        self._unfinished = dict(self._shelves)
        self._reader.close()
        self._reader.shortcuts = dict(saved)
        if num_again > _MANY_SAMPLES:
            log.warning(
                "epoch %d continues in its middle: %d samples are read again to get there, which "
                "state_dict() of the stream's iterators would avoid",
                facts.epoch,
                num_again,
            )
        self._answers = self._stream.batches(self._requests)

    def take(self, shards: Sequence[int], after: Numbers) -> tuple[Items, dict[int, int]]:
        """Return the next sample of a shard for each turn, and the ends of shards met in them.

        after: (num_shards,) the samples taken of each shard after these turns. Raises DataError if
        a shard has another length than before.
        """
        self._needed = after
        shelves = self._shelves
        numbers: list[int] = []
        samples: list[Any] = []
        ends: dict[int, int] = {}
        for shard in shards:
            shelf = shelves[shard]
            while not shelf.samples and shelf.end < 0:
                self._wanted = shard
                self._store(next(self._answers))
            if shelf.samples:
                numbers.append(shelf.numbers.popleft())
                samples.append(shelf.samples.popleft())
            else:  # WHY only here: an end that was met ahead of its turn is not yet a fact
                ends[shard] = shelf.end
        return Items(numbers, samples), ends

    def holds(self, after: Numbers) -> bool:
        """Return whether take() up to after needs to read nothing. after: as there."""
        return bool((after <= self._stored).all())

    def read_to_the_end(self) -> None:
        """Read what is left of each shard: nothing, if it has as many samples as it said."""
        self._needed = np.maximum(self._needed, self._sampler.sizes)
        for answer in self._answers:  # WHY all: idle workers are then kept for the next epoch
            self._store(answer)

    def shortcuts(self, facts: Facts) -> dict[int, Shortcut]:
        """Return of each shard the newest state at or before facts; forget those before it."""
        found = {}
        for shard, shelf in self._shelves.items():
            taken, states = facts.taken[shard], shelf.shortcuts
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
            shelf = self._unfinished[shard]
            first, count = shelf.asked, block
            shelf.asked += block
            if first <= (size := int(self._sampler.sizes[shard])) <= shelf.asked:
                count = size - first + 1  # WHY one more: so the end is met, too
            numbers = id_of(shard, first, num_shards), id_of(shard, first + count, num_shards)
            # WHY numpy: torch's arange takes twice as long, and this is for each block
            yield self._epoch, torch.from_numpy(np.arange(*numbers, num_shards))

    def _choose(self) -> int:
        """Return the shard of which the next worker is to read a block; -1: of none."""
        count, wanted = self._stream.num_workers, self._unfinished.get(self._wanted)
        if not count and wanted is not None and not wanted.samples:
            return self._wanted
        worker, limit = self._stream.next_worker, BLOCKS_AHEAD * self._block
        needed: list[int] = self._needed.tolist()
        ahead, shard = min(
            (
                (shelf.asked - needed[shard], shard)
                for shard, shelf in self._unfinished.items()
                if shelf.number % max(1, count) == worker
            ),
            default=(limit, -1),
        )
        return shard if ahead < limit else -1

    def _store(self, answer: Batch) -> None:
        """Put the samples of a block on their shelf, in the order of the plan."""
        shard, start = answer.inputs["shard"], answer.inputs["start"]
        shelf = self._shelves.get(shard)
        if shelf is None:  # nothing was asked of the worker
            return
        items = items_of(answer)
        numbers, samples = items.numbers, items.samples
        position, state = start + len(numbers), answer.inputs["state"]
        end, size = answer.inputs["end"], int(self._sampler.sizes[shard])
        if answer.inputs["is_blocked"] and 0 <= size < position:
            # No reader gets there, so only the size says where the bad samples end.
            numbers, samples = numbers[: size - start], samples[: size - start]
            position = end = size
        if self._block > 1:
            order = block_order(self._sampler.seed, self._epoch, shard, start, len(numbers))
            numbers = list(map(numbers.__getitem__, order))
            samples = list(map(samples.__getitem__, order))
        # It may go on within a block; what is behind stored was taken from it before.
        if (first := int(self._stored[shard]) - start) > 0:
            numbers, samples = numbers[first:], samples[first:]
        shelf.numbers.extend(numbers)
        shelf.samples.extend(samples)
        self._stored[shard] = max(int(self._stored[shard]), position)
        if end >= 0:
            shelf.end = end
            self._unfinished.pop(shard, None)
        if state is not None:
            shelf.shortcuts.append((self._epoch, position, state))
            self._reader.shortcuts[shard] = shelf.shortcuts[-1]
        found = shelf.end if shelf.end >= 0 else position
        if 0 <= size != found and (found > size or shelf.end >= 0):
            self._refuse(shard, size, found, is_end=shelf.end >= 0)

    def _refuse(self, shard: int, size: int, found: int, *, is_end: bool) -> NoReturn:
        is_said = getattr(self._sampler.stream, "sizes", None) is not None
        raise DataError(
            f"shard {shard} of the stream has {'' if is_end else 'at least '}{found} samples in "
            f"epoch {self._epoch}, and not {size} as "
            + ("the stream's sizes say" if is_said else "in the epoch before"),
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
    if BadSample not in set(map(type, items.samples)):  # the usual case, in each step
        return items, ()
    good = Items()
    bad: list[BadSample] = []
    for number, sample in zip(items.numbers, items.samples, strict=True):
        if isinstance(sample, BadSample):
            bad.append(sample)
        else:
            good.numbers.append(number)
            good.samples.append(sample)
    return good, tuple(bad)
