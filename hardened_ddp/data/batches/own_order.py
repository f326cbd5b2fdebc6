"""One rank's samples of the coming steps, computed without those of the other ranks.

With thousands of ranks an epoch has few steps, so that each step feels what is computed once per
epoch. The samples are those of EpochOrder (sampler.py), which computes the whole order.
Does not own: which positions a rank takes (sampler.py).
"""

from collections.abc import Iterator
from itertools import groupby, islice, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hardened_ddp.data.batches.permutation import Words, hash_words, permute
from hardened_ddp.ranks.seeding import mix

# Up to this size an order is the samples sorted by a hash, and the whole of it is kept (2 MiB);
# above it is a keyed permutation, computed in blocks, on demand.
MAX_KEPT_ORDER = 1 << 18
BLOCK = 1 << 15  # positions computed at once: large enough that numpy's call overhead vanishes

# When one rank's samples alone are cheaper (see pays_off; measured by benchmarks/control_plane.py):
_STEPS_OF_A_BLOCK = 20  # a block that serves more steps than this is cheap enough as a whole
_MOST_STEPS = 1 << 11  # an epoch of more steps than this can afford to sort the whole order
_MIN_RANKS = 8  # with fewer ranks, most of a kept order has to be sorted anyhow
_AHEAD = 1 << 11  # positions of a keyed permutation that are computed at once, over all epochs
_LOG_OF_BUCKET = 6  # 64 samples in a bucket; with fewer, handling the buckets costs more
_AT_ONCE = 1 << 13  # words that stay in a core's cache over all operations of the hash

Samples = npt.NDArray[np.int64]


class Share(NamedTuple):
    """What a rank takes in one step: order[start:stop] of an epoch. It may be empty."""

    epoch: int
    start: int
    stop: int


def pays_off(num_samples: int, *, world_size: int, global_batch: int) -> bool:
    """Return whether a rank's samples alone cost less than the whole order."""
    if num_samples <= MAX_KEPT_ORDER:
        return world_size >= _MIN_RANKS and global_batch * _MOST_STEPS >= num_samples
    return world_size > 1 and global_batch * _STEPS_OF_A_BLOCK > BLOCK


class OwnOrder:
    """The samples of one rank, computed for several steps at once."""

    def __init__(self, num_samples: int, *, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self._ahead: dict[Share, Samples] = {}

    def find(self, epoch: int, start: int, stop: int) -> Samples | None:
        """Return the samples at positions start to stop - 1, if they are computed already."""
        return self._ahead.get(Share(epoch, start, stop))

    def compute(self, coming: Iterator[Share]) -> Samples:
        """Return the samples of the first of the coming shares; compute those of the next, too."""
        first = next(coming)
        length = first.stop - first.start
        if self.num_samples <= MAX_KEPT_ORDER:  # every epoch costs the same anyhow
            later = takewhile(lambda share: share.epoch == first.epoch, coming)
            shares = [first, *later]
            rows = _pick(shares, self.num_samples, key=mix(self.seed, first.epoch))
        else:
            shares = [first, *islice(coming, _AHEAD // length)]
            rows = self._permute(shares)
        self._ahead = dict(zip(shares, rows, strict=True))
        return self._ahead[first]

    def _permute(self, shares: list[Share]) -> list[Samples]:
        """Return the samples of shares of any epochs, in order."""
        epochs = [(epoch, list(group)) for epoch, group in groupby(shares, lambda s: s.epoch)]
        positions = np.concatenate([np.arange(s.start, s.stop, dtype=np.uint64) for s in shares])
        permuted = permute(
            positions,
            num_samples=self.num_samples,
            keys=[mix(self.seed, epoch) for epoch, _ in epochs],
            lengths=[sum(s.stop - s.start for s in group) for _, group in epochs],
        )
        ends = np.cumsum([s.stop - s.start for s in shares])
        return np.split(permuted.astype(np.int64), ends[:-1])


def _pick(shares: list[Share], num_samples: int, *, key: int) -> list[Samples]:
    """Return order[start:stop] of each share, where order sorts the samples by their hash.

    By the first bits of its hash each sample is in a bucket. The sizes of the buckets say which of
    them hold the shares' positions, and only these are sorted.
    """
    bits = max(1, (num_samples - 1).bit_length() - _LOG_OF_BUCKET)
    hashes = np.empty(num_samples, dtype=np.uint64)
    sizes = np.zeros(1 << bits, dtype=np.int64)
    for part in _parts(num_samples):
        hashes[part] = hash_words(np.arange(part.start, part.stop, dtype=np.uint64), key=key)
        sizes += np.bincount(_buckets(hashes[part], bits), minlength=1 << bits)
    ends = np.cumsum(sizes)
    starts = np.array([share.start for share in shares])
    stops = np.array([share.stop for share in shares])
    is_needed = np.zeros(1 << bits, dtype=bool)
    # The bucket of a position is the first one that ends behind it. A share may be empty.
    first = np.searchsorted(ends, np.minimum(starts, num_samples - 1), side="right")
    last = np.searchsorted(ends, stops - 1, side="right")
    for one, other in zip(first.tolist(), last.tolist(), strict=True):
        is_needed[one : other + 1] = True
    found = [
        np.flatnonzero(is_needed[_buckets(hashes[part], bits)]) + part.start
        for part in _parts(num_samples)
    ]
    needed = np.concatenate(found)
    needed = needed[np.argsort(hashes[needed])]
    left_out = np.cumsum(np.where(is_needed, 0, sizes))[first]  # before each share
    edges = zip((starts - left_out).tolist(), (stops - left_out).tolist(), strict=True)
    # WHY copies: a slice would keep all that was found.
    return [needed[start:stop].copy() for start, stop in edges]


def _parts(size: int) -> list[slice]:
    return [slice(at, min(at + _AT_ONCE, size)) for at in range(0, size, _AT_ONCE)]


def _buckets(hashes: Words, bits: int) -> Samples:
    return (hashes >> np.uint64(64 - bits)).view(np.int64)  # they are small: no copy is needed
