"""The training windows of a rank that are read from a stream.

Owns which shards this rank reads, and which of their samples a step takes. A rank owns every
world_size-th shard of the epoch's order; with fewer shards than ranks, each rank reads all of them
and keeps its part. Where ends of shards are not known, the ranks tell each other which were met in
a step before it begins: one small all-reduce that runs beside the step before.
Does not own: the plan (planner.py), reading ahead (read_ahead.py), making batches
(stream_batches.py), the positions of a checkpoint (shard_sampler.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hardened_ddp.data.batches.batch import BadSample, Batch
from hardened_ddp.data.batches.checks import none_readable
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.loader import BatchReader
from hardened_ddp.data.batches.sampler import Window, share_of
from hardened_ddp.data.batches.workers import WorkerPlan
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.config import Config
from hardened_ddp.streams.block_reader import BlockReader
from hardened_ddp.streams.planner import (
    UNKNOWN,
    Share,
    StreamPlanner,
    StreamPosition,
    advance,
    id_of,
    settle,
    shard_order,
)
from hardened_ddp.streams.read_ahead import Items, ReadAhead, items_of
from hardened_ddp.streams.reader_states import ShardStates
from hardened_ddp.streams.shard_sampler import ShardSampler
from hardened_ddp.streams.stream_batches import BatchMaker, HeldSamples, TakenStep

_MOST_BAD = 16  # of the first samples: then the others will hardly be better
_WINDOWS_HELD = 4  # if parts of a batch may be collated again: step/async_device.py


@dataclass(frozen=True, slots=True)
class _Read:
    """The turns of a step, and this rank's samples of them."""

    position: StreamPosition
    share: Share
    items: Items
    # (num_shards,): the ends that were met, on any rank; None: there can be none.
    ends: torch.Tensor | None
    work: Any  # a dist.Work: the ends on their way to the other ranks


class ShardLoader:
    """The training windows of this rank, with their micro-batches, read from a stream."""

    def __init__(
        self,
        sampler: ShardSampler,
        reader: BatchReader,
        fetcher: Fetcher,
        group: Group,
        *,
        epochs: int,
        pin_memory: bool,
    ) -> None:
        """reader: reads blocks. fetcher: of HeldSamples. epochs: of the run."""
        self.sampler = sampler
        self.reader = reader
        self._maker = BatchMaker(fetcher, batch_size=sampler.batch_size, pin_memory=pin_memory)
        self._group = group
        self._epochs = epochs
        self._states: ShardStates | None = None
        self._read_ahead = ReadAhead(sampler, reader)
        self._unmet = torch.full((sampler.num_shards,), UNKNOWN, dtype=torch.int64)
        # Ranks among which the shards are shared out.
        self._num_owners = 1 if sampler.is_shared else sampler.num_replicas
        self._planner: StreamPlanner  # of the epoch
        self._over: StreamPosition | None = None  # the end of the epoch, once it was met

    def windows(
        self, epoch: int, start: int, step: int = 0
    ) -> Iterator[tuple[Window, list[Batch]]]:
        """Yield each window from the cursor start on, and this rank's share, which may be empty.

        step: the steps done before. Collective: all ranks iterate alike.
        """
        sampler = self.sampler
        position = sampler.position_at(epoch, start)
        sampler.begin_at(position)
        self._begin(position)
        made = self._maker.batches_of(self._take(position))
        current = next(made, None) if start < sampler.end else None
        if current is None:
            sampler.end_at(self._over or position, last_step=step, epochs=self._epochs)
        while current is not None:
            taken, batches = current
            step, after = step + 1, taken.after
            sampler.reach(after)
            # WHY look ahead: the last step of an epoch has to be known as the last one.
            following = None if after.knows_ends else next(made, None)
            is_last = after.cursor >= sampler.end if after.knows_ends else following is None
            if is_last:
                sampler.end_at(self._over or after, last_step=step, epochs=self._epochs)
            yield taken.window, batches
            if self._states is not None:
                self._states.note(after, self._read_ahead.states)
            current = None if is_last else following or next(made, None)
        self._read_ahead.read_to_the_end()

    def sample_batches(self, device: torch.device) -> list[Batch]:
        """Read two batches of two samples, different ones on each rank if possible.

        Raises SampleError if none of the first samples can be read.
        """
        sampler, blocks = self.sampler, self.reader.fetcher
        assert isinstance(blocks, BlockReader)
        own = range(sampler.rank, sampler.rank + 8 * sampler.num_replicas, sampler.num_replicas)
        found, bad = self._first_batches(own, blocks)
        if not found:  # WHY all: the shards of this rank may be empty
            found, bad = self._first_batches(range(sampler.num_shards), blocks)
        blocks.reader.close()
        if not found:
            raise none_readable(bad[0].error if bad else "no shard has a sample")
        return [batch.to(device) for batch in found]

    def _first_batches(
        self, numbers: Iterable[int], blocks: BlockReader
    ) -> tuple[list[Batch], list[BadSample]]:
        """Read up to two batches of two samples near the start of shards, and those that are bad.

        numbers: number n is of shard n modulo num_shards.
        """
        count = self.sampler.num_shards
        found: list[Batch] = []
        bad: list[BadSample] = []
        for number in numbers:
            index, shard = divmod(number, count)
            first = id_of(shard, 2 * index, count)
            answer = blocks[(0, torch.tensor([first, first + count]))]
            batch = self._maker.make_one(items_of(answer), epoch=0)
            bad += batch.bad
            if batch.num_samples:
                found.append(batch)
            if len(found) == 2 or len(bad) >= _MOST_BAD:
                break
        return found, bad

    def open_folder(self, run: Path) -> None:
        """Keep the readers' states in the run folder from now on, and use those that are there."""
        self._states = ShardStates(run, rank=self.sampler.rank)

    def close(self) -> None:
        """End the workers, and write the readers' states."""
        if self._states is not None:
            self._states.close()
        self.reader.close()

    def _begin(self, position: StreamPosition) -> None:
        """Choose this rank's shards of an epoch, and start to read them."""
        sampler = self.sampler
        order = shard_order(sampler.seed, position.epoch, sampler.num_shards)
        first = sampler.rank % self._num_owners
        self._planner = StreamPlanner(
            order, sampler.global_batch, rank=first, num_owners=self._num_owners
        )
        mine = order[first :: self._num_owners]
        saved = {} if self._states is None else self._states.read(position)
        self._read_ahead.begin(position, mine.tolist(), saved)

    def _take(self, position: StreamPosition) -> Iterator[TakenStep]:
        """Yield the windows that have samples, each as soon as its size is known. Collective."""
        read, self._over = None, None
        while not position.is_over:
            taken = self._finish(read or self._read(position))
            position = taken.after
            # WHY here: the next step's all-reduce of ends runs while this step is trained.
            read = self._read(position) if self._tells_ends(position) else None
            if taken.window.size:
                yield taken
        self._over = position

    def _read(self, position: StreamPosition) -> _Read:
        """Take this rank's samples of the next window; start to tell which shards end in it."""
        share = self._planner.next(position)
        items, met = self._read_ahead.take(share.shards, share.turns.taken)
        ends, work = None, None
        if met or self._tells_ends(position):
            ends = self._unmet.clone()
            for shard, end in met.items():
                ends[shard] = end
            if self._num_owners > 1:
                work = self._group.start_max(ends)  # collective
        return _Read(position, share, items, ends, work)

    def _tells_ends(self, position: StreamPosition) -> bool:
        """Return whether the ranks tell each other the ends that they meet in the next step."""
        return self._num_owners > 1 and not position.knows_ends

    def _finish(self, read: _Read) -> TakenStep:
        """Learn which of a window's turns have a sample. Collective."""
        sampler, position, items = self.sampler, read.position, read.items
        turns, is_idle = read.share.turns, read.share.has_idle_rank
        if read.work is not None:
            self._group.finish(read.work)  # collective
        if read.ends is None:
            after, size = advance(position, turns), len(turns)
        else:
            after, is_real = settle(position, turns, read.ends.numpy())
            size, is_idle = int(is_real.sum()), self._planner.has_idle_rank(turns.shards[is_real])
        if sampler.is_shared:
            start, stop = share_of(size, rank=sampler.rank, world_size=sampler.num_replicas)
            items, is_idle = items.part(start, stop), False
        window = Window(position.epoch, position.cursor, size, has_idle_rank=is_idle)
        # WHY not if ranks tell each other ends: a collective has its turn among those of training.
        can_go_on = not (after.is_over or self._tells_ends(after))
        is_next_here = can_go_on and self._read_ahead.holds(self._planner.peek(after).turns.taken)
        return TakenStep(window, items, after, is_next_here)


def build_shard_loader(
    sampler: ShardSampler,
    of_stream: Fetcher,
    plan: WorkerPlan,
    config: Config,
    group: Group,
    *,
    pin_memory: bool,
) -> ShardLoader:
    """Build the loader of this rank's training windows of a stream. Rank-local.

    of_stream: has the checks and the collate of its batches.
    """
    num_mine = sampler.num_shards // (1 if sampler.is_shared else sampler.num_replicas)
    plan = replace(plan, num_workers=min(plan.num_workers, num_mine))
    checks, collate = of_stream.checks, of_stream.collate
    held = HeldSamples(sampler.stream, num_windows=1 if collate is None else _WINDOWS_HELD)
    blocks = BlockReader(sampler.stream, seed=sampler.seed)
    return ShardLoader(
        sampler,
        BatchReader(blocks, plan, config.data, pin_memory=False),
        Fetcher(held, seed=sampler.seed, checks=checks, collate=collate),
        group,
        epochs=config.loop.epochs,
        pin_memory=pin_memory,
    )
