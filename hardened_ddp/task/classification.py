"""What a model's output means: logits to compare with labels, or a loss of its own.

Owns the loss as a SUM over samples. WHY a sum: divided once by the number of samples of the whole
window, it gives the gradient of one big batch, however ranks and micro-batches share the window.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hardened_ddp.errors import ModelError


@dataclass(slots=True)
class Scored:
    """The outcome of one forward."""

    loss_sum: torch.Tensor
    """Scalar: loss summed over the samples."""

    logits: torch.Tensor
    """(num_samples, num_classes)."""


class Objective:
    """Calls the model as it wants to be called, and scores what it returns."""

    def __init__(self, model: nn.Module, *, label_smoothing: float = 0.0) -> None:
        self.takes_labels = "labels" in inspect.signature(model.forward).parameters
        self.label_smoothing = label_smoothing

    def __call__(
        self, call: Callable[..., Any], inputs: Any, targets: torch.Tensor
    ) -> Scored:  # Any: a tensor, or what the dataset nests tensors in
        """Run call on inputs and score it against targets, (num_samples,) int64. Rank-local.

        Raises ModelError if the output is neither logits nor {"loss", "logits"}.
        """
        return self.score(*self.run(call, inputs, targets), targets)

    def run(
        self, call: Callable[..., Any], inputs: Any, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run call on inputs; return logits, and the model's own mean loss if it gives one."""
        labels = {"labels": targets} if self.takes_labels else {}
        named = isinstance(inputs, Mapping)
        output = call(**inputs, **labels) if named else call(inputs, **labels)
        if isinstance(output, torch.Tensor):
            return output, None
        if isinstance(output, Mapping) and isinstance(output.get("logits"), torch.Tensor):
            return output["logits"], output.get("loss")
        raise ModelError(
            f"the model returned {_describe(output)}; need logits, or a mapping with 'logits' "
            "and 'loss'",
            fix="return a tensor of shape (num_samples, num_classes) from forward",
        )

    def score(
        self, logits: torch.Tensor, loss: torch.Tensor | None, targets: torch.Tensor
    ) -> Scored:
        """Make the summed loss."""
        if loss is not None:
            # A model's own loss is a mean by custom.
            return Scored(loss.float() * targets.shape[0], logits)
        # WHY float(): under autocast logits are bf16, and a sum over a batch needs fp32.
        loss_sum = cross_entropy(
            logits.float(), targets, reduction="sum", label_smoothing=self.label_smoothing
        )
        return Scored(loss_sum, logits)


def check_fit(logits: torch.Tensor, targets: torch.Tensor, *, num_classes: int) -> None:
    """Raise ModelError if logits or labels do not fit the number of classes. Costs a sync."""
    shape = tuple(logits.shape)
    if len(shape) != 2 or shape[0] != targets.shape[0] or shape[1] < num_classes:
        raise ModelError(
            f"the model gives logits of shape {shape} for {targets.shape[0]} samples and "
            f"{num_classes} classes; need ({targets.shape[0]}, {num_classes})",
            fix="give the model's last layer one output for each class",
        )
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= shape[1]:
        raise ModelError(
            f"labels run from {low} to {high}, but the model knows classes 0 to {shape[1] - 1}",
            fix="number the classes from 0, or give the model more outputs",
        )


def _describe(output: object) -> str:
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with {sorted(map(str, output))}"
    return f"a {type(output).__name__}"
