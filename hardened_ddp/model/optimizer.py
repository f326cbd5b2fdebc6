"""The optimizer: built in, or the user's by import path.

Owns the choice, its arguments, and the state that is allocated before the first step.
Does not own: its parameter groups (parameter_groups.py), the learning rate, saving its state
(both: schedule.py).
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from hardened_ddp.data.foreign_code import import_callable, told_as
from hardened_ddp.errors import OptimizerError
from hardened_ddp.model.muon import MuonAndAdamW
from hardened_ddp.model.parameter_groups import Group
from hardened_ddp.model.schedule import KNOWN, is_known
from hardened_ddp.settings.config import ImportPath, OptimizerConfig, OptimizerName

BUILT_IN: Mapping[OptimizerName, Callable[..., Any]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "muon": MuonAndAdamW,
}
_ONLY_ONE = ("fused", "foreach", "differentiable")
"""Options of which torch's optimizers take one at a time."""


def build_optimizer(groups: Sequence[Group], config: OptimizerConfig) -> Optimizer:
    """Build the optimizer over groups of trainable parameters. Rank-local. Raises OptimizerError.

    WHY fused: one kernel updates all parameters; on the CPU it is 3 times as fast for AdamW.
    """
    build, given = find_optimizer(config)
    trainable = [parameter for group in groups for parameter in group["params"]]
    if build in KNOWN and not any(given.get(option) for option in _ONLY_ONE):
        given.setdefault("fused", all(_can_fuse(build, parameter) for parameter in trainable))
    # WHY not the groups if there is one: the class then gets what the tutorials give it.
    is_plain = len(groups) == 1 and groups[0].keys() == {"params"}
    parameters = groups[0]["params"] if is_plain else [dict(group) for group in groups]
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    fix = (
        "correct --optimizer_args, or the settings it comes from; the traceback is in this rank's "
        "log"
    )
    with told_as(OptimizerError, f"{config.optimizer} can't be built with {words}", fix=fix):
        optimizer: Optimizer = build(parameters, **given)
    updated = set()
    if isinstance(optimizer, Optimizer):
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if updated != {id(parameter) for parameter in trainable}:
        raise OptimizerError(
            f"{config.optimizer} gave a {type(optimizer).__name__} that updates {len(updated)} "
            f"parameters, but not the {len(trainable)} that it was given",
            fix="derive it from torch.optim.Optimizer, which gets its first argument",
        )
    known = optimizer.defaults.keys() | {"params", "param_names"}
    for option in {each for group in optimizer.param_groups for each in group} - known:
        if near := difflib.get_close_matches(option, known, n=1, cutoff=0.8):
            raise OptimizerError(
                f"a parameter group has the option {option!r}, which {type(optimizer).__name__} "
                f"does not take: did you mean {near[0]!r}?",
                fix="correct its name in parameter_groups()",
            )
    return optimizer


def _can_fuse(build: Callable[..., Any], parameter: torch.nn.Parameter) -> bool:
    """Return whether the fused kernel of torch's optimizer gives the right update."""
    # WHY not: on the CPU, SGD's kernel for 16 bits gives other numbers than SGD from 16 values on,
    # and reads memory that nobody wrote (torch 2.13): other weights on each rank.
    is_half = parameter.dtype in (torch.bfloat16, torch.float16)
    is_wrong = build is SGD and is_half and parameter.device.type == "cpu"
    return parameter.is_floating_point() and not is_wrong


def find_optimizer(config: OptimizerConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return what builds the optimizer, and its arguments but for the parameters.

    Raises OptimizerError. learning_rate and weight_decay go to those that take them; what
    optimizer_args says comes first.
    """
    name = config.optimizer
    if isinstance(name, ImportPath):
        build = import_callable(name, setting="optimizer", error=OptimizerError)
    else:
        build = BUILT_IN[name]
    taken = inspect.signature(build).parameters
    settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if build is SGD:
        settings["momentum"] = config.momentum
    given: dict[str, Any] = {name: value for name, value in settings.items() if name in taken}
    return build, {**given, **config.optimizer_args}


def skips_by_flag(optimizer: Optimizer) -> bool:
    """Return whether its step changes nothing if found_inf is 1.0: torch's own fused ones."""
    return is_known(optimizer) and all(group.get("fused") for group in optimizer.param_groups)


def allocate_state(optimizer: Optimizer) -> None:
    """Create the state that the first step would create, all zero; the first step then uses it.

    WHY: a first step that runs out of memory half way would have updated only some weights.
    WHY by hand: an extra step would call the step hooks of the optimizer. One that is not known
    makes its own state in its first step.
    """
    if not is_known(optimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if isinstance(optimizer, SGD):
                names = ["momentum_buffer"] if group["momentum"] else []
            else:
                names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
                # A fused kernel keeps the step count on the device of the parameter.
                is_there = group.get("fused") or group.get("capturable")
                device = parameter.device if is_there else None
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in names:
                state[name] = torch.zeros_like(parameter, requires_grad=False)
