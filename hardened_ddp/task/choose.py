"""--task auto: the task that fits the labels and the output of the first batch.

Owns the decision, and its reason for the log. Where labels fit two tasks, or none, it refuses: a
wrong guess would train, and train wrongly.
"""

from typing import Any

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.errors import ModelError
from hardened_ddp.settings.config import TASKS
from hardened_ddp.task.output import (
    are_one_hot,
    are_shares,
    described,
    described_labels,
    refuse_several_losses,
    split_output,
)

CHOICES = TASKS[1:]


def task_that_fits(output: Any, batch: Batch) -> tuple[str, str]:  # Any: whatever a model returned
    """Return the name of the task that fits output and batch.targets, and why.

    Raises ModelError with the choices if none does, or more than one.
    """
    refuse_several_losses(output)
    logits, loss = split_output(output)
    labels = batch.targets
    if logits is None and loss is not None:
        return "own", "the model returns its loss and no logits"
    if not isinstance(labels, torch.Tensor):
        if loss is not None:
            return "own", "the model returns its loss, and the labels are not a tensor"
        raise _undecided(
            f"the labels are {described_labels(labels)}, not a tensor, and the model returns no "
            "loss",
            output,
        )
    if logits is None:
        raise _undecided("the model returns neither logits nor a loss", output)
    shapes = f"labels {described_labels(labels)}, output {tuple(logits.shape)}"
    name = _by_shape(logits, labels)
    if name == "multilabel" and are_one_hot(labels):
        return name, f"{shapes}. One-hot labels? For classes return int(label.argmax()) as label"
    if name:
        return name, shapes
    if loss is not None:
        return "own", f"the model returns its loss, and no other task fits: {shapes}"
    raise _undecided(
        f"{shapes}: they fit {_fits(logits, labels)}", output, fix=_fix_of(logits, labels)
    )


def _by_shape(logits: torch.Tensor, labels: torch.Tensor) -> str:
    """Return the one task that fits; empty if none does, or more than one."""
    if not labels.is_floating_point() and labels.dtype != torch.bool:
        if labels.dim() == 1 and logits.dim() == 2 and logits.shape[1] > 1:
            return "classification"
        if labels.dim() == 2 and logits.dim() == 3 and logits.shape[:2] == labels.shape:
            return "tokens"
        if labels.dim() in (3, 4) and logits.dim() == labels.dim() + 1:
            is_map = logits.shape[0] == labels.shape[0] and logits.shape[2:] == labels.shape[1:]
            return "segmentation" if is_map else ""
    is_binary = bool(((labels == 0) | (labels == 1)).all())
    is_table = labels.dim() == 2 and labels.shape == logits.shape and labels.shape[1] > 1
    if is_table and is_binary and bool(labels.any()) and not bool(labels.all()):
        return "multilabel"
    if not labels.is_floating_point():
        return ""
    is_alike = logits.numel() == labels.numel() and len(logits) == len(labels)
    return "regression" if is_alike and not is_binary and not are_shares(labels) else ""


def _fits(logits: torch.Tensor, labels: torch.Tensor) -> str:
    if labels.numel() == logits.numel() and bool(((labels == 0) | (labels == 1)).all()):
        return "multilabel and regression alike"
    if labels.shape == logits.shape and are_shares(labels):
        return "regression, and probabilities of classes (each row adds up to 1) alike"
    return "no task"


def _fix_of(logits: torch.Tensor, labels: torch.Tensor) -> str:
    """Say what to do about labels that are probabilities, or an output in another order."""
    if labels.shape == logits.shape and are_shares(labels):
        return (
            "for numbers: --task regression; for probabilities: --task package.module:Class, whose "
            "score() has cross_entropy(logits, labels), see docs/TASKS.md"
        )
    if labels.is_floating_point() or logits.dim() != labels.dim() + 1:
        return ""
    if labels.dim() == 2 and (logits.shape[0], logits.shape[2]) == tuple(labels.shape):
        return "--task tokens needs the vocabulary last: return logits.transpose(1, 2)"
    if labels.dim() == 3 and logits.shape[:3] == labels.shape:
        return "--task segmentation needs the classes second: return logits.permute(0, 3, 1, 2)"
    return ""


def _undecided(why: str, output: Any, *, fix: str = "") -> ModelError:
    return ModelError(
        f"--task auto can't decide: {why} (the model returned {described(output)})",
        fix=fix or f"choose one: --task {' | '.join(CHOICES)} | package.module:Class",
    )
