"""A dataset in which something happens at one sample, and loaders over it.

Owns: what is read when nothing happens, so that a test can compare. Sample i tells its number and a
random number, which must be the same whoever reads it, and at the second try too.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.checks import Checks
from hardened_ddp.data.batches.collate import Collate
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.loader import BatchReader, TrainLoader
from hardened_ddp.data.batches.sampler import WindowSampler
from hardened_ddp.data.batches.workers import WorkerPlan
from hardened_ddp.settings.config import DataConfig

SIZE = 40
MARKED = 20  # the sample at which something happens

Act = Callable[[Path], Any]


class Scripted(Dataset[Any]):
    """Sample i is (float i and a random number, i % 3); something else happens at MARKED."""

    def __init__(self, act: Act | None = None, flag: Path = Path("unused")) -> None:
        self.act = act
        self.flag = flag

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if index == MARKED and self.act is not None:
            replaced = self.act(self.flag)
            if replaced is not None:
                return replaced
        return torch.tensor([float(index), float(torch.rand(()))]), index % 3


def die_once(flag: Path) -> None:
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Whole(Scripted):
    """Gives whole batches; fails as a whole if one of its samples is MARKED and act is set."""

    def __getitems__(self, indices: list[int]) -> Any:
        assert all(type(index) is int for index in indices)
        samples = [self[index] for index in indices]
        inputs = torch.stack([sample[0] for sample in samples])
        return inputs, torch.tensor([sample[1] for sample in samples])


class Listed(Scripted):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


# In a worker the same code reads as without.
WAYS_TO_READ = [(Scripted, 0), (Whole, 0), (Listed, 0), (Scripted, 1)]


def give_back_sigchld() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as guard/stop.py does it


def make_stream(
    dataset: Any,
    num_workers: int = 0,
    *,
    start_method: str = "fork",
    checks: Checks | None = None,
    collate: Collate | None = None,
    **settings: Any,
) -> BatchReader:
    fetcher = Fetcher(dataset, seed=1, checks=checks, collate=collate)
    return make_reader(fetcher, num_workers, start_method, **settings)


def make_reader(
    source: Any, num_workers: int = 0, start_method: str = "fork", **settings: Any
) -> BatchReader:
    plan = WorkerPlan(num_workers=num_workers, prefetch_factor=2, start_method=start_method)
    reader = BatchReader(source, plan, DataConfig(**settings), pin_memory=False)
    reader.call_after_start(give_back_sigchld)
    return reader


def make_loader(
    dataset: Any, num_workers: int = 0, *, rank: int = 0, world_size: int = 1, **how: Any
) -> TrainLoader:
    how_much = {"num_replicas": world_size, "seed": 1, "global_batch": 8, "batch_size": 3}
    sampler = WindowSampler(dataset, rank=rank, **how_much)
    return TrainLoader(sampler, make_stream(dataset, num_workers, **how))


def read(loader: TrainLoader, epoch: int = 0, start: int = 0) -> list[Batch]:
    return [batch for _, batches in loader.windows(epoch, start) for batch in batches]


def numbers(batches: list[Batch]) -> list[int]:
    return [index for batch in batches for index in batch.indices.tolist()]


def bad_numbers(batches: list[Batch]) -> list[int]:
    return [bad.index for batch in batches for bad in batch.bad]


def content(batches: list[Batch]) -> dict[int, tuple[float, ...]]:
    """Map each sample to what was read of it."""
    found = {}
    for batch in batches:
        assert batch.num_samples == len(batch.indices) == len(batch.inputs) == len(batch.targets)
        for index, row, target in zip(batch.indices, batch.inputs, batch.targets, strict=True):
            found[int(index)] = (*row.tolist(), float(target))
    return found
