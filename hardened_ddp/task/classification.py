"""Classification: each sample has one label, the index of a class.

Owns the meaning of the model's output: logits that are compared with the labels, or a loss that the
model computes itself; and the loss as a sum over samples. No other layer knows classes or accuracy.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hardened_ddp.errors import ModelError
from hardened_ddp.task.confusion import ConfusionMatrix
from hardened_ddp.task.task import Metric, Mistake, Score


class Classification:
    """Calls the model with the arguments that its forward takes, and scores its output."""

    metrics = (Metric("accuracy", form=".2%", short_name="acc", short_form=".1%"),)
    sums: Mapping[str, torch.dtype] = {"correct": torch.int64}

    def __init__(
        self,
        model: nn.Module,
        *,
        num_classes: int,
        class_names: Sequence[str] = (),
        label_smoothing: float = 0.0,
    ) -> None:
        self.takes_labels = "labels" in inspect.signature(model.forward).parameters
        self.num_classes = num_classes
        self.class_names = class_names
        self.label_smoothing = label_smoothing

    def score(
        self,
        call: Callable[..., Any],
        inputs: Any,  # a tensor, or what the dataset nests tensors in
        targets: torch.Tensor,
        *,
        checks: bool = False,
    ) -> Score:
        """Run call on inputs and compare its logits with targets, (num_samples,) int64. Rank-local.

        checks: first check that both fit the number of classes. This waits for the device.
        Raises ModelError if the output is neither logits nor {"loss", "logits"}, or does not fit.
        """
        labels = {"labels": targets} if self.takes_labels else {}
        named = isinstance(inputs, Mapping)
        output = call(**inputs, **labels) if named else call(inputs, **labels)
        is_plain = isinstance(output, torch.Tensor)
        logits, mean_loss = (output, None) if is_plain else _split_output(output)
        if checks:
            # WHY before the loss: a wrong label raises there; on a GPU it ends the CUDA context.
            _check_fit(logits, targets, num_classes=self.num_classes)
        num_samples = targets.shape[0]
        if mean_loss is None:
            # WHY float(): under autocast logits are bf16, and a sum over a batch needs fp32.
            loss_sum = cross_entropy(
                logits.float(), targets, reduction="sum", label_smoothing=self.label_smoothing
            )
        else:
            loss_sum = (
                mean_loss.float() * num_samples
            )  # a model's own loss is a mean, by convention
        predictions = logits.detach().argmax(dim=1)
        correct = predictions.eq(targets).sum()
        return Score(loss_sum, num_samples, {"correct": correct}, predictions)

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Return the accuracy: the share of samples whose largest logit is that of their label."""
        return {"accuracy": sums["correct"] / count}

    def mistakes(
        self, score: Score, inputs: torch.Tensor, targets: torch.Tensor, *, most: int
    ) -> list[Mistake]:
        """Return the first misclassified samples. Waits for the device."""
        wrong = score.predictions.ne(targets).nonzero().flatten()[:most].tolist()
        return [
            Mistake(
                inputs[i].cpu(),
                f"true {self._name(int(targets[i]))}, said {self._name(int(score.predictions[i]))}",
            )
            for i in wrong
        ]

    def table(self, device: torch.device) -> ConfusionMatrix:
        """Return an empty confusion matrix."""
        return ConfusionMatrix(self.num_classes, names=self.class_names, device=device)

    def _name(self, label: int) -> str:
        """Return the name of a class; a model may have more outputs than there are names."""
        return self.class_names[label] if label < len(self.class_names) else str(label)


def _split_output(output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits and the model's own loss, if any, from an output that is not a tensor."""
    if isinstance(output, Mapping) and isinstance(output.get("logits"), torch.Tensor):
        return output["logits"], output.get("loss")
    raise ModelError(
        f"the model returned {_described(output)}; need logits, or a mapping with 'logits' "
        "and 'loss'",
        fix="return a tensor of shape (num_samples, num_classes) from forward",
    )


def _check_fit(logits: torch.Tensor, targets: torch.Tensor, *, num_classes: int) -> None:
    """Raise ModelError if logits or labels do not fit the number of classes."""
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


def _described(output: object) -> str:
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with {sorted(map(str, output))}"
    return f"a {type(output).__name__}"
