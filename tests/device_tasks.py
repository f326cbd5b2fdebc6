"""Datasets, models and tasks for test_devices.py."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.task.task import Metric, Score, Task
from tests.plugins import Made
from tests.token_data import sequences


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
