"""The task of a run: how the model is called, and the loss and metrics of its output.

Owns the interface between training and the task; nothing in it is specific to one task. Training
adds up scores, divides the gradient by their count, and prints the metrics that the task names;
only the task knows what the labels are.
WHY sums: the loss divided once by the count of the whole step gives the gradient of one big batch,
however ranks and micro-batches share the step; and metrics are the same on any number of ranks.
Read next: classification.py, the task that is built in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class Score:
    """Loss, metrics and predictions of one forward."""

    loss_sum: torch.Tensor
    """Scalar with its graph: the loss, summed over the samples (see count)."""

    count: int
    """The number of samples: the mean loss is loss_sum / count."""

    metrics: Mapping[str, torch.Tensor]
    """Scalars on the device, one for each name in the task's sums."""

    predictions: torch.Tensor
    """The prediction for each sample, detached, in a form that the task chooses."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number besides the loss that measures the model."""

    name: str
    form: str = ".4f"
    """Its format specification for printing."""

    short_name: str = ""
    short_form: str = ".3g"
    """The same for the progress bar, where space is short."""

    is_higher_better: bool = True

    def is_better(self, value: float, than: float) -> bool:
        """Return whether value is better than `than`. Equal is not better."""
        return value > than if self.is_higher_better else value < than


@dataclass(frozen=True, slots=True)
class Mistake:
    """A test sample that the model got wrong, for the report."""

    image: torch.Tensor
    """The input, on the CPU; it is shown as a picture if it has the shape of one."""

    caption: str


class Table(Protocol):
    """What the command evaluate reports for a task besides its metrics."""

    @property
    def sums(self) -> torch.Tensor:
        """The counts, of the same shape on all ranks: they are all-reduced in place."""

    def add(self, score: Score, targets: torch.Tensor) -> None:
        """Add one forward."""

    def report(self) -> dict[str, Any]:  # Any: JSON
        """Return the entries for the report file."""

    def lines(self, report: Mapping[str, Any]) -> list[str]:  # Any: JSON
        """Format the result of report as lines of text."""


class Task(Protocol):
    """What training and evaluation need of a task."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """What is reported besides the loss. The first one decides which checkpoint is best."""

    @property
    def sums(self) -> Mapping[str, torch.dtype]:
        """Names of the sums in Score.metrics, and the dtype in which each is added up."""

    def score(
        self,
        call: Callable[..., Any],
        inputs: Any,  # a tensor, or what the dataset nests tensors in
        targets: torch.Tensor,
        *,
        checks: bool = False,
    ) -> Score:
        """Run call, which is the model, on inputs, and compare its output with targets. Rank-local.

        checks: first check that output and targets fit each other. This waits for the device.
        Raises ModelError.
        """

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Return the value of each metric, by name, from the sums over all samples."""

    def mistakes(
        self, score: Score, inputs: torch.Tensor, targets: torch.Tensor, *, most: int
    ) -> list[Mistake]:
        """Return the first samples that the model got wrong, at most `most` of them."""

    def table(self, device: torch.device) -> Table | None:
        """Return an empty table for the command evaluate; None if the task has none."""


def described(metrics: Sequence[Metric], figures: Mapping[str, float], *, of: str = "") -> str:
    """Format the figures of metrics: accuracy 97.12%. of: a prefix for each, such as test."""
    return "  ".join(f"{of} {m.name} {figures[m.name]:{m.form}}".lstrip() for m in metrics)


def shortly_described(metrics: Sequence[Metric], figures: Mapping[str, float]) -> str:
    """Format the figures of metrics in their short form: acc 97.1%."""
    return " ".join(f"{m.short_name or m.name} {figures[m.name]:{m.short_form}}" for m in metrics)
