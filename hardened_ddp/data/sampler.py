"""Which samples each step takes: every sample exactly once per epoch, on any number of ranks.

Owns the order of an epoch and how ranks share it. The order is a pure function of (seed, epoch,
number of samples). Step by step it is cut into windows of global_batch samples; each rank takes its
contiguous near-equal share of a window, which may be empty at the end. Nothing is padded, and
nothing dropped unless drop_last is set. So W ranks together take what one rank would, in the same
step, and a run can start at any cursor without reading what lies before it.

Does not own: reading the samples (loader.py). torch's DistributedSampler repeats samples to make
shares equal, and builds the whole permutation as a Python list; this one does neither.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, DistributedSampler

from hardened_ddp.ranks.seeding import mix

LARGEST_TABLE = 2**18
"""Above this many samples the permutation is computed, not stored: 2 MiB of indices at most."""

_ROUNDS = 8
_Words = NDArray[np.uint64]


class EpochOrder:
    """The order of one epoch's samples, at any place of it without what lies before."""

    def __init__(self, num_samples: int, *, seed: int, epoch: int) -> None:
        self.num_samples = num_samples
        self._table: torch.Tensor | None = None
        if num_samples <= LARGEST_TABLE:
            generator = torch.Generator().manual_seed(mix(seed, epoch, num_samples))
            self._table = torch.randperm(num_samples, generator=generator)
        else:
            self._cipher = _Feistel(num_samples, key=mix(seed, epoch, num_samples))

    def take(self, start: int, stop: int) -> torch.Tensor:
        """Give the samples at positions start to stop - 1: int64, shape (stop - start,)."""
        stop = min(stop, self.num_samples)
        if self._table is not None:
            return self._table[start:stop]
        return torch.from_numpy(self._cipher.permute(start, stop))


class _Feistel:
    """A keyed permutation of range(size), computed per element.

    A Feistel network over the smallest even number of bits that holds size (Luby and Rackoff: How
    to construct pseudorandom permutations, 1988), with the SplitMix64 finaliser as round function.
    Results outside of the range are permuted again until they fall inside (cycle walking; Black
    and Rogaway: Ciphers with arbitrary finite domains, 2002): on average under 4 times.
    """

    def __init__(self, size: int, *, key: int) -> None:
        self.size = size
        self.half_bits = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
        self.mask = np.uint64((1 << int(self.half_bits)) - 1)
        self.keys = [np.uint64(mix(key, index)) for index in range(_ROUNDS)]

    def permute(self, start: int, stop: int) -> NDArray[np.int64]:
        words = self._once(np.arange(start, stop, dtype=np.uint64))
        while (outside := np.flatnonzero(words >= self.size)).size:
            words[outside] = self._once(words[outside])
        return words.astype(np.int64)

    def _once(self, words: _Words) -> _Words:
        left, right = words >> self.half_bits, words & self.mask
        for key in self.keys:
            left, right = right, left ^ (_scramble(right + key) & self.mask)
        return (left << self.half_bits) | right


def _scramble(words: _Words) -> _Words:
    """Mix the bits of each word: see mix() in ranks/seeding.py for the source."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Window:
    """The samples of one optimizer step over all ranks: order[start : start + size]."""

    epoch: int
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


def share_of(size: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Give rank's part [start, stop) of size things; parts differ by one at most.

    The lower ranks get the larger parts; a part is empty if there are fewer things than ranks.
    """
    small, extra = divmod(size, world_size)
    start = rank * small + min(rank, extra)
    return start, start + small + (rank < extra)


def split_micro_batches(size: int, batch_size: int) -> list[tuple[int, int]]:
    """Cut size samples into the fewest parts of at most batch_size, as [start, stop).

    WHY near-equal: a last part of one sample is more than BatchNorm can take.
    """
    num_parts = -(-size // batch_size)
    return [share_of(size, rank=part, world_size=num_parts) for part in range(num_parts)]


class WindowSampler(DistributedSampler[int]):
    """A DistributedSampler that gives each rank its share of every window, exactly once."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        num_replicas: int,
        rank: int,
        seed: int,
        global_batch: int,
        batch_size: int,
        drop_last: bool = False,
    ) -> None:
        # WHY drop_last=False for torch: what it drops is not what we mean by it.
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=False)
        self.size = len(dataset)  # type: ignore[arg-type]  # map-style: it has a length
        self.global_batch = global_batch
        self.batch_size = batch_size
        self.drops_last = drop_last and self.size >= global_batch
        self._order: tuple[int, EpochOrder] | None = None

    @property
    def num_windows(self) -> int:
        """Optimizer steps of one epoch."""
        if self.drops_last:
            return self.size // self.global_batch
        return -(-self.size // self.global_batch)

    @property
    def end(self) -> int:
        """The cursor at which an epoch is done."""
        return min(self.size, self.num_windows * self.global_batch)

    def windows(self, start: int = 0) -> Iterator[Window]:
        """Give the epoch's windows from the cursor start on."""
        while start < self.end:
            window = Window(self.epoch, start, min(self.global_batch, self.end - start))
            yield window
            start = window.stop

    def micro_batches(self, window: Window) -> list[torch.Tensor]:
        """Give this rank's samples of window, a tensor of indices for each backward.

        Empty if the window has no sample for this rank.
        """
        start, stop = share_of(window.size, rank=self.rank, world_size=self.num_replicas)
        share = self.order(window.epoch).take(window.start + start, window.start + stop)
        parts = split_micro_batches(stop - start, self.batch_size)
        return [share] if len(parts) == 1 else [share[first:last] for first, last in parts]

    def order(self, epoch: int) -> EpochOrder:
        """Give the order of an epoch; the last one asked for is kept."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, EpochOrder(self.size, seed=self.seed, epoch=epoch))
        return self._order[1]

    def __iter__(self) -> Iterator[int]:
        for window in self.windows():
            for indices in self.micro_batches(window):
                yield from indices.tolist()

    def __len__(self) -> int:
        return sum(
            share_of(window.size, rank=self.rank, world_size=self.num_replicas)[1]
            - share_of(window.size, rank=self.rank, world_size=self.num_replicas)[0]
            for window in self.windows()
        )
