"""The first forward of a model: what it must show before the probe can score an output.

Lazy modules, such as LazyLinear, get the shapes of their parameters; where a model is built again,
by the weights of a checkpoint. And with --task auto the output says which task fits the labels.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.sources.datasets import TaskData
from hardened_ddp.errors import ModelError
from hardened_ddp.model.effects import Effects
from hardened_ddp.model.precision import Precision
from hardened_ddp.preflight.trial import Refusal, Trial, fix_by, try_on_all_ranks
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.seeding import seed_update
from hardened_ddp.settings.config import TaskConfig
from hardened_ddp.task.build import CHOICES, build_task, task_that_fits
from hardened_ddp.task.first_batch import refuse_late_buffers, saved_shapes
from hardened_ddp.task.task import Task

log = logging.getLogger(__name__)

Lazy = UninitializedParameter | UninitializedBuffer


def shape_by_forward(model: nn.Module, sample: Batch, group: Group, *, seed: int) -> None:
    """Give parameters without a shape theirs, by a forward on sample. Collective: all ranks.

    Raises ModelError on all ranks if that fails on one. The model is then on the group's device.
    """
    if not any(_lazy_tensors(model)):  # the same on all ranks
        return
    model.to(group.device)
    caller = Task()
    caller.attach(model)

    def run(batch: Batch, effects: Effects) -> None:
        # WHY: how many random numbers were drawn so far depends on the launch.
        seed_update(seed, step=0, device_type=group.device.type)
        with torch.no_grad():
            caller.forward(model, batch)
        if left := [name for name, _ in _lazy_tensors(model)]:
            raise ModelError(
                f"lazy parameters have no shape after a forward: {', '.join(left[:8])}",
                fix="call their modules in forward, also in eval mode; or build them with sizes, "
                "such as nn.Linear instead of nn.LazyLinear",
            )

    _try_first(caller, model, sample, run, group)  # collective


def choose_task(
    model: nn.Module,
    sample: Batch,
    data: TaskData,
    config: TaskConfig,
    group: Group,
    *,
    saved: Mapping[str, Any] | None = None,  # Any: the numbers of a checkpoint
) -> Task:
    """Return the task of a run: as asked, as it began, or as fits the first batch.

    Collective: all ranks. Raises ModelError or ConfigError on all ranks alike.
    """
    began_with = (saved or {}).get("task", {})
    name = config.task
    if name == "auto":
        name = began_with.get("name") or _fitting_name(model, sample, group)  # collective
    task = build_task(name, model, data, config)
    task.take_over(began_with.get("learned", {}))
    return task


def _fitting_name(model: nn.Module, sample: Batch, group: Group) -> str:
    """Return the name of the task that fits the first batches of all ranks. Collective."""
    caller, shapes = Task(), saved_shapes(model)
    caller.attach(model)

    def run(batch: Batch, effects: Effects) -> tuple[str, str, str]:
        with torch.no_grad():
            output = caller.forward(model, batch)
        refuse_late_buffers(model, shapes)
        try:
            return *task_that_fits(output, batch), ""
        except ModelError as error:  # WHY no failure: the batch of another rank may say more
            return "", error.message, error.fix

    everyone = _try_first(caller, model, sample, run, group)  # collective
    reasons: dict[str, str] = {name: why for name, why, _ in everyone[::-1] if name}
    if not reasons:
        raise ModelError(f"rank 0: {everyone[0][1]}", fix=everyone[0][2])
    if len(reasons) > 1:
        raise ModelError(
            "--task auto can't decide: the first batches of the ranks fit "
            f"{' and '.join(sorted(reasons))}",
            fix=f"choose one: --task {' | '.join(CHOICES)}",
        )
    [(name, why)] = reasons.items()
    log.info("task: %s, because of the first batch: %s", name, why)
    return name


def _try_first(
    caller: Task, model: nn.Module, sample: Batch, work: Callable[..., Any], group: Group
) -> list[Any]:
    """Do work with the sample in evaluation mode; return each rank's outcome. Collective."""
    trial = Trial(model, caller, Precision("off", group.device), group)
    refusal = Refusal(what="the model failed on a first batch", fix=fix_by(sample))
    found = try_on_all_ranks(trial, [sample], work, refusal, evaluates=True)  # collective
    return [outcomes[0] for outcomes in found if outcomes]


def shape_by_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give parameters without a shape that of the weights of the same name. Rank-local."""
    for name, tensor in list(_lazy_tensors(model)):
        # WHY a shape for those that have no weights: then the comparison of both names them
        tensor.materialize(weights[name].shape if name in weights else (0,))


def _lazy_tensors(model: nn.Module) -> Iterator[tuple[str, Lazy]]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return ((name, tensor) for name, tensor in named if is_lazy(tensor))
