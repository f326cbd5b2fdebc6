"""Sequences with ragged labels, and small models for them: what tests of tasks train."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hardened_ddp.step.failure import Failure
from hardened_ddp.step.gradient import Attempt, Gradient
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
