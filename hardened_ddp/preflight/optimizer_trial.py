"""The trial of a user's optimizer and schedule, before the first step: can they be resumed?

Stand-ins for a few parameters are updated some times; the state is saved and loaded into a second
optimizer; both go on, and must stay equal, bit for bit. That finds what a class keeps outside of
its state, a step that needs a closure, and values that can't be saved.
torch's adamw, adam and sgd are not tried.
"""

import copy
import json
from collections.abc import Sequence

import torch
from torch.nn import Parameter

from hardened_ddp.checkpoint.tensors import plan_file
from hardened_ddp.errors import OptimizerError
from hardened_ddp.model.effects import Effects, has_same_bits
from hardened_ddp.model.optimizer import Group, build_optimizer, parameter_groups
from hardened_ddp.model.schedule import Schedule, is_known, restore_state, save_state
from hardened_ddp.preflight.trial import Refusal, Trial, try_on_all_ranks
from hardened_ddp.ranks.seeding import seed_update
from hardened_ddp.settings.config import OptimizerConfig

_STEPS_BEFORE, _STEPS_AFTER = 3, 2


def build_optimizer_and_schedule(
    trial: Trial, config: OptimizerConfig, *, total_steps: int
) -> Schedule:
    """Build the optimizer of a model and its learning rate; try them if they are the user's.

    Collective: all ranks. The optimizer is schedule.optimizer. Raises OptimizerError.
    """
    groups = parameter_groups(trial.model, config, task=trial.task)
    optimizer = build_optimizer(groups, config)
    schedule = Schedule(optimizer, config, total_steps=total_steps)
    if not is_known(optimizer) or schedule.has_state:
        refusal = Refusal(
            what=f"the trial of --optimizer {config.optimizer} with --lr_schedule "
            f"{config.lr_schedule} failed",
            fix=lambda _: (
                "both must work with a plain step(), and give their state by state_dict(): there "
                "is one gradient for each update, so no closure and no metric"
            ),
            error=OptimizerError,
        )

        def run(groups: Sequence[Group], effects: Effects) -> None:
            _try([_stand_ins(group) for group in groups], config, total_steps)

        try_on_all_ranks(trial, [groups], run, refusal)  # collective
    return schedule


def _try(groups: Sequence[Group], config: OptimizerConfig, total_steps: int) -> None:
    """Update stand-ins some times, also with what was saved and loaded. Raises HardenedError."""
    first, names = _built(groups, config, total_steps)
    num_before = min(_STEPS_BEFORE, max(0, total_steps - _STEPS_AFTER))
    for step in range(num_before):
        _update(first, names, step)
    second, copies = _built(copy.deepcopy(groups), config, total_steps)
    tensors, rest = save_state(first, names)
    plan_file(tensors)  # can it be saved?
    copied = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    restore_state(second, copies, copied, json.loads(json.dumps(rest)))
    for step in range(num_before, min(total_steps, num_before + _STEPS_AFTER)):
        _update(first, names, step)
        _update(second, copies, step)
    # WHY the bits: NaN equals NaN
    if not all(has_same_bits(p, copies[name]) for name, p in names.items()):
        raise OptimizerError(
            "after its state was saved and loaded, its next updates differ: it keeps something "
            "outside of its state",
            fix="keep all that changes in self.state[parameter] or in a parameter group, or "
            "return it from state_dict(); of a schedule, in its attributes",
        )


def _built(
    groups: Sequence[Group], config: OptimizerConfig, total_steps: int
) -> tuple[Schedule, dict[str, Parameter]]:
    """Build optimizer and schedule over stand-ins; return the schedule, and them by name."""
    members = [parameter for group in groups for parameter in group["params"]]
    names = {f"stand-in {number}": member for number, member in enumerate(members)}
    return Schedule(build_optimizer(groups, config), config, total_steps=total_steps), names


def _update(schedule: Schedule, names: dict[str, Parameter], step: int) -> None:
    """Update stand-ins with gradients that depend on the step alone."""
    for number, parameter in enumerate(names.values()):
        values = torch.arange(parameter.numel(), device=parameter.device)
        wave = torch.sin(values * 0.7 + number + step).view(parameter.shape)
        parameter.grad = wave.to(parameter.dtype) * 0.1
    schedule.begin_step(step)
    seed_update(0, step=step, device_type=parameter.device.type)
    schedule.optimizer.step()
    schedule.end_step()
    schedule.optimizer.zero_grad(set_to_none=True)


def _stand_ins(group: Group) -> Group:
    """Return a group with a copy of the smallest parameter of each number of dimensions."""
    by_size = sorted(group["params"], key=torch.Tensor.numel, reverse=True)
    smallest = {parameter.dim(): parameter for parameter in by_size}
    return {**group, "params": [Parameter(p.detach().clone()) for p in smallest.values()]}
