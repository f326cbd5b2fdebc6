"""The trial of a user's optimizer and schedule, before the first step: can they be resumed?

Owns the question whether a run that is saved and loaded goes on with the same updates, bit for bit.
Stand-ins for a few parameters are updated some times; the state is saved and loaded into a second
optimizer; both go on, and must stay equal. That finds what a class keeps outside of its state, a
step that needs a closure, and values that can't be saved.
What goes wrong here: the user's class raises. Its text and line are in the OptimizerError.
Does not own: saving (model/optimizer_state.py). torch's adamw, adam and sgd are not tried.
"""

import json
import logging
import traceback
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import Parameter

from hardened_ddp.checkpoint.tensors import plan_file
from hardened_ddp.data.batches.fetch import preserved_rng
from hardened_ddp.data.foreign_code import describe
from hardened_ddp.errors import ANY_FAILURE, CheckpointError, HardenedError, OptimizerError
from hardened_ddp.model.optimizer import build_optimizer, described
from hardened_ddp.model.optimizer_state import is_known, restore_state, save_state
from hardened_ddp.model.parameter_groups import Group, parameter_groups
from hardened_ddp.model.schedule import Schedule
from hardened_ddp.ranks.seeding import seed_update
from hardened_ddp.settings.config import OptimizerConfig

log = logging.getLogger(__name__)

_STEPS_BEFORE, _STEPS_AFTER = 3, 2
_PER_GROUP = 2  # stand-ins of each group: the smallest parameters, of different dimensions


def build_schedule(
    model: nn.Module, task: object, config: OptimizerConfig, *, total_steps: int
) -> Schedule:
    """Build the optimizer of a model and its learning rate; try them if they are the user's.

    Rank-local. The optimizer is schedule.optimizer. Raises OptimizerError.
    """
    groups = parameter_groups(model, config, task=task)
    optimizer = build_optimizer(groups, config)
    schedule = Schedule(optimizer, config, total_steps=total_steps)
    try_optimizer(schedule, groups)
    for line in (described(optimizer, config), schedule.described):
        if line:
            log.info("%s", line)
    return schedule


def try_optimizer(schedule: Schedule, groups: Sequence[Group]) -> None:
    """Try the optimizer and schedule of a run on stand-ins. Rank-local. Raises OptimizerError.

    groups: what the optimizer was built with. The run's own optimizer, parameters and random
    numbers do not change.
    """
    if is_known(schedule.optimizer) and not schedule.has_state:
        return
    config = schedule.config
    try:
        with preserved_rng():
            _try([_stand_ins(group) for group in groups], config, schedule.total_steps)
    except HardenedError:
        raise
    except ANY_FAILURE as error:  # WHY broad: the user's code
        log.debug("the trial of the optimizer failed", exc_info=True)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise OptimizerError(
            f"{_names(config)} failed in a trial of some steps: {describe(error)} "
            f"({frame.filename}:{frame.lineno})",
            fix="it must work with a plain step(), and give its state by state_dict(); an "
            "optimizer that needs the loss again, in a closure, can't be used",
        ) from error


def _try(groups: Sequence[Group], config: OptimizerConfig, total_steps: int) -> None:
    first = _Trial(groups, config, total_steps)
    num_before = min(_STEPS_BEFORE, max(0, total_steps - _STEPS_AFTER))
    for step in range(num_before):
        first.do(step)
    copies = [
        {**group, "params": [Parameter(p.detach().clone()) for p in group["params"]]}
        for group in groups
    ]
    second = _Trial(copies, config, total_steps)
    tensors, rest = save_state(first.schedule, first.names)
    try:
        plan_file(tensors)
    except CheckpointError as error:
        raise OptimizerError(
            f"the state of {_names(config)} can't be saved: {error.message}", fix=error.fix
        ) from error
    copied = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    restore_state(second.schedule, second.names, copied, json.loads(json.dumps(rest)))
    for step in range(num_before, min(total_steps, num_before + _STEPS_AFTER)):
        first.do(step)
        second.do(step)
    differing = [n for n, p in first.names.items() if not _are_equal(p, second.names[n])]
    if differing:
        raise OptimizerError(
            f"{_names(config)}: after its state was saved and loaded, its next "
            "updates differ: it keeps something outside of its state",
            fix="keep all that changes in self.state[parameter] or in a parameter group, or "
            "return it from state_dict(); of a schedule, in its attributes",
        )


class _Trial:
    """One optimizer over stand-ins, with its schedule."""

    def __init__(self, groups: Sequence[Group], config: OptimizerConfig, total_steps: int) -> None:
        members = [parameter for group in groups for parameter in group["params"]]
        self.names = {f"stand-in {number}": p for number, p in enumerate(members)}
        self.schedule = Schedule(build_optimizer(groups, config), config, total_steps=total_steps)

    def do(self, step: int) -> None:
        """Update the stand-ins with gradients that depend on the step alone."""
        for number, parameter in enumerate(self.names.values()):
            values = torch.arange(parameter.numel(), device=parameter.device)
            wave = torch.sin(values * 0.7 + number + step).view(parameter.shape)
            parameter.grad = wave.to(parameter.dtype) * 0.1
        self.schedule.begin_step(step)
        seed_update(0, step=step, device_type=next(iter(self.names.values())).device.type)
        self.schedule.optimizer.step()
        self.schedule.end_step()
        self.schedule.optimizer.zero_grad(set_to_none=True)


def _stand_ins(group: Group) -> Group:
    """Return a group with copies of the smallest parameters of different dimensions."""
    smallest: dict[int, Parameter] = {}
    for parameter in sorted(group["params"], key=torch.Tensor.numel):
        smallest.setdefault(parameter.dim(), parameter)
    kept = sorted(smallest.values(), key=torch.Tensor.numel)[:_PER_GROUP]
    return {**group, "params": [Parameter(p.detach().clone()) for p in kept]}


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit for bit; NaN equals NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _names(config: OptimizerConfig) -> str:
    return f"--optimizer {config.optimizer} with --lr_schedule {config.lr_schedule}"
