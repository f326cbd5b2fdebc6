"""The first forward of a model: with --task auto its output says which task fits the labels."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.sources.datasets import TaskData
from hardened_ddp.errors import ModelError
from hardened_ddp.model.effects import Effects
from hardened_ddp.model.precision import Precision
from hardened_ddp.preflight.trial import Refusal, Trial, fix_by, try_on_all_ranks
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.config import TaskConfig
from hardened_ddp.task.build import CHOICES, build_task, task_that_fits
from hardened_ddp.task.first_batch import refuse_late_buffers, saved_shapes
from hardened_ddp.task.task import Task

log = logging.getLogger(__name__)


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

    trial = Trial(model, caller, Precision("off", group.device), group)
    refusal = Refusal(what="the model failed on a first batch", fix=fix_by(sample))
    found = try_on_all_ranks(trial, [sample], run, refusal, evaluates=True)  # collective
    everyone = [outcomes[0] for outcomes in found if outcomes]
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
