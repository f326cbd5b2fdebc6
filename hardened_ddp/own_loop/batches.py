"""The data of an own loop: each sample once per epoch, and the place in it, for several loaders.

Owns the place: the epoch, and of each loader the pass, the samples of it that were handed out, and
the samples of a window. It counts when the commit after it is done. A window is what all ranks
together get at a time: batch_size x the ranks of the first start, kept when the number changes.
Owns the ledger of each loader, too: what was handed out is written before the first forward that
can use it, because another rank may complete the body in which this one dies.
"""

import copy
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hardened_ddp.checkpoint.disk import Disk, sync_files
from hardened_ddp.data.batches.ledger import LedgerWriter, next_start
from hardened_ddp.data.batches.sampler import Window, WindowSampler
from hardened_ddp.errors import OwnLoopError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.seeding import keeping_random_state, mix, seed_sample

FOLDER = "data"
"""Of a run folder: a ledger for each loader."""

_MOST_RANKS_LATER = 4
"""A last window has a sample for each of so many times the ranks of the first start."""

_KEPT: tuple[str, ...] = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
_KEPT += ("multiprocessing_context", "prefetch_factor", "persistent_workers")
Batch = Any  # Any: what the user's collate_fn returns


def ledger_start(run: Path) -> int:
    """Return the number of this start, for the ledgers of all loaders. On rank 0."""
    return max((next_start(folder) for folder in (run / FOLDER).glob("*")), default=1)


@dataclass(slots=True)
class Place:
    """How far the data are handed out."""

    epoch: int = 0
    streams: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of each loader: pass, cursor, window, size, repeat."""

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        return {"epoch": self.epoch, "streams": copy.deepcopy(self.streams)}

    def load(self, saved: dict[str, Any]) -> None:  # Any: JSON
        self.epoch, self.streams = saved["epoch"], copy.deepcopy(saved["streams"])

    def end_epoch(self) -> None:
        self.epoch += 1
        for stream in self.streams.values():
            if not stream["repeat"]:
                stream |= {"pass": self.epoch, "cursor": 0}


class Seeded(Dataset[Any]):  # Any: whatever a sample is
    """A dataset whose samples have random numbers of their own, by seed, pass and index."""

    def __init__(self, dataset: Any, seed: int) -> None:  # Any: map-style
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:  # Any: a sample
        seed_sample(self.seed, *key)
        return self.dataset[key[1]]

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:  # Any: samples
        if not hasattr(self.dataset, "__getitems__"):
            return [self[key] for key in keys]
        seed_sample(self.seed, *keys[0])
        found: list[Any] = self.dataset.__getitems__([index for _, index in keys])
        return found


class Order:
    """The batch_sampler of a loader: this rank's share of each window from a cursor on."""

    def __init__(self, sampler: WindowSampler) -> None:
        self.sampler = sampler
        self.number = self.cursor = 0  # of the pass, where it begins

    def windows(self) -> Iterator[Window]:
        return self.sampler.windows_of(self.number, self.cursor)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for window in self.windows():
            (share,) = self.sampler.micro_batches(window)
            yield [(window.epoch, index) for index in share.tolist()]


class Streams:
    """The loaders of a loop, by name."""

    def __init__(self, group: Group, folder: Path, *, seed: int, start: int) -> None:
        self.place = Place()
        self.batch_index = 0
        self.is_rehearsal = False
        """What is handed out is handed out again: the ledger must have it once."""

        self._group, self._folder, self._seed, self._start = group, folder, seed, start
        self._first_step = 0
        self._loaders: dict[str, tuple[DataLoader[Any], DataLoader[Any], Order]] = {}
        self._ledgers: dict[str, LedgerWriter] = {}
        self._ended: set[tuple[str, int]] = set()
        self._unwritten: list[tuple[str, int, int, torch.Tensor]] = []
        self._is_over = False
        """A loader has ended: what another gave beside it may be given back, as zip does it."""

    def begin(self, step: int, place: dict[str, Any] | None) -> None:  # Any: JSON
        """Go to the place of a checkpoint."""
        self._first_step = step
        self._ended.clear()  # of a rehearsal
        if place is not None:
            self.place.load(place)

    def batches(
        self,
        given: DataLoader[Any],  # Any: whatever a sample is
        *,
        name: str,
        repeat: bool,
        begin: Callable[[], int],
    ) -> Iterator[Batch]:
        """Yield this rank's share of each window. begin: called before each; returns the step."""
        loader, order = self._open(given, name, repeat=repeat)
        tracker, sampler = self._group.tracker, order.sampler
        while True:
            stream = self.place.streams[name]
            order.number, order.cursor = stream["pass"], stream["cursor"]
            if order.cursor >= sampler.end:
                if not repeat:
                    self._end(name)
                    return
                stream |= {"pass": stream["pass"] + 1, "cursor": 0}
                continue
            read = iter(loader)
            for window in order.windows():
                tracker.enter(Phase.DATA)
                step, self._is_over = begin(), False
                with keeping_random_state():  # WHY: without workers each sample seeds them
                    batch = next(read)
                tracker.enter(Phase.FORWARD)
                (share,) = sampler.micro_batches(window)
                note = (name, step, window.epoch, share)
                self._unwritten.append(note)
                stream["cursor"] = window.stop
                self.batch_index = window.start // sampler.global_batch
                try:
                    yield batch
                except GeneratorExit:
                    # WHY: zip takes a batch of one loader before it sees the end of the other
                    if self._unwritten and self._unwritten[-1] is note:
                        self._unwritten.pop()
                        stream["cursor"] = window.start
                    raise
                stream = self.place.streams[name]
                if (stream["pass"], stream["cursor"]) != (window.epoch, window.stop):
                    break  # another state was loaded

    def write(self, *, is_commit: bool = False) -> None:
        """Write to the ledgers what was handed out. Before each forward, and at each commit."""
        if self._is_over and not is_commit:  # WHY: the forward may be one of an evaluation
            return
        for name, step, number, share in self._unwritten if not self.is_rehearsal else ():
            self._ledgers[name].bring(step, number, [share.numpy()])
        self._unwritten.clear()

    def sync(self) -> None:
        """Have the ledgers of all ranks on the disk. Raises OSError. Any thread."""
        for ledger in list(self._ledgers.values()):
            if files := ledger.files():
                sync_files(files[0].parent, files, disk=Disk())

    def close(self) -> None:
        for ledger in self._ledgers.values():
            ledger.close()

    def _end(self, name: str) -> None:
        epoch = self.place.epoch
        if (name, epoch) in self._ended:
            raise OwnLoopError(
                f"run.batches(..., name={name!r}) has given all of epoch {epoch} already",
                fix="put it inside `for epoch in run.epochs(n):`, give it repeat=True, or use "
                "another name for another loader",
            )
        self._ended.add((name, epoch))
        self._is_over = True

    def _open(
        self, given: DataLoader[Any], name: str, *, repeat: bool
    ) -> tuple[DataLoader[Any], Order]:
        """Return the loader that reads in our order what the given one would read in its own."""
        if name in self._loaders and self._loaders[name][0] is given:
            return self._loaders[name][1:]
        problem = _problem_with(given)
        if problem or not name.isidentifier():
            problem = problem or "a name has letters, digits and underscores only"
            raise OwnLoopError(f"run.batches, name={name!r}: {problem}")
        if name in self._loaders:
            raise OwnLoopError(
                f"two loaders are named {name!r}, so they would share one place",
                fix="make a loader once, before the loop; for others run.batches(loader, name=...) "
                "with a name for each, such as f'data{epoch}' if each epoch has its own",
            )
        seed = mix(self._seed, zlib.crc32(name.encode()))
        sampler = self._sampler_of(given, name, seed=seed, repeat=repeat)
        order = Order(sampler)
        kept = {name: getattr(given, name) for name in _KEPT}
        # WHY a generator: else each start of a pass would draw a number of the loop's own
        loader = DataLoader(
            Seeded(given.dataset, seed),
            batch_sampler=order,
            generator=torch.Generator(),
            **kept,
        )
        folder = self._folder / FOLDER / name
        (folder / "ledger").mkdir(parents=True, exist_ok=True)
        self._ledgers[name] = LedgerWriter(
            folder,
            start=self._start,
            rank=self._group.launch.rank,
            step=self._first_step,
            facts=sampler.ledger_facts(),
        )
        self._loaders[name] = given, loader, order
        return loader, order

    def _sampler_of(
        self, given: DataLoader[Any], name: str, *, seed: int, repeat: bool
    ) -> WindowSampler:
        """Make the order of a loader, with the windows of the first start."""
        size, ranks = len(given.dataset), self._group.world_size  # type: ignore[arg-type]
        assert given.batch_size is not None
        fresh = {"pass": 0 if repeat else self.place.epoch, "cursor": 0}
        fresh |= {"window": given.batch_size * ranks, "size": size, "repeat": int(repeat)}
        fresh["least"] = min(_MOST_RANKS_LATER * ranks, fresh["window"] // 2)
        stream = self.place.streams.setdefault(name, fresh)
        if (stream["size"], stream["repeat"]) != (size, int(repeat)):
            raise OwnLoopError(
                f"run.batches, name={name!r}: the checkpoint was at a place in {stream['size']} "
                f"samples, and now there are {size}: the order would be another one",
                fix="give the same data, and the same repeat; or another folder to protect",
            )
        window = stream["window"]
        sampler = WindowSampler(
            given.dataset,
            num_replicas=ranks,
            rank=self._group.launch.rank,
            seed=seed,
            global_batch=window,
            batch_size=2 * window,  # WHY: so many on one rank, if there is only one now
            drop_last=given.drop_last,
            least=max(stream["least"], 1),
        )
        before_last = max(0, sampler.end // window - 1) * window
        fewest = min((w.size for w in sampler.windows_of(0, before_last)), default=0)
        if fewest < ranks:
            raise OwnLoopError(
                f"run.batches, name={name!r}: the last {fewest} of {size} samples are not one for "
                f"each of {ranks} ranks",
                fix="use fewer ranks, or a loader with drop_last=True",
            )
        return sampler


def _problem_with(given: object) -> str:
    """Say why a loader can't be read in our order; empty: it can."""
    if not isinstance(given, DataLoader):
        return f"it needs a torch DataLoader, and got {type(given).__name__}"
    if isinstance(given.dataset, IterableDataset):
        return "an IterableDataset has no place to go back to: use run.steps, register its position"
    if given.batch_size is None:
        return "it has a batch_sampler, or no batch_size: protect makes the batches by batch_size"
    plain = type(given.sampler) in (SequentialSampler, RandomSampler, DistributedSampler)
    if not plain or getattr(given.sampler, "replacement", False):
        name = type(given.sampler).__name__
        return f"its sampler ({name}) is not used: leave it out; the order is shuffled by the seed"
    return ""
