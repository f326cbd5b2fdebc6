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
    if not isinstance(score, Score):
        raise _wrong(task, f"score() returned a {type(score).__name__}, not a Score")
    loss, count, wanted = score.loss_sum, score.count, task.sums
    if not _is_scalar(loss) or not isinstance(loss, torch.Tensor):
        raise _wrong(task, f"loss_sum is not a scalar tensor but {described(loss)}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise _wrong(task, "loss_sum does not depend on any parameter that is trained")
    if not _is_scalar(count) or not 0 <= float(count) < float("inf"):
        found = f"{float(count):g}" if _is_scalar(count) else described(count)
        raise _wrong(task, f"count is {found}, not a number from 0")
    missing = [metric.name for metric in task.metrics if metric.name not in score.metrics]
    has_own_sums = (type(task).sums, type(task).sums_of) != (Task.sums, Task.sums_of)
    if missing and not has_own_sums:
        raise _wrong(task, f"score() did not return {', '.join(missing)}")
    for metric, value in task.sums_of(score).items():
        name = metric.removesuffix("/count")
        if metric not in wanted:
            raise _wrong(task, f"sums_of() gives {name}, which is not among its sums")
        shape = wanted[metric].shape
        is_number = isinstance(value, torch.Tensor | int | float)
        if not is_number or torch.as_tensor(value).shape != shape:
            need = f"a tensor of shape {tuple(shape)}" if shape else "a number"
            raise _wrong(task, f"its metric {name} is {described(value)}, not {need}")
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


def _wrong(task: Task, found: str) -> ModelError:
    return ModelError(
        f"task {type(task).__name__}: {found}",
        fix="return Score(losses.sum(), batch.num_samples, metrics): the sum of the losses, with "
        "its graph; what it is a mean over; of each metric the sum, or (sum, count): docs/TASKS.md",
    )


def _is_scalar(value: Any) -> bool:  # Any: as above
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)
