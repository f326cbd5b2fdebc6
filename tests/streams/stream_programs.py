"""Streams for tests, and ranks in threads that read one, without a process group."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BrokenBarrierError
from typing import Any

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.sampler import UNKNOWN_STEPS, RunLength, Window
from hardened_ddp.streams.block_reader import BlockReader
from hardened_ddp.streams.planner import StreamPosition
from hardened_ddp.streams.shard_loader import ShardLoader
from hardened_ddp.streams.shard_sampler import ShardSampler
from hardened_ddp.streams.stream_batches import HeldSamples
from tests.data.scripted import make_reader
from tests.plugins import Points


class Rows:
    """A stream of shards of given lengths: sample i of shard s is (s * 1000 + i, label)."""

    uses_randomness = False
    num_classes = 2

    def __init__(self, lengths: Sequence[int], *, says: Sequence[int] | None = None) -> None:
        self.lengths, self.num_shards = list(lengths), len(lengths)
        if says is not None:
            self.sizes = list(says)
        self.opened: list[tuple[int, int, Any]] = []

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        self.opened.append((shard, epoch, state))
        return self.rows(shard, epoch, state or 0)

    def rows(self, shard: int, epoch: int, first: int) -> Iterator[Any]:
        for index in range(first, self.length(shard, epoch)):
            yield self.row(shard, index)

    def row(self, shard: int, index: int) -> Any:
        return torch.tensor([float(shard * 1000 + index)]), index % 2

    def length(self, shard: int, epoch: int) -> int:
        return self.lengths[shard]


class StatefulRows(Rows):
    """The same with a small state: the index of the next sample."""

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        self.opened.append((shard, epoch, state))
        return _Cursor(self, shard, self.length(shard, epoch), state or 0)


class _Cursor:
    def __init__(self, rows: Rows, shard: int, end: int, index: int) -> None:
        self.rows, self.shard, self.end, self.index = rows, shard, end, index

    def __iter__(self) -> "_Cursor":
        return self

    def __next__(self) -> Any:
        if self.index >= self.end:
            raise StopIteration
        self.index += 1
        return self.rows.row(self.shard, self.index - 1)

    def state_dict(self) -> int:
        return self.index


class PointStream(StatefulRows):
    """The points as a stream of ragged shards; while the file pace is there they take time."""

    uses_randomness = True  # as of a stream that says nothing of it

    def __init__(self, lengths: Sequence[int], *, says: bool, pace: str, broken: str) -> None:
        """broken: shard/index of a sample that can't be read."""
        super().__init__(lengths, says=lengths if says else None)
        self.pace, self.broken = pace, broken

    def row(self, shard: int, index: int) -> Any:
        if os.path.exists(self.pace):
            time.sleep(0.01)
        if f"{shard}/{index}" == self.broken:
            raise ValueError("a broken row")
        return Points(1)[shard * 1000 + index]


def point_stream(
    train: bool,
    lengths: tuple[int, ...] = (50, 31, 64, 7, 40, 40),
    says: bool = False,
    pace: str = "",
    broken: str = "",
) -> PointStream:
    return PointStream(lengths if train else (9, 0, 8), says=says, pace=pace, broken=broken)


class Meeting:
    """What Group does for the loaders of ranks in threads: one maximum after the other."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.tensors: list[torch.Tensor] = []
        self.barrier = threading.Barrier(world_size, action=self._take_max, timeout=20)

    def start_max(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return tensor if self.world_size > 1 else None

    def finish(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)
        self.barrier.wait()

    def _take_max(self) -> None:
        most = torch.stack(self.tensors).amax(dim=0)
        for tensor in self.tensors:
            tensor.copy_(most)
        self.tensors.clear()


def shard_loader(
    stream: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    group: Any = None,
    num_workers: int = 0,
    epochs: int = 1,
    **how: Any,
) -> ShardLoader:
    how = {"global_batch": 8, "batch_size": 3, "shuffle_block": 4, **how}
    sampler = ShardSampler(stream, num_replicas=world_size, rank=rank, seed=1, **how)
    sampler.length = RunLength(UNKNOWN_STEPS, UNKNOWN_STEPS)
    return ShardLoader(
        sampler,
        make_reader(BlockReader(stream, seed=1), num_workers),
        Fetcher(HeldSamples(stream), seed=1),
        group or Meeting(world_size),
        epochs=epochs,
        pin_memory=False,
    )


def read_whole(loader: ShardLoader) -> list[Batch]:
    """Read an epoch, and close the loader."""
    with contextlib.closing(loader):
        return [batch for _, batches in loader.windows(0, 0) for batch in batches]


Step = tuple[Window, list[Batch], dict[str, Any]]
"""A window, this rank's batches, and what a checkpoint after it holds."""


def read_epoch(
    make: Callable[[], Any], world_size: int, *, facts: Any = None, most: int = 10**6, **how: Any
) -> list[list[Step]]:
    """Read at most so many steps of an epoch on ranks in threads; facts: where to begin."""
    meeting, found = Meeting(world_size), [[] for _ in range(world_size)]

    def work(rank: int) -> None:
        loader = shard_loader(make(), rank=rank, world_size=world_size, group=meeting, **how)
        start = 0
        try:
            if facts is not None:
                start = StreamPosition.from_json(facts["facts"]).cursor
                loader.sampler.restore(facts, epoch=0, cursor=start)
            for window, batches in loader.windows(0, start):
                saved = loader.sampler.as_json(0, window.stop)
                found[rank].append((window, batches, saved))
                if len(found[rank]) == most:
                    break
        except BaseException:
            meeting.barrier.abort()
            raise
        finally:
            loader.close()

    with ThreadPoolExecutor(world_size) as pool:
        errors = [work.exception() for work in [pool.submit(work, r) for r in range(world_size)]]
    # WHY the others last: a rank whose barrier another one broke is not the cause
    for error in sorted(filter(None, errors), key=lambda e: isinstance(e, BrokenBarrierError)):
        raise error
    return found


def ids_of(steps: list[Step]) -> list[list[int]]:
    """Give the samples of each step of one rank."""
    return [[int(i) for batch in batches for i in batch.indices] for _, batches, _ in steps]


def merged(ranks: list[list[Step]]) -> list[list[int]]:
    """Give the samples of each step over all ranks."""
    parts = zip(*(ids_of(steps) for steps in ranks), strict=True)
    return [sorted(number for part in step for number in part) for step in parts]


def all_ids(lengths: Sequence[int]) -> list[int]:
    """Give the numbers of all samples of a stream."""
    count = len(lengths)
    return sorted(i * count + shard for shard, n in enumerate(lengths) for i in range(n))
