"""Datasets, streams, models, tasks and metrics that are each wrong in one way."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.task.task import Metric, Score, Task

LABELS: dict[str, Callable[[int], Any]] = {
    "class": lambda i: i % 2,
    "text": lambda i: "yes",
    "float": lambda i: float(i) / 7,
    "binary": lambda i: torch.tensor([float(i % 2)]),
    "at the start": lambda i: 5 if i == 1 else i % 2,
    "half": lambda i: i % 2 / 2,
    "NaN": lambda i: math.nan if i < 2 else 1.0 + i,
    "later NaN": lambda i: math.nan if i == 5 else 1.0 + i,
    "pair": lambda i: torch.tensor([i % 2, 1]),
    "two": lambda i: torch.tensor([2, i % 2]),
    "token 9": lambda i: torch.tensor([0, 1, 9]),
    "map": lambda i: torch.zeros(4, 4, dtype=torch.int64),
    "map 255": lambda i: torch.full((4, 4), 255),
}
INPUTS: dict[str, Callable[[int], Any]] = {
    "row": lambda i: torch.tensor([i / 10, 1.0, -1.0]),
    "named": lambda i: {"pixels": torch.ones(3)},
    "nothing": lambda i: None,
}


class Table(Dataset[Any]):
    """Twelve samples whose inputs and labels are of those kinds; num_classes if it is given."""

    def __init__(self, label: str, inputs: str = "row", num_classes: int | None = None) -> None:
        self.label, self.inputs = LABELS[label], INPUTS[inputs]
        if num_classes is not None:
            self.num_classes = num_classes

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        inputs = self.inputs(index)
        return inputs if inputs is None else (inputs, self.label(index))


def table(train: bool, label: str = "class", test_label: str = "", **more: Any) -> Table:
    return Table(label if train else test_label or label, **more)


class Sized(Table):
    """The table, with a length and classes that are of no right type."""

    def __init__(self, length: Any, classes: Any) -> None:
        super().__init__("class")
        self.length, self.classes = length, classes

    def __len__(self) -> int:
        return self.length  # type: ignore[no-any-return]  # what is wrong is the test


def sized(train: bool, length: Any = 12, classes: Any = ()) -> Sized:
    return Sized(length, classes)


def loader(train: bool) -> DataLoader[Any]:
    return DataLoader(Table("class", "row", 2), batch_size=4)


def no_instance(train: bool) -> type:
    return Table


class Stream:
    """Shards of those lengths in the first epoch; kind: what is wrong with it."""

    num_classes = 2

    def __init__(self, kind: str, lengths: list[int]) -> None:
        self.kind, self.lengths, self.num_shards = kind, lengths, len(lengths)
        if kind == "too many sizes":
            self.sizes = [*lengths, 1]
        if kind == "no number":
            self.num_shards = "4"  # type: ignore[assignment]

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        if self.kind == "does not open":
            raise FileNotFoundError(2, "No such file", f"shard-{shard}.bin")
        for index in range(self.lengths[shard]):
            if self.kind == "all broken":
                raise ValueError("a broken row")
            yield torch.tensor([index / 10, 1.0, -1.0]), index % 2


def stream(train: bool, kind: str = "", lengths: tuple[int, ...] = (8, 8, 8)) -> Any:
    if not train:
        return None
    return (row for row in ()) if kind == "iterator" else Stream(kind, list(lengths))


def drop(samples: list[Any]) -> Any:
    """A collate that leaves out the last sample of a batch of several."""
    kept = samples[:-1] or samples
    return torch.stack([row for row, _ in kept]), torch.tensor([label for _, label in kept])


def fail(samples: list[Any]) -> Any:
    raise KeyError("padding")


def nothing(samples: list[Any]) -> None:
    """A collate that returns nothing."""


class Model(nn.Module):
    """Gives what kind says, of the shape (num_samples, *shape)."""

    def __init__(self, shape: tuple[int, ...] = (2,), kind: str = "logits") -> None:
        super().__init__()
        if kind == "not built":
            raise ValueError("depth must be a multiple of 8")
        self.shape, self.kind, self.layer = tuple(shape) or (2,), kind, nn.Linear(3, 1)
        if kind == "meta":
            self.to("meta")
        self.parts = [nn.Linear(3, 1)]  # not an nn.ModuleList
        self.register_buffer("mean", None)

    def forward(self, inputs: torch.Tensor) -> Any:
        value = self.layer(inputs).mean()
        if self.kind == "a late buffer":
            self.mean = inputs.mean(dim=0)
        if self.kind == "in a list":
            value = value + self.parts[0](inputs).mean()
        logits = value * torch.ones(len(inputs), *self.shape)
        found: dict[str, Any] = {
            **dict.fromkeys(["logits", "in a list", "a late buffer"], logits),
            "nothing": None,
            "no loss": {"logits": logits},
            "losses": {"loss": logits.sum(1)},
            "detached": {"loss": value.detach()},
            "two losses": {"loss_g": value, "loss_d": -value},
        }
        return found[self.kind]


class Wrong(Task):
    """A task of a user; kind: what is wrong with its score."""

    metrics = (Metric("mae", is_higher_better=False),)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def score(self, output: torch.Tensor, batch: Batch) -> Any:
        losses, size = output.sum(1), batch.num_samples
        mae = losses.detach().sum()
        match self.kind:
            case "no Score":
                return losses.sum()
            case "not summed":
                return Score(losses, size, {"mae": mae})
            case "no metric":
                return Score(losses.sum(), size, {})
            case "raises":
                raise IndexError("no such column")
            case "count of nothing":
                return Score(losses.sum(), None, {"mae": mae})  # type: ignore[arg-type]
            case "negative count":
                return Score(losses.sum(), -size, {"mae": mae})
        return Score(losses.sum(), size, {"mae": mae})


class Measure:
    """A metric; kind: what is wrong with it."""

    def __init__(self, kind: str = "") -> None:
        self.kind, self.total = kind, 0.0

    def update(self, output: torch.Tensor, labels: torch.Tensor) -> None:
        if self.kind == "raises":
            raise ValueError("no binary labels")
        self.total += 1.0

    def compute(self) -> Any:
        return [1.0, 2.0] if self.kind == "list" else self.total

    def reset(self) -> None:
        self.total = 0.0


class NoMeasure:
    pass
