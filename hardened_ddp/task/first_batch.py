"""What a first batch must show: a score that can be added up, and a state that can be saved.

It reads values, so it waits for the device: the trials before training call it, no step does.
Does not own: finding what a forward changes (model/effects.py).
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hardened_ddp.errors import ModelError
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.task.output import described
from hardened_ddp.task.task import Score, Task

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


def check_score(task: Task, score: Any) -> Score:  # Any: whatever a user's task returned
    """Return score, or raise ModelError if it can't be added up or has no gradient."""
    name = type(task).__name__
    if not isinstance(score, Score):
        raise ModelError(
            f"task {name}: score() returned a {type(score).__name__}, not a Score",
            fix="return Score(loss_sum, count, metrics)",
        )
    _check_loss(name, score.loss_sum)
    _check_count(name, score.count)
    missing = [metric.name for metric in task.metrics if metric.name not in score.metrics]
    has_own_sums = (type(task).sums, type(task).sums_of) != (Task.sums, Task.sums_of)
    if missing and not has_own_sums:
        raise ModelError(
            f"task {name}: score() did not return {', '.join(missing)}",
            fix="give each of its metrics in Score.metrics: a sum, or (sum, count)",
        )
    wanted = task.sums
    for metric, value in task.sums_of(score).items():
        _check_sum(name, metric, value, wanted.get(metric))
    return score


def saved_shapes(module: nn.Module) -> Shapes:
    """Return the shape of each tensor that a checkpoint saves."""
    state = module.state_dict().items()
    return {name: tuple(part.shape) for name, part in state if isinstance(part, torch.Tensor)}


def refuse_late_buffers(module: nn.Module, before: Shapes) -> None:
    """Raise ModelError if a forward made a saved buffer, or changed its shape. Rank-local.

    before: the shapes before it. WHY: it would not be made equal on the ranks, and the model as it
    is built again, to resume or evaluate, could not take what was saved.
    """
    after = saved_shapes(module).items()
    if found := [name for name, shape in after if before.get(name) != shape]:
        raise ModelError(
            f"a forward made or resized what a checkpoint saves: {', '.join(found[:8])}",
            fix="give buffers their final shape in the constructor, or run one batch through the "
            "model there, as the observers of quantization need; persistent=False for a cache",
        )


def warn_of_unsaved(own: Sequence[str]) -> None:
    """Name the tensors that forward makes and reads again. Rank-local: the same on all ranks."""
    if own:
        log.warning(
            "forward makes tensors, or changes their shape, that it reads in the next one: %s. No "
            "checkpoint saves them, and each rank has its own: after a resume the model begins "
            "without them. In their final shape from the constructor on, they are saved",
            ", ".join(own[:8]),
            extra=ON_EVERY_RANK,
        )


def _check_loss(name: str, loss: Any) -> None:  # Any: as above
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise ModelError(
            f"task {name}: loss_sum is not a scalar tensor but {described(loss)}",
            fix="return the sum of the losses: losses.sum()",
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ModelError(
            f"task {name}: loss_sum does not depend on any parameter that is trained",
            fix="compute it from the model's output, without detach(), item() or no_grad()",
        )


def _check_count(name: str, count: Any) -> None:  # Any: as above
    is_tensor = isinstance(count, torch.Tensor) and count.dim() == 0
    is_number = isinstance(count, int | float) and not isinstance(count, bool)
    if not (is_tensor or is_number) or not 0 <= float(count) < float("inf"):
        what = f"{float(count):g}" if is_tensor or is_number else described(count)
        raise ModelError(
            f"task {name}: count is {what}, not a number from 0",
            fix="return what the loss is a mean over, such as batch.num_samples",
        )


def _check_sum(name: str, metric: str, value: Any, wanted: torch.Tensor | None) -> None:
    """Check one of the sums of a score. Any: as above; wanted: a zero of its shape."""
    metric = metric.removesuffix("/count")
    if wanted is None:
        raise ModelError(
            f"task {name}: sums_of() gives {metric}, which is not among its sums",
            fix="name it in the property sums, with a zero of its dtype and shape",
        )
    is_number = isinstance(value, torch.Tensor | int | float)
    if not is_number or torch.as_tensor(value).shape != wanted.shape:
        need = "a number" if wanted.dim() == 0 else f"a tensor of shape {tuple(wanted.shape)}"
        raise ModelError(
            f"task {name}: its metric {metric} is {described(value)}, not {need}",
            fix="give the sum over the samples of the batch, such as errors.sum()",
        )
