"""Which samples of a stream each optimizer step takes: the plan over its shards.

A stream is num_shards logical shards, each of which gives its samples in a fixed order. The plan
deals one sample of each shard in turn, round after round, over a permutation of the shards that
depends on (seed, epoch); a shard that is known to be over is passed over. A step takes the next
global_batch turns. So the plan is a function of the data alone: ranks, workers and prefetching are
not in it. A turn whose shard turns out to be over stays empty: that step is smaller.

Owns the plan, and StreamPosition: equal on all ranks, JSON in a checkpoint.
Does not own: reading (shard_reader.py), which rank reads what (shard_loader.py).
"""

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hardened_ddp.data.batches.permutation import hash_words
from hardened_ddp.ranks.seeding import mix

Numbers = npt.NDArray[np.int64]

UNKNOWN = -1  # the end of a shard that nobody has reached yet
_ENDLESS = 1 << 62
_MOST_COUNTS = 1 << 20  # of samples by step and shard, for the steps that are dealt at once
_NUM_ORDERS = 1024  # of the samples of a block
_SHARDS, _BLOCKS = 1, 2  # what a permutation is of: each has its own key


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position in a stream. Two runs at equal positions take the same samples from there on."""

    epoch: int
    place: int  # where in the order of the shards the next turn is
    taken: Numbers  # (num_shards,): samples consumed of each shard
    ends: Numbers  # (num_shards,): samples of each shard, or UNKNOWN
    cursor: int  # samples of this epoch consumed, over all shards
    size: int  # samples of the epoch; UNKNOWN unless the length of every shard is known

    @classmethod
    def at(cls, epoch: int, place: int, taken: Numbers, ends: Numbers) -> "StreamPosition":
        """Return a position, with what follows from its numbers."""
        size = int(ends.sum()) if (ends >= 0).all() else UNKNOWN
        return cls(epoch, place, taken, ends, int(taken.sum()), size)

    @classmethod
    def at_start(cls, epoch: int, ends: Numbers) -> "StreamPosition":
        return cls.at(epoch, 0, np.zeros_like(ends), ends.copy())

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "StreamPosition":  # Any: JSON
        taken, ends = (np.array(saved[name], dtype=np.int64) for name in ("taken", "ends"))
        return cls.at(int(saved["epoch"]), int(saved["place"]), taken, ends)

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "epoch": self.epoch,
            "place": self.place,
            "taken": self.taken.tolist(),
            "ends": self.ends.tolist(),
        }

    @property
    def knows_ends(self) -> bool:
        """Whether the length of every shard is known."""
        return self.size >= 0

    @property
    def is_over(self) -> bool:
        """Whether the epoch is known to be over."""
        return 0 <= self.size <= self.cursor


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of one step, in order: which sample of which shard."""

    shards: Numbers
    indices: Numbers
    place: int  # as in StreamPosition, after these turns
    taken: Numbers  # as in StreamPosition, after these turns if each of them has a sample

    def __len__(self) -> int:
        return len(self.shards)


@dataclass(frozen=True, slots=True)
class Share:
    """The turns of one step, as a rank sees them."""

    turns: Turns
    shards: list[int]  # of this rank's turns, in order
    has_idle_rank: bool  # some rank has none of the turns


def shard_order(seed: int, epoch: int, num_shards: int) -> Numbers:
    """Return the order in which the shards of an epoch take turns."""
    # WHY hashes: as for the samples of a map-style dataset (data/batches/sampler.py).
    words = np.arange(num_shards, dtype=np.uint64)
    order: Numbers = np.argsort(hash_words(words, key=mix(seed, epoch, _SHARDS)))
    return order


def block_order(seed: int, epoch: int, shard: int, start: int, size: int) -> list[int]:
    """Return the order of the samples of one block of a shard, for shuffling within blocks."""
    choice = mix(seed, epoch, _BLOCKS, shard, start) % _NUM_ORDERS
    return _some_order(size, choice)


@functools.lru_cache(maxsize=4 * _NUM_ORDERS)
def _some_order(size: int, choice: int) -> list[int]:
    """Return one of _NUM_ORDERS permutations. WHY so few: to make one costs as much as to read."""
    words = np.arange(size, dtype=np.uint64)
    order: list[int] = np.argsort(hash_words(words, key=mix(_BLOCKS, size, choice))).tolist()
    return order


def deal(position: StreamPosition, order: Numbers, size: int) -> Turns:
    """Deal the next size turns, or fewer if the epoch is known to be over before. Pure.

    order: of shard_order. Whole rounds at once: the cost does not grow with the turns of a shard.
    """
    at = position.taken.copy()
    room = np.where(position.ends < 0, _ENDLESS, position.ends - position.taken)
    place, left = position.place, size
    shards, indices = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    while left:
        turns = np.concatenate((order[place:], order[:place]))
        places = np.flatnonzero(room[turns] > 0)  # of the shards that are not over
        if not places.size:
            break
        rounds = min(left // places.size, int(room[turns[places]].min()))
        if rounds == 0:  # less than a round is left
            places, rounds = places[:left], 1
        live = turns[places]
        shards.append(np.tile(live, rounds))
        indices.append((at[live] + np.arange(rounds)[:, None]).reshape(-1))
        at[live] += rounds
        room[live] -= rounds
        left -= rounds * live.size
        place = (place + int(places[-1]) + 1) % len(order)
    return Turns(np.concatenate(shards), np.concatenate(indices), place, at)


class StreamPlanner:
    """Deals the turns of one step after the other, as deal() does, and says which are a rank's.

    WHY many steps at once: to deal a thousand turns costs as much as to deal ten.
    """

    def __init__(
        self,
        order: Numbers,
        size: int,
        *,
        rank: int = 0,
        num_owners: int = 1,
        at_once: int = 16_384,
    ) -> None:
        """order: of shard_order. size: turns of a step. at_once: turns dealt ahead, at most.

        rank, num_owners: every num_owners-th shard of the order, from number rank on, is this
        rank's.
        """
        self._order, self._size = order, size
        self._rank, self._num_owners = rank, num_owners
        num_steps = min(at_once // size, _MOST_COUNTS // max(1, len(order)))
        self._ahead = max(1, num_steps) * size
        self._place_of = np.argsort(order)
        self._dealt: deque[Share] = deque()
        self._ends: Numbers | None = None  # what was known when they were dealt
        self._next = 0  # cursor of the step that dealt[0] is for

    def next(self, position: StreamPosition) -> Share:
        """Return deal(position, order, size), and this rank's part of it."""
        share = self.peek(position)
        self._dealt.popleft()
        self._next = position.cursor + len(share.turns)
        return share

    def peek(self, position: StreamPosition) -> Share:
        """Return what next(position) will return."""
        if not self._dealt or position.ends is not self._ends or position.cursor != self._next:
            self._dealt = deque(self._deal(position))
            self._ends, self._next = position.ends, position.cursor
        return self._dealt[0]

    def has_idle_rank(self, shards: Numbers) -> bool:
        """Return whether some rank has none of these shards."""
        owners = self._place_of[shards] % self._num_owners
        return bool(np.bincount(owners, minlength=self._num_owners).min() == 0)

    def _deal(self, position: StreamPosition) -> Iterator[Share]:
        """Yield the turns of the next steps, at least of one."""
        dealt = deal(position, self._order, self._ahead)
        firsts = range(0, max(1, len(dealt)), self._size)
        steps, places = np.arange(len(dealt)) // self._size, self._place_of[dealt.shards]
        owners = places % self._num_owners
        taken = _count_in_steps(steps, dealt.shards, len(firsts), len(self._order)).cumsum(axis=0)
        taken += position.taken
        is_idle = _count_in_steps(steps, owners, len(firsts), self._num_owners).min(axis=1) == 0
        is_mine = owners == self._rank
        for step, first in enumerate(firsts):
            part = slice(first, first + self._size)
            shards = dealt.shards[part]
            place = (
                (int(places[part][-1]) + 1) % len(self._order) if len(shards) else position.place
            )
            turns = Turns(shards, dealt.indices[part], place, taken[step])
            yield Share(turns, shards[is_mine[part]].tolist(), bool(is_idle[step]))


def _count_in_steps(steps: Numbers, values: Numbers, num_steps: int, num_values: int) -> Numbers:
    """Count how often each of num_values values is in each step: (num_steps, num_values)."""
    counts = np.bincount(steps * num_values + values, minlength=num_steps * num_values)
    return counts.reshape(num_steps, num_values)


def advance(position: StreamPosition, turns: Turns) -> StreamPosition:
    """Return the position after turns that all have a sample. Pure."""
    # WHY the same ends: so StreamPlanner sees that nothing new is known.
    cursor = position.cursor + len(turns)
    return StreamPosition(
        position.epoch, turns.place, turns.taken, position.ends, cursor, position.size
    )


def settle(
    position: StreamPosition, turns: Turns, ends: Numbers
) -> tuple[StreamPosition, npt.NDArray[np.bool_]]:
    """Return the position after turns, and which of the turns have a sample. Pure.

    ends: what was met in these turns, over all ranks; UNKNOWN where no end was met.
    """
    if (ends < 0).all():
        return advance(position, turns), np.ones(len(turns), dtype=np.bool_)
    known = np.where(ends >= 0, ends, position.ends)
    limits = known[turns.shards]
    is_real = (limits < 0) | (turns.indices < limits)
    taken = position.taken + np.bincount(turns.shards[is_real], minlength=len(known))
    return StreamPosition.at(position.epoch, turns.place, taken, known), is_real


def id_of(shard: int, index: int, num_shards: int) -> int:
    """Return the number of a sample in ledgers and messages."""
    return index * num_shards + shard


def shard_of(number: int, num_shards: int) -> tuple[int, int]:
    """Return (shard, index) of a sample by its number."""
    index, shard = divmod(number, num_shards)
    return shard, index
