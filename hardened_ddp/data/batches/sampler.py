"""Which samples each optimizer step takes, and which of them are this rank's.

The order of an epoch is a pure function of (seed, epoch, number of samples), the same for any world
size and worker count. A step takes the next window of it; a rank takes its contiguous share of the
window, which is empty if there are fewer samples than ranks. Nothing is padded, nothing is dropped
unless drop_last says so.
Does not own: the cursor (it moves when a step is done, step/step.py), reading (loader.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, DistributedSampler

from hardened_ddp.data.batches.own_order import BLOCK, MAX_KEPT_ORDER, OwnOrder, Share, pays_off
from hardened_ddp.data.batches.permutation import hash_words, permute
from hardened_ddp.ranks.seeding import mix


class EpochOrder:
    """The order of one epoch's samples: a permutation of range(num_samples).

    Small datasets: the samples sorted by a hash of their index. Large ones: a keyed permutation, so
    that neither memory nor the time to the first index grows with the dataset.
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int) -> None:
        self.num_samples = num_samples
        self._key = mix(seed, epoch)
        self._kept: npt.NDArray[np.int64] | None = None
        if num_samples <= MAX_KEPT_ORDER:
            # WHY not torch.randperm: its algorithm may change between versions of torch, and a
            # resumed run would continue in another order. Hashes of two samples never tie.
            hashes = hash_words(np.arange(num_samples, dtype=np.uint64), key=self._key)
            self._kept = np.argsort(hashes)
        self._block_index = -1
        self._block = np.empty(0, dtype=np.int64)

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return the samples at positions start to stop - 1, as int64."""
        if self._kept is not None:
            return torch.from_numpy(self._kept[start:stop])
        if start == stop:
            return torch.empty(0, dtype=torch.int64)
        first, last = start // BLOCK, (stop - 1) // BLOCK
        blocks = [self._get_block(index) for index in range(first, last + 1)]
        joined = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return torch.from_numpy(joined[start - first * BLOCK : stop - first * BLOCK])

    def _get_block(self, index: int) -> npt.NDArray[np.int64]:
        if index != self._block_index:
            stop = min((index + 1) * BLOCK, self.num_samples)
            positions = np.arange(index * BLOCK, stop, dtype=np.uint64)
            permuted = permute(positions, num_samples=self.num_samples, keys=[self._key])
            self._block_index, self._block = index, permuted.astype(np.int64)
        return self._block


def share_of(size: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return (start, stop) of a rank's contiguous part of size items; it may be empty.

    Parts differ by one item at most; the lower ranks have the longer ones.
    """
    length, num_longer = divmod(size, world_size)
    start = rank * length + min(rank, num_longer)
    return start, start + length + (rank < num_longer)


def split_micro_batches(size: int, batch_size: int) -> list[tuple[int, int]]:
    """Split size items into the fewest parts of at most batch_size, of near-equal length."""
    if size <= batch_size:  # the usual case, and the fast one
        return [(0, size)] if size else []
    return split_evenly(size, -(-size // batch_size))


def split_evenly(size: int, num_parts: int) -> list[tuple[int, int]]:
    """Split size items into num_parts of near-equal length, or into size parts if there are fewer.

    Returns where each begins and ends.
    """
    num_parts = min(num_parts, size)
    return [share_of(size, rank=part, world_size=num_parts) for part in range(num_parts)]


def num_micro_batches(size: int, *, batch_size: int, world_size: int) -> int:
    """Return the micro-batches of each rank in a window of size samples.

    As many as the rank with the most samples needs. WHY not as few as each rank needs: no rank is
    faster for it, and a model may call collectives in its forward, such as SyncBatchNorm. A rank
    with fewer samples than that has as many micro-batches as samples.
    """
    longest_share = -(-size // world_size)
    return -(-longest_share // batch_size)


@dataclass(frozen=True, slots=True)
class Window:
    """The samples of one optimizer step over all ranks: order[start:stop] of an epoch."""

    epoch: int
    start: int
    size: int
    has_idle_rank: bool = False
    """Some rank has none of them, although there are enough: only of a stream."""

    @property
    def stop(self) -> int:
        return self.start + self.size

    def is_for_all(self, world_size: int) -> bool:
        """Return whether every rank has a sample. The same on all ranks."""
        return self.size >= world_size and not self.has_idle_rank


class WindowSampler(DistributedSampler[Any]):
    """A DistributedSampler that yields every sample exactly once, for any number of ranks.

    torch's own pads with repeated samples or drops some, and its order depends on the world size.
    """

    def __init__(
        self,
        dataset: Dataset[Any],  # Any: whatever a sample is
        *,
        num_replicas: int,
        rank: int,
        seed: int,
        global_batch: int,
        batch_size: int,
        drop_last: bool = False,
    ) -> None:
        # WHY drop_last stays False for torch: it would drop other samples than we do.
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)
        self.global_batch = global_batch
        self.batch_size = batch_size
        self.size = len(dataset)  # type: ignore[arg-type]  # map-style: it has a length
        # WHY the comparison: if there is only one short window, it is kept: an epoch needs a step.
        self.drop_last = drop_last and self.size >= global_batch
        self.end = self.size - (self.size % global_batch if self.drop_last else 0)
        """Cursor at which an epoch is done. With drop_last the short last window is behind it."""

        # The public attributes of DistributedSampler: this rank's samples, and those of all ranks.
        self.num_samples, self.total_size = len(self), self.end
        self._orders: dict[int, EpochOrder] = {}
        self._alone: OwnOrder | None = None
        if pays_off(self.size, world_size=num_replicas, global_batch=global_batch):
            self._alone = OwnOrder(self.size, seed=seed)

    @property
    def num_windows(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.end // self.global_batch)

    @property
    def declares_length(self) -> bool:
        """Whether the length of an epoch is known before the first one. Not of every stream."""
        return True

    def steps_left(self, epoch: int, cursor: int, *, epochs: int) -> int | None:
        """Return the optimizer steps from a position to the end of so many epochs."""
        rest = -(-max(0, self.end - cursor) // self.global_batch)
        return max(0, rest + (epochs - epoch - 1) * self.num_windows)

    def next_ids(self, epoch: int, cursor: int) -> list[int]:
        """Return the samples of the step at a position, over all ranks."""
        stop = min(cursor + self.global_batch, self.end)
        return [int(i) for i in self.order(epoch).take(cursor, stop)]

    def as_json(self, epoch: int, cursor: int) -> None:
        """Return what a checkpoint must hold besides epoch and cursor: nothing."""
        return

    def problems_with(self, saved: Mapping[str, Any] | None) -> list[str]:  # Any: JSON
        """Return what differs from the order of a checkpoint, besides its dataset."""
        if saved is None:
            return []
        return ["dataset: the checkpoint is of a stream, and this one is a map-style dataset"]

    def restore(self, saved: object, *, epoch: int, cursor: int) -> None:
        """Go to the position of a checkpoint: the order needs nothing for that."""

    def ledger_facts(self) -> dict[str, int]:
        """Return what a ledger has to know about the order."""
        return {"num_samples": self.size, "epoch_end": self.end}

    def windows(self, start: int = 0) -> Iterator[Window]:
        """Yield the windows of the current epoch (set_epoch) from cursor start on."""
        return self.windows_of(self.epoch, start)

    def windows_of(self, epoch: int, start: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch from cursor start on."""
        for begin in range(start, self.end, self.global_batch):
            yield Window(epoch, begin, min(self.global_batch, self.end - begin))

    def micro_batch_sizes(self, window: Window) -> list[int]:
        """Return the number of samples in each of this rank's micro-batches of window."""
        return [last - first for first, last in self._parts(window)]

    def micro_batches(self, window: Window) -> list[torch.Tensor]:
        """Return the indices of this rank's micro-batches of window; none if its share is empty."""
        start, stop = share_of(window.size, rank=self.rank, world_size=self.num_replicas)
        if start == stop:
            return []
        start, stop = window.start + start, window.start + stop
        if self._alone is None:
            share = self.order(window.epoch).take(start, stop)
        else:
            found = self._alone.find(window.epoch, start, stop)
            if found is None:
                found = self._alone.compute(self._shares_from(window))
            share = torch.from_numpy(found)
        if window.size <= self.batch_size * self.num_replicas:
            return [share]
        return [share[first:last] for first, last in self._parts(window)]

    def _shares_from(self, window: Window) -> Iterator[Share]:
        """Yield the positions that this rank takes from window on, over all epochs to come."""
        windows = chain(
            self.windows_of(window.epoch, window.start),
            chain.from_iterable(map(self.windows_of, count(window.epoch + 1))),
        )
        for later in windows:
            start, stop = share_of(later.size, rank=self.rank, world_size=self.num_replicas)
            yield Share(later.epoch, later.start + start, later.start + stop)

    def _parts(self, window: Window) -> list[tuple[int, int]]:
        """Return where this rank's micro-batches begin and end within its share of window."""
        size, world_size = window.size, self.num_replicas
        start, stop = share_of(size, rank=self.rank, world_size=world_size)
        number = num_micro_batches(size, batch_size=self.batch_size, world_size=world_size)
        return split_evenly(stop - start, number)

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch."""
        order = self._orders.get(epoch)
        if order is None:
            order = EpochOrder(self.size, seed=self.seed, epoch=epoch)
            # WHY two: workers prefetch from the next epoch while this one still ends.
            latest = list(self._orders.items())[-1:]
            self._orders = dict([*latest, (epoch, order)])
        return order

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples of the current epoch, in the order of the steps."""
        for window in self.windows():
            for indices in self.micro_batches(window):
                yield from indices.tolist()

    def __len__(self) -> int:
        """Count this rank's samples of an epoch."""
        num_full, rest = divmod(self.end, self.global_batch)
        (start, stop), (first, last) = (
            share_of(size, rank=self.rank, world_size=self.num_replicas)
            for size in (self.global_batch, rest)
        )
        return num_full * (stop - start) + last - first
