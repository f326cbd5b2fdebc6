"""Other orders of an epoch than each sample once: --sampling, and the order of a mix of data sets.

Owns which samples an epoch has, and in which order: a pure function of (seed, epoch), the same for
any number of ranks, like the order of sampler.py. It is made when an epoch begins, on each rank: 8
bytes and about 0.3 us per sample.
WHY hashes and only + - * /: other functions may round differently on another kind of CPU.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Subset, TensorDataset

from hardened_ddp.data.batches.permutation import hash_words
from hardened_ddp.data.foreign_code import describe, import_callable, line_of_user
from hardened_ddp.errors import ANY_FAILURE, DataError
from hardened_ddp.ranks.seeding import mix
from hardened_ddp.settings.config import BALANCED, EACH_ONCE, WEIGHTS_FILE, DataConfig

Samples = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the samples of epochs are chosen."""

    name: str
    length: int  # samples of an epoch, some of them perhaps the same one
    digest: str  # differs where the order would
    # Gives the samples of an epoch: made once for the sampler and for the ledger.
    order: Callable[[int], Samples]

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", lru_cache(maxsize=2)(self.order))


def build_sampling(dataset: Any, config: DataConfig, *, seed: int) -> Sampling | None:
    """Build what --sampling names, or the order of a mix; None: each sample once per epoch.

    Rank-local; the digest is to be the same on all ranks. Any: map-style. Raises DataError.
    """
    kind, length = config.sampling, config.samples_per_epoch
    mixed = getattr(dataset, "mixed", None)  # of data/sources/mix.py
    if mixed is not None:
        if kind != EACH_ONCE:
            raise DataError(
                f"--sampling {kind} with a mix of data sets: both say what an epoch has",
                fix="leave --sampling out, or give the data sets other weights",
            )
        parts, counts = mixed.of_epoch(length)
        return _of_groups("mix", parts, counts, seed)
    if kind == EACH_ONCE:
        return None
    if kind.startswith(WEIGHTS_FILE):
        weights = _read_weights(Path(kind.removeprefix(WEIGHTS_FILE)), len(dataset))
    elif kind == BALANCED:
        classes = _labels_of(dataset)
        weights = 1.0 / np.bincount(classes)[classes]
    else:
        return _own(kind, dataset, seed=seed)
    sums = np.cumsum(weights)
    if config.replacement:
        num_draws = length or len(dataset)

        def draw(epoch: int) -> Samples:
            values = _uniform(num_draws, mix(seed, epoch)) * sums[-1]
            last = np.searchsorted(sums, sums[-1])  # values may round up to the whole sum
            drawn: Samples = np.minimum(np.searchsorted(sums, values, side="right"), last)
            return drawn

        return Sampling(kind, num_draws, _digest(weights), draw)
    if kind == BALANCED:
        groups = [np.flatnonzero(classes == number) for number in np.unique(classes)]
        most = usual = len(groups) * min(map(len, groups))
    else:  # so many that the heaviest may be in each epoch
        most, usual = int((weights > 0).sum()), max(1, int(sums[-1] / weights.max() + 1e-9))
    if length > most:
        raise DataError(
            f"--samples_per_epoch {length}: without replacement an epoch has {most} at most",
            fix="lower it, or draw with replacement: leave --no_replacement out",
        )
    length = length or usual
    if kind == BALANCED:
        return _of_groups(kind, groups, counts_by_weight([1.0] * len(groups), length), seed)

    def once(epoch: int) -> Samples:
        # Sequential Poisson sampling (Ohlsson, J. Official Statistics 14, 1998): the smallest of
        # u / weight are as likely as their weights say, and their number is fixed.
        with np.errstate(divide="ignore"):
            ratios = _uniform(len(weights), mix(seed, epoch)) / weights
        return _shuffled(np.argsort(ratios, kind="stable")[:length], mix(seed, epoch, 1))

    return Sampling(kind, length, _digest(weights), once)


def counts_by_weight(weights: Sequence[float], length: int) -> list[int]:
    """Share length out by weight, in whole numbers that are as near as can be."""
    exact = [length * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    rests = sorted(range(len(exact)), key=lambda group: counts[group] - exact[group])
    for group in rests[: length - sum(counts)]:
        counts[group] += 1
    return counts


def _of_groups(name: str, groups: Sequence[Samples], counts: Sequence[int], seed: int) -> Sampling:
    """Take so many of each group in an epoch; all of it once before any sample comes again."""

    def order(epoch: int) -> Samples:
        found = []
        for number, (members, count) in enumerate(zip(groups, counts, strict=True)):
            passes = range(-(-count // len(members)))
            again = [_shuffled(members, mix(seed, epoch, number, each)) for each in passes]
            found.append(np.concatenate([members[:0], *again])[:count])
        return _shuffled(np.concatenate(found), mix(seed, epoch))

    return Sampling(name, sum(counts), _digest(*groups, np.array(counts)), order)


def _own(path: str, dataset: Any, *, seed: int) -> Sampling:
    """Take the order of the user's function, which must be the same whenever it is called."""
    call = import_callable(path, setting="sampling", error=DataError)
    fix = "it is called as f(dataset, seed=0, epoch=0), and returns as many indices each time; all "
    fix += "that is random must follow from the two: numpy.random.default_rng([seed, epoch])"

    def samples(epoch: int, like: Samples | None = None) -> Samples:
        try:
            found: Samples = np.array(call(dataset, seed=seed, epoch=epoch))
        except ANY_FAILURE as error:  # WHY broad: the user's code
            why = f"failed in epoch {epoch}: {describe(error)}{line_of_user(error)}"
            raise DataError(f"--sampling {path} {why}", fix=fix) from error
        what = ""
        if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
            what = "no list of whole numbers"
        elif found.min() < 0 or found.max() >= len(dataset):
            what = f"indices from {found.min()} to {found.max()}, of {len(dataset)} samples,"
        elif like is not None and len(found) != len(like):
            what = f"{len(found)} samples, and {len(like)} in epoch 0,"
        if what:
            raise DataError(f"--sampling {path} gave {what} in epoch {epoch}", fix=fix)
        return found.astype(np.int64)

    first = samples(0)
    if not np.array_equal(first, samples(0)):
        raise DataError(f"--sampling {path} gives other samples when it is called again", fix=fix)
    return Sampling(path, len(first), _digest(first), lambda epoch: samples(epoch, first))


def _labels_of(dataset: Any) -> Samples:
    """Return the class of each sample, without reading one. Raises DataError."""
    if isinstance(dataset, Subset):
        of_subset: Samples = _labels_of(dataset.dataset)[np.asarray(dataset.indices)]
        return of_subset
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if isinstance(dataset, TensorDataset):
        labels = dataset.tensors[-1]
    found = np.zeros(0) if labels is None else np.asarray(labels)
    if found.shape != (len(dataset),) or found.dtype.kind not in "iu" or found.min() < 0:
        raise DataError(
            "--sampling balanced needs the class of each sample, without reading them all: the "
            f"{type(dataset).__name__} has no list of them as targets or labels",
            fix="give it an attribute targets; or --sampling weights:FILE, a weight per sample",
        )
    return found.astype(np.int64)


def _read_weights(path: Path, size: int) -> Floats:
    """Read a weight for each sample: .npy, or text with a number per line. Raises DataError."""
    told, fix = f"--sampling {WEIGHTS_FILE}{path}", "write a weight from 0 for each sample: .npy "
    fix += "of numpy, or text with a number per line, in the order of the data set"
    try:
        found = np.load(path) if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
        weights: Floats = found.astype(np.float64)
    except (OSError, ValueError, EOFError, AttributeError) as error:  # of an archive, the last
        raise DataError(f"{told} can't be read: {error}", fix=fix) from error
    is_row = weights.shape == (size,)
    bound = float(weights.max(initial=0.0)) * weights.size  # of their sum
    if not is_row or not 0 < bound < np.inf or weights.min() < 0:
        what = f"{weights.size} numbers for {size} samples, or some below 0, NaN, or all 0"
        raise DataError(f"{told} has {what}", fix=fix)
    return weights


def _shuffled(samples: Samples, key: int) -> Samples:
    hashes = hash_words(np.arange(len(samples), dtype=np.uint64), key=key)
    return samples[np.argsort(hashes)]


def _uniform(length: int, key: int) -> Floats:
    """Return numbers from 0 to below 1: 53 random bits each."""
    hashes = hash_words(np.arange(length, dtype=np.uint64), key=key)
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _digest(*arrays: npt.NDArray[Any]) -> str:  # Any: of numbers
    return hashlib.sha256(b"".join([array.tobytes() for array in arrays])).hexdigest()[:16]
