#!/usr/bin/env python3
"""What a stream costs beside a map-style dataset of the same samples: in turns, in one process.

    python benchmarks/stream_cost.py --json stream.json        one to five minutes

Both train the same model on the same number of samples, an epoch each in turn, through the loaders
that a run uses (no worker processes, one rank). Measured is the CPU time of an epoch. The ratio is
the median of the pairs: what other programs take of the caches meets both of a pair. That of the
fastest epochs is beside it. Both differ by some percent from start to start: look at several.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import describe
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.loader import BatchReader, TrainLoader
from hardened_ddp.data.batches.sampler import WindowSampler
from hardened_ddp.data.batches.workers import WorkerPlan
from hardened_ddp.model.zoo import SimpleCNN
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.resources import keep_imported
from hardened_ddp.settings.config import DataConfig
from hardened_ddp.streams.block_reader import BlockReader
from hardened_ddp.streams.shard_loader import ShardLoader
from hardened_ddp.streams.shard_sampler import ShardSampler
from hardened_ddp.streams.stream_batches import HeldSamples

BATCH, FEATURES, CLASSES = 64, 784, 10


class Rows(Dataset[Any]):
    """Rows in memory, read one by one as from a file."""

    uses_randomness = False

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(num_samples, FEATURES, generator=generator)
        self.labels = (torch.arange(num_samples) % CLASSES).tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.inputs[index], self.labels[index]


class RowStream:
    """The same rows in shards."""

    uses_randomness = False

    def __init__(self, rows: Rows, num_shards: int, *, says: bool) -> None:
        self.rows, self.num_shards = rows, num_shards
        if says:
            self.sizes = [len(range(shard, len(rows), num_shards)) for shard in range(num_shards)]

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        return (self.rows[i] for i in range(shard, len(self.rows), self.num_shards))


def map_loader(rows: Rows) -> TrainLoader:
    """Build the loader of the map-style dataset."""
    sampler = WindowSampler(
        rows, num_replicas=1, rank=0, seed=0, global_batch=BATCH, batch_size=BATCH
    )
    return TrainLoader(sampler, batch_stream(Fetcher(rows, seed=0)))


def stream_loader(rows: Rows, num_shards: int, *, says: bool) -> ShardLoader:
    """Build the loader of the stream."""
    stream = RowStream(rows, num_shards, says=says)
    sampler = ShardSampler(
        stream,
        num_replicas=1,
        rank=0,
        seed=0,
        global_batch=BATCH,
        batch_size=BATCH,
        shuffle_block=DataConfig().shuffle_block,
    )
    launch = Launch(rank=0, local_rank=0, world_size=1)
    fetcher = Fetcher(HeldSamples(stream), seed=0)
    return ShardLoader(
        sampler,
        batch_stream(BlockReader(stream, seed=0)),
        fetcher,
        Group(launch, torch.device("cpu")),
        epochs=1_000_000,
        pin_memory=False,
    )


def batch_stream(fetcher: Any) -> BatchReader:
    """Read in this process."""
    plan = WorkerPlan(num_workers=0, prefetch_factor=2, start_method="fork")
    return BatchReader(fetcher, plan, DataConfig(), pin_memory=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "reading only": nn.Identity,
    "MLP of 1024": lambda: nn.Sequential(
        nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)
    ),
    "simple_cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), SimpleCNN(num_classes=CLASSES, input_shape=(1, 28, 28))
    ),
}


def epoch_of(loader: Any, name: str) -> Callable[[int], float]:
    """Return a function that trains an epoch and gives its CPU seconds."""
    torch.manual_seed(0)
    model, is_trained = MODELS[name](), name != "reading only"
    parameters = list(model.parameters()) or [torch.zeros(1)]
    optimizer = torch.optim.SGD(parameters, 0.01)

    def train(epoch: int) -> float:
        began = time.process_time()
        for _, batches in loader.windows(epoch, 0):
            for batch in batches if is_trained else ():
                nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        return time.process_time() - began

    return train


def main() -> None:
    """Measure, print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=5_120)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_imported()  # as a run does, else what is garbage depends on what was imported
    rows, found = Rows(options.samples), {}
    for model in options.models:
        for says in (True, False):
            loaders = [map_loader(rows), stream_loader(rows, options.shards, says=says)]
            runs = [epoch_of(loader, model) for loader in loaders]
            times = []
            for turn in range(options.rounds + 1):
                order = (0, 1) if turn % 2 else (1, 0)
                # WHY always epoch 0 of a stream that does not say its length: later it is known
                pair = {number: runs[number](turn if says else 0) for number in order}
                if not says:
                    loaders[1].sampler.sizes[:] = -1
                times.append((pair[0], pair[1]))
            ratios = [other / one for one, other in times[1:]]  # the first pair warms up
            plain, stream = (min(column) for column in zip(*times[1:], strict=True))
            name = f"{model}, {'known' if says else 'unknown'}"
            found[name] = {
                "map_us_per_sample": plain / options.samples * 1e6,
                "stream_us_per_sample": stream / options.samples * 1e6,
                "ratio": statistics.median(ratios),
                "ratio_of_the_fastest": stream / plain,
            }
            print(
                f"{name + ' length':<32} map {plain / options.samples * 1e6:7.2f} us, stream "
                f"{stream / options.samples * 1e6:7.2f} us per sample, "
                f"ratio {statistics.median(ratios):.3f}, of the fastest {stream / plain:.3f}",
                flush=True,
            )
    if options.json:
        report = {"machine": describe(), "options": vars(options), "found": found}
        options.json.write_text(json.dumps(report, indent=2, default=str))


if __name__ == "__main__":
    main()
