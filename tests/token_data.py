"""Datasets, models and tasks for tests: sequences with ragged labels, and others of each kind."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.step.failure import Failure
from hardened_ddp.step.gradient import Attempt, Gradient
from hardened_ddp.task.task import Metric, Score, Task
from tests.plugins import FailingOnce, Forwards, Made, with_fault

VOCABULARY, LENGTH = 11, 9


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Each sample i has about i % 7 labels that count, and none if i is in silent."""

    def __init__(self, size: int, silent: tuple[int, ...] = ()) -> None:
        self.size, self.silent = size, silent

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels = (3 * ids + 1) % VOCABULARY
        labels[index % 7 + 1 :] = -100
        if index in self.silent:
            labels[:] = -100
        return {"ids": ids, "labels": labels}


def sequences(train: bool, size: int = 36, silent: tuple[int, ...] = ()) -> Sequences:
    return Sequences(size if train else 13, silent)


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    values = {"ids": 0, "labels": -100}
    return {
        name: pad_sequence([sample[name] for sample in samples], True, value)
        for name, value in values.items()
    }


class Ragged(Sequences):
    """Sequences of 3 to 40 tokens; those in uniform have 20. Every label counts."""

    collate_fn = staticmethod(pad)

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.uniform: set[int] = set()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 41, (), generator=generator))
        length = 20 if index in self.uniform else length
        ids = torch.randint(VOCABULARY, (length,), generator=generator)
        return {"ids": ids, "labels": (3 * ids + 1) % VOCABULARY}


def ragged(train: bool, size: int = 72) -> Ragged:
    return Ragged(size if train else 13)


class RaggedStream:
    """The same as a stream of 4 shards."""

    num_shards = 4
    collate_fn = staticmethod(pad)

    def __init__(self, size: int) -> None:
        self.samples = Ragged(size)
        self.sizes = [len(range(shard, size, self.num_shards)) for shard in range(self.num_shards)]

    def open(self, shard: int, *, epoch: int, state: object) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(shard, len(self.samples), self.num_shards):
            yield self.samples[index]


def ragged_stream(train: bool, size: int = 72) -> RaggedStream:
    return RaggedStream(size if train else 13)


class TinyLM(nn.Module):
    """(N, T) tokens -> (N, T, VOCABULARY) logits; double: in fp64."""

    def __init__(self, double: bool = False, dropout: float = 0.0, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY)
        if double:
            self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.mix(self.embed(ids)).tanh()))


class OwnLM(TinyLM):
    """Returns its own loss: the mean over the labels that count; shift: of the token after."""

    def __init__(self, double: bool = False, shift: int = 0, names: str = "loss logits") -> None:
        super().__init__(double)
        self.shift, self.names = shift, names.split()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(ids)
        outputs = logits[:, : LENGTH - self.shift].flatten(0, 1)
        loss = cross_entropy(outputs, labels[:, self.shift :].flatten())
        found = {"loss": loss, "logits": logits}
        return {name: found[name] for name in self.names}


class FailingLM(TinyLM):
    """Has a fault in one forward of rank 1, or in the backward of it: see with_fault; 0: never."""

    num_forwards = Forwards()

    def __init__(self, forward_number: int = 0, how: str = "memory", width: int = 8) -> None:
        super().__init__(dropout=0.2, width=width)
        self.forward_number, self.how, self.num_forwards = forward_number, how, 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        is_now = self.training and self.num_forwards == self.forward_number
        is_now = is_now and os.environ.get("RANK", "0") == "1"
        logits = super().forward(ids)
        return with_fault(self.how, logits) if is_now else logits


def slopes(train: bool) -> Made:
    """Give points with two numbers as their label."""

    def make(rng: torch.Generator, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.randn(3, generator=rng)
        return point, torch.stack([point.sum(), point[0] - 2 * point[1]])

    return Made(36 if train else 13, make)


def smaller_points(num_classes: int, step: int, most: int) -> nn.Module:
    """Build FailingOnce without a fault; from step on, micro-batches have most samples."""
    _limit(step, most)
    return FailingOnce(num_classes)


def smaller_language_model(step: int, most: int) -> nn.Module:
    """Build FailingLM, which has enough memory; from step on, micro-batches have most samples."""
    _limit(step, most)
    return FailingLM()


def _limit(step: int, most: int) -> None:
    run = Gradient.run

    def limited(gradient: Gradient, attempt: Attempt, *, is_retry: bool) -> Failure | None:
        if gradient.progress.step >= step:
            gradient.progress.max_micro_batch = most
        return run(gradient, attempt, is_retry=is_retry)

    Gradient.run = limited  # type: ignore[method-assign]  # of this process alone


def pictures(train: bool) -> Made:
    size = 40 if train else 17
    return Made(size, lambda rng, index: (torch.randn(1, 8, 8, generator=rng), index % 20), 20)


def tagged(train: bool) -> Made:
    def make(rng: torch.Generator, _: int) -> Any:
        return torch.randn(3, generator=rng), torch.rand(5, generator=rng).round()

    return Made(40 if train else 17, make, 5)


def maps(train: bool) -> Made:
    def make(rng: torch.Generator, _: int) -> Any:
        return torch.randn(1, 4, 4, generator=rng), torch.randint(3, (4, 4), generator=rng)

    return Made(40 if train else 17, make, 3)


class Wrong(Dataset[Any]):
    """Samples of another dataset; some have a number out of range in them."""

    def __init__(self, samples: Dataset[Any], ids: list[int], labels: list[int]) -> None:
        self.samples, self.ids, self.labels = samples, ids, labels
        self.num_classes = getattr(samples, "num_classes", None)

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]  # all of them have a length

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        names = ("ids", "labels") if isinstance(sample, dict) else (0, 1)
        for name, numbers in zip(names, (self.ids, self.labels), strict=True):
            if index in numbers:
                sample[name].view(-1)[-1 if name == "ids" else 0] = 60_000
        return sample


def wrong(
    train: bool, of: str = "sequences", ids: Sequence[int] = (), labels: Sequence[int] = ()
) -> Wrong:
    made = maps(train) if of == "maps" else sequences(train)
    return Wrong(made, list(ids) if train else [], list(labels) if train else [])


def net(num_classes: int) -> nn.Module:
    """Make a network for pictures, with BatchNorm: forward changes its statistics."""
    first = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
    return nn.Sequential(first, nn.Linear(72, num_classes))


def pixels(num_classes: int) -> nn.Module:
    """Make a model that gives a class for each pixel."""
    return nn.Conv2d(1, num_classes, 3, padding=1)


class Counting(nn.Module):
    """Returns its loss, and what it is a mean over: a number."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_classes)

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        return {"loss": cross_entropy(self.layer(points), labels), "count": len(points)}


class Distance(Task):
    """A user's task, with numbers of the host as counts."""

    metrics = (Metric("mae", is_higher_better=False), Metric("share"))

    def score(self, output: torch.Tensor, batch: Batch) -> Score:
        error = (output - batch.targets).abs().sum()
        size = batch.num_samples
        return Score(error, size, {"mae": error.detach(), "share": (1, size)})
