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

from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.data.batches.ledger import LedgerWriter, next_start
from hardened_ddp.data.batches.sampler import Window, WindowSampler
from hardened_ddp.errors import OwnLoopError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.seeding import keeping_random_state, mix, seed_sample

FOLDER = "data"  # of a run folder: a ledger for each loader

# A last window has a sample for each of so many times the ranks of the first start.
_MOST_RANKS_LATER = 4
_KEPT: tuple[str, ...] = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
_KEPT += ("multiprocessing_context", "prefetch_factor", "persistent_workers")
Batch = Any  # Any: what the user's collate_fn returns


class Seeded(Dataset[Any]):  # Any: whatever a sample is
    """A dataset whose samples have random numbers of their own, by seed, pass and index."""

    def __init__(self, dataset: Any, seed: int) -> None:  # Any: map-style
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:  # Any: samples
        if hasattr(self.dataset, "__getitems__"):
            seed_sample(self.seed, *keys[0])
            batch: list[Any] = self.dataset.__getitems__([index for _, index in keys])
            return batch
        found = []
        for key in keys:
            seed_sample(self.seed, *key)
            found.append(self.dataset[key[1]])
        return found


class Stream:
    """A loader that reads in our order what the given one would read in its own."""

    def __init__(
        self, given: DataLoader[Any], place: dict[str, int], group: Group, seed: int
    ) -> None:
        """place: pass, cursor, window, size, repeat, least."""
        self.given, self.place = given, place
        self.ended_in = -1  # the epoch in which it gave its last batch
        self.sampler = WindowSampler(
            given.dataset,
            num_replicas=group.world_size,
            rank=group.launch.rank,
            seed=seed,
            global_batch=place["window"],
            batch_size=2 * place["window"],  # WHY: so many on one rank, if there is only one now
            drop_last=given.drop_last,
            least=max(place["least"], 1),
        )
        # WHY a generator: else each start of a pass would draw a number of the loop's own
        self.loader = DataLoader(
            Seeded(given.dataset, seed),
            batch_sampler=self,
            generator=torch.Generator(),
            **{name: getattr(given, name) for name in _KEPT},
        )

    def windows(self) -> Iterator[Window]:
        """Yield the windows from its place on to the end of the pass."""
        return self.sampler.windows_of(self.place["pass"], self.place["cursor"])

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield this rank's share of each window: as the batch_sampler of the loader."""
        for window in self.windows():
            yield [(window.epoch, index) for index in self.share(window).tolist()]

    def share(self, window: Window) -> torch.Tensor:
        (found,) = self.sampler.micro_batches(window)
        return found


class Streams:
    """The loaders of a loop, by name, and the place in them."""

    def __init__(self, group: Group, folder: Path, *, seed: int) -> None:
        """Collective: all ranks."""
        self.epoch = self.batch_index = 0
        # What is handed out is handed out again: the ledger must have it once.
        self.is_rehearsal = False
        self._group, self._folder, self._seed = group, folder / FOLDER, seed
        self._first_step = 0
        self._streams: dict[str, Stream] = {}
        self._places: dict[str, dict[str, int]] = {}  # also of those that were not opened yet
        self._ledgers: dict[str, LedgerWriter] = {}
        self._unwritten: list[tuple[str, int, Window]] = []
        # A loader has ended: what another gave beside it may be given back, as zip does it.
        self._is_over = False
        self._start: int = group.run_on_main(  # collective
            lambda: max(map(next_start, self._folder.glob("*")), default=1),
            what="opening the ledger",
        )

    @property
    def global_batch(self) -> int:
        return max((place["window"] for place in self._places.values()), default=0)

    def place(self) -> dict[str, Any]:  # Any: JSON
        return {"epoch": self.epoch, "streams": copy.deepcopy(self._places)}

    def begin(self, step: int, place: dict[str, Any]) -> None:  # Any: JSON
        """Go to the place of a checkpoint."""
        self._first_step, self.epoch = step, place["epoch"]
        for name, own in copy.deepcopy(place["streams"]).items():
            self._places.setdefault(name, {}).update(own)
        for name in self._places.keys() - place["streams"].keys():  # new in a rehearsal
            self._rewind(self._places[name])
        for stream in self._streams.values():
            stream.ended_in = -1

    def end_epoch(self) -> None:
        self.epoch += 1
        for place in self._places.values():
            if not place["repeat"]:
                self._rewind(place)

    def _rewind(self, place: dict[str, int]) -> None:
        place |= {"pass": 0 if place["repeat"] else self.epoch, "cursor": 0}

    def batches(
        self,
        given: DataLoader[Any],  # Any: whatever a sample is
        *,
        name: str,
        repeat: bool,
        begin: Callable[[], int],
    ) -> Iterator[Batch]:
        """Yield this rank's share of each window. begin: called before each; returns the step."""
        stream = self._open(given, name, repeat=repeat)
        tracker, place, sampler = self._group.tracker, stream.place, stream.sampler
        while True:
            if place["cursor"] >= sampler.end:
                if stream.ended_in == self.epoch:
                    raise OwnLoopError(
                        f"run.batches(..., name={name!r}) has given all of epoch {self.epoch} "
                        "already",
                        fix="put it inside `for epoch in run.epochs(n):`, give it repeat=True, or "
                        "use another name for another loader",
                    )
                if not repeat:
                    stream.ended_in, self._is_over = self.epoch, True
                    return
                place |= {"pass": place["pass"] + 1, "cursor": 0}
            read = iter(stream.loader)
            for window in stream.windows():
                tracker.enter(Phase.DATA)
                step, self._is_over = begin(), False
                with keeping_random_state():  # WHY: without workers each sample seeds them
                    batch = next(read)
                tracker.enter(Phase.FORWARD)
                note = name, step, window
                self._unwritten.append(note)
                place["cursor"] = window.stop
                self.batch_index = window.start // sampler.global_batch
                try:
                    yield batch
                except GeneratorExit:
                    # WHY: zip takes a batch of one loader before it sees the end of the other
                    if self._unwritten and self._unwritten[-1] is note:
                        self._unwritten.pop()
                        place["cursor"] = window.start
                    raise
                if (place["pass"], place["cursor"]) != (window.epoch, window.stop):
                    break  # another state was loaded

    def write(self, *, is_commit: bool = False) -> None:
        """Write to the ledgers what was handed out. Before each forward, and at each commit."""
        if self._is_over and not is_commit:  # WHY: the forward may be one of an evaluation
            return
        for name, step, window in self._unwritten if not self.is_rehearsal else ():
            share = self._streams[name].share(window).numpy()
            self._ledgers[name].bring(step, window.epoch, [share])
        self._unwritten.clear()

    def sync(self) -> None:
        """Have the ledgers of all ranks on the disk. Raises OSError. Any thread."""
        for ledger in list(self._ledgers.values()):
            if files := ledger.files():
                Disk().sync_files(files[0].parent, files)

    def close(self) -> None:
        for ledger in self._ledgers.values():
            ledger.close()

    def _open(self, given: DataLoader[Any], name: str, *, repeat: bool) -> Stream:
        """Return the stream of a loader, with the windows of the first start."""
        if (known := self._streams.get(name)) is not None:
            if known.given is given:
                return known
            raise OwnLoopError(
                f"two loaders are named {name!r}, so they would share one place",
                fix="make a loader once, before the loop; for others run.batches(loader, name=...) "
                "with a name for each, such as f'data{epoch}' if each epoch has its own",
            )
        called = f"run.batches, name={name!r}"
        if problem := _problem_with(given, name):
            raise OwnLoopError(f"{called}: {problem}")
        assert given.batch_size is not None
        size, ranks = len(given.dataset), self._group.world_size  # type: ignore[arg-type]
        window = given.batch_size * ranks
        fresh = {"window": window, "size": size, "repeat": int(repeat)}
        fresh["least"] = min(_MOST_RANKS_LATER * ranks, window // 2)
        self._rewind(fresh)
        place = self._places.setdefault(name, fresh)
        if (place["size"], place["repeat"]) != (size, int(repeat)):
            raise OwnLoopError(
                f"{called}: the checkpoint was at a place in {place['size']} samples, and now "
                f"there are {size}: the order would be another one",
                fix="give the same data, and the same repeat; or another folder to protect",
            )
        seed = mix(self._seed, zlib.crc32(name.encode()))
        stream = Stream(given, place, self._group, seed)
        before_last = max(0, stream.sampler.end // place["window"] - 1) * place["window"]
        last = stream.sampler.windows_of(0, before_last)
        if (fewest := min((each.size for each in last), default=0)) < ranks:
            raise OwnLoopError(
                f"{called}: the last {fewest} of {size} samples are not one for each of {ranks} "
                "ranks",
                fix="use fewer ranks, or a loader with drop_last=True",
            )
        folder = self._folder / name
        (folder / "ledger").mkdir(parents=True, exist_ok=True)
        self._ledgers[name] = LedgerWriter(
            folder,
            start=self._start,
            rank=self._group.launch.rank,
            step=self._first_step,
            facts=stream.sampler.ledger_facts(),
        )
        self._streams[name] = stream
        return stream


def _problem_with(given: object, name: str) -> str:
    """Say why a loader can't be read in our order; empty: it can."""
    if not isinstance(given, DataLoader):
        return f"it needs a torch DataLoader, and got {type(given).__name__}"
    if isinstance(given.dataset, IterableDataset):
        return "an IterableDataset has no place to go back to: use run.steps, register its position"
    if given.batch_size is None:
        return "it has a batch_sampler, or no batch_size: protect makes the batches by batch_size"
    plain = type(given.sampler) in (SequentialSampler, RandomSampler, DistributedSampler)
    if not plain or getattr(given.sampler, "replacement", False):
        sampler = type(given.sampler).__name__
        told = f"its sampler ({sampler}) is not used"
        return f"{told}: leave it out; the order is shuffled by the seed"
    return "" if name.isidentifier() else "a name has letters, digits and underscores only"
