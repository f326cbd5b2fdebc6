"""Sequences with ragged labels, and small models for them: what tests of tasks train."""

import os
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from tests.plugins import is_first_time

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


class TinyLM(nn.Module):
    """(N, T) tokens -> (N, T, VOCABULARY) logits; double: in fp64."""

    def __init__(self, double: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.mix = nn.Linear(8, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY)
        if double:
            self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.drop(self.mix(self.embed(ids)).tanh()))
        return logits


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


class StumblingLM(TinyLM):
    """Raises in one forward of one rank, once."""

    def __init__(self, marker: str, forward_number: int = 9) -> None:
        super().__init__(dropout=0.2)
        self.marker, self.forward_number, self.num_forwards = marker, forward_number, 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        is_here = os.environ.get("RANK", "0") == "1" and self.num_forwards == self.forward_number
        if is_here and is_first_time(self.marker):
            raise RuntimeError("stumbled")
        return super().forward(ids)


class Slopes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points with two numbers as their label."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return point, torch.stack([point.sum(), point[0] - 2 * point[1]])


def slopes(train: bool) -> Slopes:
    return Slopes(36 if train else 13)
