"""A loss that depends on which samples share a micro-batch is told before training."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.model.precision import Precision
from hardened_ddp.preflight.shared_loss import warn_of_shared_loss
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import read_launch
from hardened_ddp.task.classification import Classification
from hardened_ddp.task.own import Own
from hardened_ddp.task.task import Task

CPU = torch.device("cpu")


class Contrastive(nn.Module):
    """Each row should be most like its own second view, of those in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        views = [normalize(self.layer(part)) for part in (inputs, inputs + 0.1)]
        return {"loss": cross_entropy(views[0] @ views[1].T, torch.arange(len(inputs)))}


class Summed(nn.Module):
    """Returns the sum of its losses where a mean is expected."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(inputs) - 1).square().sum()}


class Mixing(nn.Module):
    """Attention that takes the samples for the positions of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 1), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs * torch.tensor([5.0, -5.0, 5.0, -5.0])
        logits: torch.Tensor = self.last(20 * self.attention(rows, rows, rows)[0])
        return logits


class Random(nn.Module):
    """Draws random numbers in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(inputs + 3 * torch.randn_like(inputs))
        return logits


def told(model: nn.Module, task: Task, caplog: pytest.LogCaptureFixture, **batch: Any) -> str:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    samples = [
        Batch(torch.randn(2, 4), torch.tensor([0, 2]), torch.arange(2), **batch) for _ in range(2)
    ]
    task.attach(model, "own" if isinstance(task, Own) else "classification")
    with caplog.at_level(logging.WARNING):
        group = Group(read_launch({}), CPU)
        warn_of_shared_loss(Trial(model, task, Precision("off", CPU), group), samples)
    assert model.training
    return caplog.text


@pytest.mark.parametrize("model", [Contrastive(), Summed(), Mixing()])
def test_a_loss_that_depends_on_the_micro_batch_is_told(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    is_own = not isinstance(model, Mixing)
    found = told(model, Own() if is_own else Classification(num_classes=3), caplog)
    assert "depends on which samples share a micro-batch" in found
    assert ("is a mean over samples" in found) is is_own


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 3),
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout()),
        Random(),
    ],
)
def test_of_other_losses_nothing_is_told(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    assert not told(model, Classification(num_classes=3), caplog)


def test_a_collate_that_draws_random_numbers_is_not_taken_for_such_a_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def read_part(indices: Sequence[int]) -> Batch:
        return Batch(torch.randn(1, 4), torch.tensor([0]), torch.tensor([int(indices[0])]))

    model = nn.Linear(4, 3)
    assert not told(model, Classification(num_classes=3), caplog, read_part=read_part)
