"""The task of a run: how the model is called, and the loss and metrics of its output.

Training adds up scores, divides the gradient by their count, and prints the metrics that the task
names; only the task knows what the labels are.
WHY sums: the loss divided once by the count of the whole step gives the gradient of one big batch,
however ranks and micro-batches share the step; and metrics are the same on any number of ranks.
Read next: classification.py, the simplest task; tokens.py, one whose count is not the samples.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch

if TYPE_CHECKING:
    from hardened_ddp.task.own_metrics import OwnMetrics

LABEL_PARAMETERS = ("labels", "targets")  # what a model's forward calls the labels
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Figures = dict[str, float]

LOSS = "loss"  # the name of the loss among the figures: the mean over what the task counts


@dataclass(slots=True)
class Score:
    """Loss and metrics of one forward."""

    loss_sum: torch.Tensor  # scalar with its graph: the loss, summed over what count counts

    # What the loss is a mean over: samples, valid tokens, pixels. loss_sum / count is the mean.
    count: int | torch.Tensor

    # For each name in the task's sums one tensor of that shape. In a task of your own: for each of
    # its metrics a sum, which is divided by count, or a pair (sum, what it is divided by).
    metrics: Mapping[str, Any] = field(default_factory=dict)  # Any: a sum, or (sum, count)


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that measures the model."""

    name: str
    form: str = ".4f"  # its format specification for printing
    is_higher_better: bool = True

    def is_better(self, value: float, than: float) -> bool:
        """Return whether value is at least as good as `than`: of two equal ones, the newer."""
        return value >= than if self.is_higher_better else value <= than

    def record(self, value: float) -> dict[str, Any]:
        """Return what best.json says of a checkpoint with this value."""
        direction = "higher is better" if self.is_higher_better else "lower is better"
        return {"metric": self.name, "value": value, "direction": direction}


LOSS_METRIC = Metric(LOSS, is_higher_better=False)


class Task:
    """What training and evaluation need of a task. Your own defines score: see docs/TASKS.md."""

    name = ""  # as --task names it; never auto

    # What is reported besides the loss. The first one decides which checkpoint is best.
    metrics: Sequence[Metric] = ()

    # Every sample counts as exactly one in Score.count. Then the number of the whole step is known
    # before backward; else it is summed over the ranks together with the gradients.
    counts_samples = False
    in_detail = False  # the sums have what report() needs, too: in the command evaluate

    # Attributes that check sets on the first batch, as JSON; None: not known yet.
    learns: Sequence[str] = ()
    own: "OwnMetrics | None" = None  # metrics of the test set that the user brings
    labels_name = ""  # the parameter of the model's forward for the labels; empty: it gets none
    spreads = False  # inputs in a tuple are several arguments of forward, not one

    def attach(self, model: nn.Module, name: str = "", own: "OwnMetrics | None" = None) -> None:
        """Learn how model is called, from the signature of its forward; its name and metrics."""
        self.name, self.own = name, own
        taken = inspect.signature(model.forward).parameters
        self.labels_name = next((label for label in LABEL_PARAMETERS if label in taken), "")
        others = [p for p in taken.values() if p.name not in LABEL_PARAMETERS]
        needed = [p for p in others if p.default is p.empty and p.kind in _BY_PLACE]
        self.spreads = len(needed) > 1

    def forward(self, call: Callable[..., Any], batch: Batch) -> Any:
        """Run call, which is the model, on the inputs of a batch; return its output. Rank-local.

        Inputs in a mapping go to forward by name; labels too, if it has a parameter for them.
        """
        inputs, labels = batch.inputs, {}
        if self.labels_name and batch.targets is not None:
            labels[self.labels_name] = batch.targets
        if isinstance(inputs, Mapping):
            return call(**inputs, **labels)
        if self.spreads and isinstance(inputs, tuple | list):
            return call(*inputs, **labels)
        return call(inputs, **labels)

    def score(self, output: Any, batch: Batch) -> Score:
        """Compare the output with batch.targets. Rank-local. Raises ModelError."""
        raise NotImplementedError(f"{type(self).__name__} must define score(output, batch)")

    def check(self, output: Any, batch: Batch) -> None:
        """Raise ModelError if output and targets don't fit each other. Waits for the device."""

    @property
    def test_metrics(self) -> Sequence[Metric]:
        """What is reported of the test set besides the loss."""
        return (*self.metrics, *(self.own.metrics if self.own is not None else ()))

    def learned(self) -> dict[str, Any]:
        """Return what check found out on the first batch, as JSON: the same for all ranks."""
        found = {name: getattr(self, name) for name in self.learns}
        return {name: value for name, value in found.items() if value is not None}

    def take_over(self, learned: Mapping[str, Any]) -> None:
        """Use what another rank, or an earlier start of the run, has learned."""
        for name in self.learns:
            setattr(self, name, learned.get(name, getattr(self, name)))

    @property
    def sums(self) -> Mapping[str, torch.Tensor]:
        """The sums in Score.metrics by name: for each a zero of its dtype and shape, on the CPU."""
        names = [name for metric in self.metrics for name in (metric.name, f"{metric.name}/count")]
        return {name: torch.zeros((), dtype=torch.float64) for name in names}

    def sums_of(self, score: Score) -> Mapping[str, Any]:  # Any: tensors or numbers
        """Return what score adds to each of the sums."""
        if type(self).sums is not Task.sums:  # a task with sums of its own names them in its scores
            return score.metrics
        found: dict[str, Any] = {}
        for metric in self.metrics:
            value = score.metrics[metric.name]
            total, count = value if isinstance(value, tuple | list) else (value, score.count)
            found |= {metric.name: total, f"{metric.name}/count": count}
        return found

    def figures(self, sums: Mapping[str, Any], count: float) -> Figures:  # Any: numbers, lists
        """Return the value of each metric, by name, from the sums over all samples.

        sums: numbers, or nested lists of those with a shape; with the sum of the losses as "loss".
        """
        pairs = {m.name: (sums[m.name], sums[f"{m.name}/count"]) for m in self.metrics}
        return {name: total / max(1e-300, count) for name, (total, count) in pairs.items()}

    def report(self, sums: Mapping[str, Any], count: float) -> dict[str, Any]:  # Any: JSON
        """Return what the command evaluate reports besides the metrics: under "rows" a table.

        sums, count: as for figures; in_detail was true when they were added up.
        """
        return {}


def shares_of(hit: float, *, predicted: float, labelled: float) -> dict[str, float | None]:
    """Return precision, recall and F1 of one class from its counts; None where the divisor is 0."""
    return {
        "precision": hit / predicted if predicted else None,
        "recall": hit / labelled if labelled else None,
        "f1": 2 * hit / (predicted + labelled) if predicted + labelled else None,
    }


def name_of(index: int, names: Sequence[str]) -> str:
    """Return the name of a class; a model may have more outputs than there are names."""
    return names[index] if index < len(names) else str(index)


def with_loss(loss: float, metrics: str = "") -> str:
    """Format a loss and what comes behind it."""
    return f"loss {number_text(loss)}  {metrics}".rstrip()


def number_text(value: float) -> str:
    """Format a number with four decimals, or with an exponent if it is very small or large."""
    is_plain = value == 0 or 1e-3 <= abs(value) < 1e6
    return f"{value:{'.4f' if is_plain else '.4g'}}"


def described(metrics: Sequence[Metric], figures: Mapping[str, float], *, of: str = "") -> str:
    """Format the figures of metrics: accuracy 97.12%. of: a prefix for each, such as test."""
    known = [metric for metric in metrics if metric.name in figures]
    return "  ".join(f"{of} {m.name} {figures[m.name]:{m.form}}".lstrip() for m in known)


def widened(logits: torch.Tensor, *, softmax: bool = False) -> torch.Tensor:
    """Return logits for a loss. WHY: under autocast they are bf16, and a sum needs fp32.

    softmax: the loss is cross_entropy. WHY not widened in each case: under autocast, CUDA's
    log_softmax reads bf16 and gives fp32 by itself, with the same numbers. Of a vocabulary that
    saves a copy as large as the loss.
    """
    is_ready = softmax and logits.is_cuda and torch.is_autocast_enabled("cuda")
    return logits if is_ready or logits.dtype == torch.float64 else logits.float()
