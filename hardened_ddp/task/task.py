"""The task of a run: how the model is called, and what its output on a batch is worth.

Owns the interface between training and what is trained, and nothing of any one task. Training adds
up scores, divides the gradient by their count, and prints the metrics that the task names; only the
task knows what the labels are.
WHY sums: the loss divided once by the count of the whole window gives the gradient of one big
batch, however ranks and micro-batches share the window; and metrics are the same on any number of
ranks.
Read next: classification.py, the task that is built in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class Score:
    """What one forward is worth."""

    loss_sum: torch.Tensor
    """Scalar with its graph: the loss, summed over what counts."""

    count: int
    """What the loss is a mean over: the samples."""

    metrics: Mapping[str, torch.Tensor]
    """Scalars on the device, one for each name in the task's sums."""

    predictions: torch.Tensor
    """What the model says of each sample, without a graph, in the form that the task gives it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number beside the loss by which people judge the model."""

    name: str
    form: str = ".4f"
    """How it is printed: a format specification."""

    short_name: str = ""
    short_form: str = ".3g"
    """The same where there is little room: before the progress bar."""

    is_higher_better: bool = True

    def is_better(self, value: float, than: float) -> bool:
        """Say whether value is better than another one. A tie is not."""
        return value > than if self.is_higher_better else value < than


@dataclass(frozen=True, slots=True)
class Mistake:
    """A test sample that the model got wrong, for the report."""

    image: torch.Tensor
    """On the CPU; a picture if it has the shape of one."""

    caption: str


class Table(Protocol):
    """What the command evaluate reports of a task beside its metrics."""

    @property
    def sums(self) -> torch.Tensor:
        """What was counted, of the same shape on all ranks: to be added up over them in place."""

    def add(self, score: Score, targets: torch.Tensor) -> None:
        """Add one forward."""

    def report(self) -> dict[str, Any]:  # Any: JSON
        """Give what the report's file says of it."""

    def lines(self, report: Mapping[str, Any]) -> list[str]:  # Any: JSON
        """Print what report gave, as people read it."""


class Task(Protocol):
    """What training and evaluation need of a task."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """What is reported beside the loss. The first one says which checkpoint is the best."""

    @property
    def sums(self) -> Mapping[str, torch.dtype]:
        """The sums in the metrics of each score, by name, and as what they are added up."""

    def score(
        self,
        call: Callable[..., Any],
        inputs: Any,  # a tensor, or what the dataset nests tensors in
        targets: torch.Tensor,
        *,
        checks: bool = False,
    ) -> Score:
        """Run call, which is the model, on inputs, and compare its output with targets. Rank-local.

        checks: make sure first that output and targets fit each other. Costs a wait for the device.
        Raises ModelError.
        """

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Give the value of each metric, by name, from the sums over all samples."""

    def mistakes(
        self, score: Score, inputs: torch.Tensor, targets: torch.Tensor, *, most: int
    ) -> list[Mistake]:
        """Give the first samples that the model got wrong, if the task knows such. At most most."""

    def table(self, device: torch.device) -> Table | None:
        """Give an empty table for the command evaluate, if the task has one."""


def described(metrics: Sequence[Metric], figures: Mapping[str, float], *, of: str = "") -> str:
    """Print the figures of metrics: accuracy 97.12%. of: what stands before each, such as test."""
    return "  ".join(f"{of} {m.name} {figures[m.name]:{m.form}}".lstrip() for m in metrics)


def shortly_described(metrics: Sequence[Metric], figures: Mapping[str, float]) -> str:
    """Print the figures of metrics where there is little room: acc 97.1%."""
    return " ".join(f"{m.short_name or m.name} {figures[m.name]:{m.short_form}}" for m in metrics)
