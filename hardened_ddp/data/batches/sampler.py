"""Which samples each optimizer step takes, and which of them are this rank's.

The order of an epoch is a pure function of (seed, epoch, number of samples), the same for any world
size and worker count; --sampling has others (sampling.py). A step takes the next window of it; a
rank takes its contiguous share of the window, which is empty if there are fewer samples than ranks.
Nothing is padded, nothing is dropped unless drop_last says so.
Does not own: the cursor (it moves when a step is done, step/step.py), reading (loader.py).
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, DistributedSampler

from hardened_ddp.data.batches.permutation import hash_words, permute
from hardened_ddp.data.batches.sampling import Sampling
from hardened_ddp.ranks.seeding import mix

# Up to this size an order is the samples sorted by a hash, and the whole of it is kept (2 MiB);
# above it is a keyed permutation, computed on demand.
MAX_KEPT_ORDER = 1 << 18
_AHEAD = 1 << 11  # positions of a keyed permutation that are computed at once, over all epochs
_FEW_STEPS = 1 << 8  # an epoch of more steps than this can afford to sort the whole order
_MIN_RANKS = 8  # with fewer ranks, most of a kept order has to be sorted anyhow

Samples = npt.NDArray[np.int64]


UNKNOWN_STEPS = sys.maxsize  # more steps than any run has: its end is not known yet


@dataclass(slots=True)
class RunLength:
    """The steps of a run. WHY an object: a stream's length is known when it was read once."""

    total: int  # steps of the whole run; UNKNOWN_STEPS until they are known

    # Steps that the learning rate's schedule is stretched over. Never changes within a run.
    # UNKNOWN_STEPS for a constant rate of a stream.
    schedule: int
    most: int = UNKNOWN_STEPS  # the limit max_steps

    @property
    def is_known(self) -> bool:
        return self.total < UNKNOWN_STEPS

    def learn(self, total: int) -> None:
        self.total = min(total, self.most)


@dataclass(frozen=True, slots=True)
class Window:
    """The samples of one step over all ranks, or of one of them: order[start:stop] of an epoch."""

    epoch: int
    start: int
    size: int
    # Some rank has none of them, although there are enough: only of a stream.
    has_idle_rank: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.size

    def is_for_all(self, world_size: int) -> bool:
        """Return whether every rank has a sample. The same on all ranks."""
        return self.size >= world_size and not self.has_idle_rank


class EpochOrder:
    """The order of one epoch's samples: a permutation of range(num_samples).

    Small datasets: the samples sorted by a hash of their index. Large ones: a keyed permutation, so
    that neither memory nor the time to the first index grows with the dataset.
    """

    def __init__(
        self, num_samples: int, seed: int, epoch: int, *, drawn: Samples | None = None
    ) -> None:
        """drawn: other samples, see sampling.py."""
        self.num_samples = num_samples
        self._key = mix(seed, epoch)
        self._kept = drawn
        if drawn is None and num_samples <= MAX_KEPT_ORDER:
            self._kept = np.argsort(_hashes(num_samples, self._key))

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Return the samples at positions start to stop - 1, as int64."""
        if self._kept is not None:
            return torch.from_numpy(self._kept[start:stop])
        positions = np.arange(start, stop, dtype=np.uint64)
        permuted = permute(positions, num_samples=self.num_samples, keys=[self._key])
        return torch.from_numpy(permuted.astype(np.int64))


def _hashes(num_samples: int, key: int) -> npt.NDArray[np.uint64]:
    """Return what the samples of a small dataset are sorted by.

    WHY not torch.randperm: its algorithm may change between versions of torch, and a resumed run
    would continue in another order. Hashes of two samples never tie.
    """
    return hash_words(np.arange(num_samples, dtype=np.uint64), key=key)


def _samples_of(shares: list[Window], num_samples: int, seed: int) -> list[Samples]:
    """Return the samples of shares in ascending order; of a small dataset, all of one epoch."""
    if num_samples > MAX_KEPT_ORDER:
        positions = [np.arange(share.start, share.stop, dtype=np.uint64) for share in shares]
        of_epochs = Counter[int]()
        for share in shares:
            of_epochs[share.epoch] += share.size
        permuted = permute(
            np.concatenate(positions),
            num_samples=num_samples,
            keys=[mix(seed, epoch) for epoch in of_epochs],
            lengths=list(of_epochs.values()),
        )
        found = permuted.astype(np.int64)
    else:
        hashes = _hashes(num_samples, mix(seed, shares[0].epoch))
        edges = {edge for share in shares for edge in (share.start, share.stop)} - {num_samples}
        # WHY not a sort of all: most of them are the samples of other ranks.
        parted = np.argpartition(hashes, sorted(edges))
        found = np.concatenate([parted[share.start : share.stop] for share in shares])
        found = found[np.argsort(hashes[found])]
    return np.split(found, np.cumsum([share.size for share in shares])[:-1])


def share_of(size: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return (start, stop) of a rank's contiguous part of size items; it may be empty.

    Parts differ by one item at most; the lower ranks have the longer ones.
    """
    length, num_longer = divmod(size, world_size)
    start = rank * length + min(rank, num_longer)
    return start, start + length + (rank < num_longer)


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
        sampling: Sampling | None = None,
        min_last_window: int = 0,
    ) -> None:
        """sampling: the order of an epoch, if it is not each sample once. min_last_window: a last
        window with fewer samples is joined to the one before it.
        """
        # WHY drop_last stays False for torch: it would drop other samples than we do.
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)
        self.global_batch = global_batch
        self.batch_size = batch_size
        self._min_last_window = min_last_window
        self.size = len(dataset)  # type: ignore[arg-type]  # map-style: it has a length
        # WHY the comparison: if there is only one short window, it is kept: an epoch needs a step.
        self.sampling = sampling
        length = self.size if sampling is None else sampling.length
        self.drop_last = drop_last and length >= global_batch
        # Cursor at which an epoch is done. With drop_last the short last window is behind it.
        self.end = length - (length % global_batch if self.drop_last else 0)
        # WHY two: workers prefetch from the next epoch while this one still ends.
        self.order = lru_cache(maxsize=2)(self._order)  # gives the order of an epoch

        # WHY: with thousands of ranks an epoch has few steps, and each would feel the whole order.
        self._takes_alone = sampling is None and (
            self.size > MAX_KEPT_ORDER
            or (num_replicas >= _MIN_RANKS and self.num_windows <= _FEW_STEPS)
        )
        # This rank's samples of the coming steps, computed without those of other ranks.
        self._ahead: dict[Window, Samples] = {}

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

    def as_json(self, epoch: int, cursor: int) -> dict[str, str] | None:
        """Return what a checkpoint must hold besides epoch and cursor: the name of the order."""
        own = self.sampling
        return None if own is None else {"sampling": own.name, "digest": own.digest}

    def problems_with(self, saved: Mapping[str, Any] | None) -> list[str]:  # Any: JSON
        """Return what differs from the order of a checkpoint, besides its dataset."""
        now, before = self.as_json(0, 0) or {}, saved or {}
        if now == before:
            return []
        if now or "sampling" in before:
            had = before.get("sampling", "none")
            return [f"sampling: the checkpoint has {had}, and this run draws other samples"]
        return ["dataset: the checkpoint is of a stream, and this one is a map-style dataset"]

    def restore(self, saved: object, *, epoch: int, cursor: int) -> None:
        """Go to the position of a checkpoint: the order needs nothing for that."""

    def ledger_facts(self) -> dict[str, int]:
        drawn = {} if self.sampling is None else {"is_drawn": 1}
        return {"num_samples": self.size, "epoch_end": self.end, **drawn}

    def _order(self, epoch: int) -> EpochOrder:
        drawn = None if self.sampling is None else self.sampling.order(epoch)
        return EpochOrder(self.size, self.seed, epoch, drawn=drawn)

    def windows(self, start: int = 0) -> Iterator[Window]:
        """Yield the windows of the current epoch (set_epoch) from cursor start on."""
        return self.windows_of(self.epoch, start)

    def windows_of(self, epoch: int, start: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch from cursor start on."""
        while start < self.end:
            stop = min(start + self.global_batch, self.end)
            stop = self.end if self.end - stop < self._min_last_window else stop
            yield Window(epoch, start, stop - start)
            start = stop

    def micro_batches(self, window: Window) -> list[torch.Tensor]:
        """Return the indices of this rank's micro-batches of window; none if its share is empty."""
        start, stop = share_of(window.size, rank=self.rank, world_size=self.num_replicas)
        if start == stop:
            return []
        if self._takes_alone:
            taken = torch.from_numpy(self._take_ahead(window))
        else:
            taken = self.order(window.epoch).take(window.start + start, window.start + stop)
        if window.size <= self.batch_size * self.num_replicas:
            return [taken]
        return [taken[first:last] for first, last in self.parts_of(window)]

    def _take_ahead(self, window: Window) -> Samples:
        """Return this rank's samples of window; compute those of the steps after it, too."""
        share = self._share(window)
        if share not in self._ahead:
            windows = self.windows_of(window.epoch, window.start)
            if self.size > MAX_KEPT_ORDER:
                later = chain.from_iterable(map(self.windows_of, count(window.epoch + 1)))
                windows = islice(chain(windows, later), 1 + _AHEAD // share.size)
            shares = list(map(self._share, windows))
            rows = _samples_of(shares, self.size, self.seed)
            self._ahead = dict(zip(shares, rows, strict=True))
        return self._ahead[share]

    def _share(self, window: Window) -> Window:
        """Return what this rank takes of window; it may be empty."""
        start, stop = share_of(window.size, rank=self.rank, world_size=self.num_replicas)
        return Window(window.epoch, window.start + start, stop - start)

    def parts_of(self, window: Window) -> list[tuple[int, int]]:
        """Return where this rank's micro-batches begin and end within its share of window."""
        number = num_micro_batches(
            window.size, batch_size=self.batch_size, world_size=self.num_replicas
        )
        return split_evenly(self._share(window).size, number)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples of the current epoch, in the order of the steps."""
        for window in self.windows():
            for indices in self.micro_batches(window):
                yield from indices.tolist()

    def __len__(self) -> int:
        """Count this rank's samples of an epoch."""
        num_full, rest = divmod(self.end, self.global_batch)
        full, last = (self._share(Window(0, 0, size)).size for size in (self.global_batch, rest))
        return num_full * full + last
