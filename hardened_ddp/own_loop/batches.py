"""The data of an own loop: each sample once per epoch, and the place in it, for several loaders.

Owns the place: the epoch, and of each loader the pass, the samples of it that were used, and the
samples of a window, which is what all ranks together get at a time: batch_size x the ranks of the
first start, kept when the number changes. The place counts when the commit after it is done.
A batch counts as used at the next forward, at the next commit, or when its loader is asked for
another: one that zip took from one loader, before it saw the end of the other, is handed out again.
Owns the ledger of each loader, too: what is used is written before the forward, because another
rank may complete the body in which this one dies.
"""

import copy
import logging
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

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
from hardened_ddp.data.batches.fetch import reads_batches
from hardened_ddp.data.batches.ledger import LedgerWriter, next_start
from hardened_ddp.data.batches.sampler import Window, WindowSampler
from hardened_ddp.errors import OwnLoopError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.seeding import keeping_random_state, mix, seed_sample

log = logging.getLogger(__name__)

FOLDER = "data"  # of a run folder: a ledger for each loader

# A last window has a sample for each of so many times the ranks of the first start.
_MOST_RANKS_LATER = 4


class Seeded(Dataset[Any]):  # Any: whatever a sample is
    """A dataset whose samples have random numbers of their own, by seed, pass and index.

    One that reads a batch at a time does so here, too: its class may have no other way, and what it
    does to a batch, such as padding, is not the same sample by sample. It is seeded once for each.
    """

    def __init__(self, dataset: Any, seed: int) -> None:  # Any: map-style
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:  # Any: for collate_fn
        if reads_batches(self.dataset):
            seed_sample(self.seed, *keys[0])
            return self.dataset.__getitems__([index for _, index in keys])
        return [self._sample(*key) for key in keys]

    def _sample(self, number: int, index: int) -> Any:  # Any: as above
        seed_sample(self.seed, number, index)
        return self.dataset[index]


class Stream:
    """A loader that reads in our order what the given one would in its own; no iterable dataset."""

    def __init__(
        self, given: DataLoader[Any], place: dict[str, int], group: Group, *, seed: int
    ) -> None:
        """place: pass, cursor, window, size, repeat, least (samples of a last window)."""
        self.given, self.place = given, place
        self.ended_in = -1  # the epoch in which it gave its last batch
        self.ledger: LedgerWriter
        self.sampler = WindowSampler(
            given.dataset,
            num_replicas=group.world_size,
            rank=group.launch.rank,
            seed=seed,
            global_batch=place["window"],
            batch_size=2 * place["window"],  # WHY: so many on one rank, if there is only one now
            drop_last=given.drop_last,
            min_last_window=place["least"],
        )
        # WHY so: all of the given one counts, and it refuses another sampler once it is made.
        # WHY a generator: else each start of a pass would draw a number of the loop's own
        own = {"dataset": Seeded(given.dataset, seed), "generator": torch.Generator()}
        self.loader = DataLoader.__new__(DataLoader)
        vars(self.loader).update(vars(given) | own | {"batch_sampler": self, "_iterator": None})

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield this rank's share of each window: as the batch_sampler of the loader."""
        for window in self.sampler.windows_of(self.place["pass"], self.place["cursor"]):
            [share] = self.sampler.micro_batches(window)
            yield [(window.epoch, index) for index in share.tolist()]


class Streams:
    """The loaders of a loop, by name, and the place in them."""

    def __init__(self, group: Group, folder: Path, *, seed: int) -> None:
        """Collective: all ranks."""
        self.epoch = self.batch_index = 0
        self._group, self._folder, self._seed = group, folder / FOLDER, seed
        self._first_step = 0
        self._streams: dict[str, Stream] = {}
        self._places: dict[str, dict[str, int]] = {}  # also of those that were not opened yet
        self._unused: dict[str, tuple[int, Window]] = {}  # step and window that were handed out
        self._start: int = group.run_on_main(  # collective
            lambda: max(map(next_start, self._folder.glob("*")), default=1),
            what="opening the ledger",
        )

    @property
    def global_batch(self) -> int:
        return max((place["window"] for place in self._places.values()), default=0)

    def place(self) -> dict[str, Any]:  # Any: JSON
        streams = copy.deepcopy(self._places)
        return {"epoch": self.epoch, "seed": self._seed, "streams": streams}

    def begin(self, step: int, place: dict[str, Any]) -> None:  # Any: JSON
        """Go to the place of a checkpoint. Raises OwnLoopError if it has another order."""
        if (before := place.get("seed", self._seed)) != self._seed:
            raise OwnLoopError(
                f"the checkpoint's samples were shuffled with seed={before}, and protect is given "
                f"seed={self._seed}: some would be taken twice, and others never",
                fix="give protect the same seed, or another folder",
            )
        self._first_step, self.epoch = step, place["epoch"]
        self._places = copy.deepcopy(place["streams"])

    def end_epoch(self) -> None:
        self.epoch += 1
        self._unused.clear()
        for place in self._places.values():
            if not place["repeat"]:
                place |= {"pass": self.epoch, "cursor": 0}

    def batches(
        self, given: DataLoader[Any], name: str, repeat: bool, begin: Callable[[bool], int]
    ) -> Iterator[Any]:  # Any: what the user's collate_fn returns
        """Yield this rank's share of each window. begin: called before each; returns the step.

        It is told whether one was yielded before: what the loop did since then is not done again.
        """
        stream = self._open(given, name, repeat=repeat)
        tracker, place, sampler = self._group.tracker, stream.place, stream.sampler
        again = False
        while True:
            if place["cursor"] >= sampler.end:
                if stream.ended_in == self.epoch:
                    _refuse(name, f"all of epoch {self.epoch} was given: put it in run.epochs(n)")
                if not repeat:
                    stream.ended_in = self.epoch
                    self._unused.clear()
                    return
                place |= {"pass": place["pass"] + 1, "cursor": 0}
            read = iter(stream.loader)
            for window in sampler.windows_of(place["pass"], place["cursor"]):
                tracker.enter(Phase.DATA)
                step, again = begin(again), True
                with keeping_random_state():  # WHY: without workers each sample seeds them
                    batch = next(read)
                tracker.enter(Phase.FORWARD)
                self.batch_index = window.start // sampler.global_batch
                self._unused[name] = step, window
                yield batch
                self.use(name)
                if (place["pass"], place["cursor"]) != (window.epoch, window.stop):
                    break  # it was not used: see zip, above

    def use(self, *names: str) -> None:
        """Count what was handed out as used, of all loaders if none is named.

        Before each forward, and at each commit.
        """
        for name in [each for each in self._unused if not names or each in names]:
            (step, window), stream = self._unused.pop(name), self._streams[name]
            stream.place["cursor"] = window.stop
            shares = stream.sampler.micro_batches(window)
            stream.ledger.bring(step, window.epoch, [share.numpy() for share in shares])

    def sync(self) -> None:
        """Have the ledgers of all ranks on the disk. Raises OSError. Any thread."""
        for stream in list(self._streams.values()):
            if files := stream.ledger.files():
                Disk().sync_files(files[0].parent, files)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.ledger.close()

    def _open(self, given: DataLoader[Any], name: str, *, repeat: bool) -> Stream:
        """Return the stream of a loader, with the windows of the first start."""
        if (known := self._streams.get(name)) is not None:
            if known.given is given:
                return known
            told = "two loaders have this name, and so one place: make a loader once, before the "
            _refuse(name, told + "loop; or name=f'data{epoch}' if each epoch has one")
        if problem := _problem_with(given, name):
            _refuse(name, problem)
        assert given.batch_size is not None
        size, ranks = len(given.dataset), self._group.world_size  # type: ignore[arg-type]
        window = given.batch_size * ranks
        place = {"window": window, "size": size, "repeat": int(repeat), "batch": given.batch_size}
        place["least"] = min(_MOST_RANKS_LATER * ranks, window)
        place |= {"pass": 0 if repeat else self.epoch, "cursor": 0}
        place = self._places.setdefault(name, place)
        if (place["size"], place["repeat"]) != (size, int(repeat)):
            saved = f"the checkpoint was at a place in {place['size']} samples, this has {size}"
            _refuse(name, f"{saved}: give the same data, and the same repeat; or another folder")
        if place.get("batch", given.batch_size) != given.batch_size and place["window"] != window:
            log.warning(
                "run.batches, name=%r: batch_size %d is not used: all ranks together get %d "
                "samples at a time, as when this run began; another one needs another folder",
                *(name, given.batch_size, place["window"]),
            )
        stream = Stream(given, place, self._group, seed=mix(self._seed, zlib.crc32(name.encode())))
        rest = stream.sampler.end % place["window"]
        fewest = rest if rest >= place["least"] else min(place["window"], stream.sampler.end)
        if fewest < ranks:
            few = f"the last {fewest} of {size} samples are not one for each of {ranks} ranks"
            _refuse(name, f"{few}: use fewer ranks, or a loader with drop_last=True")
        folder, rank, facts = self._folder / name, self._group.launch.rank, stream.sampler
        (folder / "ledger").mkdir(parents=True, exist_ok=True)
        stream.ledger = LedgerWriter(
            folder, start=self._start, rank=rank, step=self._first_step, facts=facts.ledger_facts()
        )
        self._streams[name] = stream
        return stream


def _refuse(name: str, why: str) -> NoReturn:
    raise OwnLoopError(f"run.batches, name={name!r}: {why}")


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
        return f"its sampler ({sampler}) is not used: leave it out; the seed shuffles the order"
    return "" if name.isidentifier() else "a name has letters, digits and underscores only"
