"""The optimizer: built in, or the user's by import path; and which parameters it updates, and how.

Owns the choice, its arguments, and the state that is allocated before the first step; the groups
that a model or task names in parameter_groups(), the groups without weight decay
(--no_weight_decay), and the check that each trainable parameter is in one group, once.
What goes wrong here: a parameter in two groups or in none, a model made for several optimizers.
Does not own: the learning rate, saving its state (both: schedule.py).
"""

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hardened_ddp.data.foreign_code import import_callable, told_as
from hardened_ddp.errors import OptimizerError
from hardened_ddp.model.muon import MUON, MuonAndAdamW, split_for_muon
from hardened_ddp.model.schedule import KNOWN, is_known
from hardened_ddp.settings.config import ImportPath, OptimizerConfig, OptimizerName
from hardened_ddp.task.output import described

log = logging.getLogger(__name__)

BUILT_IN: Mapping[OptimizerName, Callable[..., Any]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "muon": MuonAndAdamW,
}
_ONLY_ONE = ("fused", "foreach", "differentiable")
"""Options of which torch's optimizers take one at a time."""

# {"params": [...], option: value, ...}, as torch's optimizers take it. Any: an option's value.
Group = dict[str, Any]
_NUM_NAMED = 6  # parameters that a message names
_FAILED = (
    "the whole traceback is in this rank's log; a task's takes the model, a model's takes nothing"
)


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, *, task: object = None
) -> list[Group]:
    """Return the groups of the trainable parameters. Rank-local. Raises OptimizerError.

    From parameter_groups(model) of the task, else parameter_groups() of the model, else one group.
    With no_weight_decay, norms and biases of each group without a weight_decay of its own get 0.
    """
    owners = {"task": task, "model": model}
    for what, owner in owners.items():
        _warn_of_own(what, owner)
    groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
    for what, owner in owners.items():
        if callable(make := getattr(owner, "parameter_groups", None)):
            with told_as(OptimizerError, f"the {what}'s parameter_groups() failed", fix=_FAILED):
                found = make() if owner is model else make(model)
            groups = _checked(found, model, f"the {what}'s")
            break
    if config.optimizer == MUON:
        groups = split_for_muon(groups, model, config.optimizer_args)
    return _without_decay(groups, model) if config.no_weight_decay else groups


def _checked(found: Any, model: nn.Module, whose: str) -> list[Group]:
    """Bring what parameter_groups() returned into one form; each parameter is there once."""
    if not isinstance(found, Iterable) or isinstance(found, Mapping | str):
        raise _wrong(whose, f"returned a {type(found).__name__}")
    parts = list(found)
    if parts and all(isinstance(part, nn.Parameter) for part in parts):
        parts = [{"params": parts}]
    known, seen = {id(parameter) for parameter in model.parameters()}, set[int]()
    groups: list[Group] = []
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or "params" not in part:
            raise _wrong(whose, f"has no mapping with 'params' as group {number}")
        given = part["params"]
        members = [given] if isinstance(given, nn.Parameter) else list(given)
        for member in members:
            if id(member) not in known or id(member) in seen:
                what = described(member)
                raise _wrong(whose, f"has in group {number} what is in no model, or twice: {what}")
            seen.add(id(member))
        if trained := [member for member in members if member.requires_grad]:
            groups.append({**part, "params": trained})
    left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in seen]
    if left:
        some = ", ".join(left[:_NUM_NAMED]) + (" ..." if len(left) > _NUM_NAMED else "")
        raise _wrong(whose, f"leaves out {len(left)} trainable parameters: {some}")
    return groups


def _wrong(whose: str, what: str) -> OptimizerError:
    return OptimizerError(
        f"{whose} parameter_groups() {what}",
        fix="return a list of {'params': [parameters], option: value}, in which each trainable "
        "parameter is once; freeze a parameter by requires_grad_(False)",
    )


def _without_decay(groups: Sequence[Group], model: nn.Module) -> list[Group]:
    """Split each group: norms, biases and other vectors get no weight decay.

    WHY vectors: that is what everybody means by it (GPT-2, timm): decay is for matrices, which
    multiply; a scale or an offset has no reason to be near 0.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]
    of_norms = {id(p) for norm in norms for p in norm.parameters()}  # they may have matrices
    found: list[Group] = []
    for group in groups:
        if "weight_decay" in group:
            found.append(group)
            continue
        for is_vector, more in ((False, {}), (True, {"weight_decay": 0.0})):
            chosen = [p for p in group["params"] if (p.dim() < 2 or id(p) in of_norms) == is_vector]
            if chosen:
                found.append({**group, "params": chosen, **more})
    return found


def _warn_of_own(what: str, owner: object) -> None:
    """Say that what Lightning calls is not called here. Raises OptimizerError for a GAN."""
    if not callable(getattr(owner, "configure_optimizers", None)):
        return
    # WHY: Lightning trains with several optimizers only where the model updates by itself
    if getattr(owner, "automatic_optimization", True) is False:
        raise OptimizerError(
            f"the {what} updates by itself (automatic_optimization = False), as for several "
            "optimizers. A step here is one loss, one gradient and one update",
            fix="write a loop of your own, with protect: docs/OWN_LOOPS.md",
        )
    log.warning(
        "configure_optimizers() of the %s is not used: --optimizer, --lr_schedule and "
        "parameter_groups() say how it is trained",
        what,
    )


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
