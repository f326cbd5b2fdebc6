"""The learning rate of each step; and the state of optimizer and schedule in a checkpoint.

Owns the schedules: built in, a function of the step, or a scheduler object. Only the last one has a
state: it is stepped once for each optimizer step, and taken back with a step that is taken back.
Owns the names optimizer.PARAMETER.KEY of a checkpoint, and what has no such name: nested states,
numbers, options that a step changed, a scheduler's state. Those are a tree of JSON, in which a
tensor is its name in the checkpoint. Of torch's own adamw, adam and sgd there is nothing of that
kind, but for the learning rate.
What goes wrong here: a scheduler that needs a metric or ends too early, or has no state_dict; a
state that is neither tensor nor number, such as a function or a generator: all an OptimizerError,
which preflight/optimizer_trial.py gets before the first step.
"""

import copy
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from hardened_ddp.data.batches.nesting import map_tensors
from hardened_ddp.data.batches.sampler import UNKNOWN_STEPS
from hardened_ddp.data.foreign_code import import_callable, told_as
from hardened_ddp.errors import OptimizerError
from hardened_ddp.model.state_tree import Tree, pack, unpack
from hardened_ddp.settings.config import ImportPath, OptimizerConfig

# The equal parts of lr_schedule step; the rate of each is a tenth of that of the part before.
STEP_DROPS = 3

# The built-in schedules: the share of the peak, by the share of the steps that is done.
_SHARES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    # Loshchilov and Hutter: SGDR, 2017, eq. 5 without restarts
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "step": lambda done: 0.1 ** min(STEP_DROPS - 1, int(done * STEP_DROPS)),
}

# What schedulers call the steps of the whole run.
_ENDS = ("total_steps", "num_training_steps", "T_max")
_FORMS = (
    "name a scheduler of torch (its first parameter is called optimizer), or a function "
    "(step, total_steps) that returns the share of learning_rate at this step"
)

# Their state is known, and their fused kernels skip a step by a flag on the device.
KNOWN = (SGD, Adam, AdamW)
PREFIX = "optimizer."


class Schedule:
    """Sets the learning rate of one optimizer, and what else a scheduler changes in its groups."""

    def __init__(self, optimizer: Optimizer, config: OptimizerConfig, *, total_steps: int) -> None:
        """Build it for a run of total_steps; nothing is changed but by a scheduler object.

        total_steps: UNKNOWN_STEPS if nobody knows them. Raises OptimizerError.
        """
        if config.lr_schedule == "auto":
            is_known = total_steps != UNKNOWN_STEPS
            config = replace(config, lr_schedule="cosine" if is_known else "constant")
        self.optimizer = optimizer
        self.config = config  # with the schedule that auto became
        self.total_steps = total_steps
        # The options of each group as the optimizer was built.
        self.base = [_options(group) for group in optimizer.param_groups]
        self._peaks: list[Any] = [options.get("lr") for options in self.base]
        # Returns the learning rate of a group, by its peak and the step. Any: a float, or a tensor.
        self._rate: Callable[..., Any] = partial(learning_rate, config, total_steps=total_steps)
        self._scheduler: Any = None  # Any: a scheduler of torch, or one with its methods
        self.has_state = False  # it is a scheduler object, which is stepped and saved
        self.is_bound = False  # the scheduler was made for total_steps, and can't go beyond them
        if isinstance(config.lr_schedule, ImportPath):
            self._find(config.lr_schedule)
        self.is_constant = config.lr_schedule == "constant" and config.warmup_steps == 0
        if not (self.has_state or self.is_constant) and None in self._peaks:
            raise OptimizerError(
                f"{type(optimizer).__name__} has no learning rate in its parameter groups, so "
                f"lr_schedule {config.lr_schedule} has nothing to change",
                fix="--lr_schedule constant --warmup_steps 0",
            )

    def begin_step(self, step: int) -> None:
        """Set the learning rate of step, 0 <= step < total_steps."""
        if self.has_state or self.is_constant:
            return
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = self._rate(peak, step=step)

    def end_step(self) -> None:
        """Step the scheduler object, if there is one, after the optimizer."""
        if self.has_state:
            self._scheduler.step()

    def mark(self) -> Any:  # Any: for go_back only
        """Copy the state of a scheduler object, for go_back."""
        return copy.deepcopy(self.state()), [_options(g) for g in self.optimizer.param_groups]

    def go_back(self, mark: Any) -> None:  # Any: from mark, or None: nothing
        """Restore the state of mark, and the options of the groups."""
        if mark is None:
            return
        state, groups = mark
        self.restore(copy.deepcopy(state))
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(options)

    def state(self) -> dict[str, Any]:  # Any: a scheduler's state
        return dict(self._scheduler.state_dict())

    def restore(self, state: Mapping[str, Any]) -> None:  # Any: as in state
        self._scheduler.load_state_dict(dict(state))

    def _find(self, path: ImportPath) -> None:
        """Build the user's schedule: a function of the step, or an object."""
        build = import_callable(path, setting="lr_schedule", error=OptimizerError)
        taken = inspect.signature(build).parameters
        arguments = {**self._facts(taken), **self.config.lr_schedule_args}
        if self.config.warmup_steps and not {"warmup_steps", "num_warmup_steps"} & arguments.keys():
            raise OptimizerError(
                f"warmup_steps is {self.config.warmup_steps}, and {path} does not take it: there "
                "would be no warm-up",
                fix="--warmup_steps 0, and a warm-up in the schedule itself",
            )
        if "step" in taken and "optimizer" not in taken:
            self._rate = self._function(path, build, arguments)
        elif "optimizer" in taken:
            what = f"--lr_schedule {path} can't be built with {arguments}"
            fix = f"correct --lr_schedule_args; it takes: {', '.join(taken)}"
            with told_as(OptimizerError, what, fix=fix):
                self._scheduler = build(optimizer=self.optimizer, **arguments)
            self.has_state = True
            self.is_bound = any(name in arguments for name in _ENDS)
        else:
            raise OptimizerError(
                f"--lr_schedule {path} has neither a parameter step nor a parameter optimizer",
                fix=_FORMS,
            )

    def _facts(self, taken: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
        """Return what the schedule asks for by the names of its parameters."""
        config = self.config
        facts: dict[str, Any] = dict.fromkeys(_ENDS, self.total_steps)
        facts |= dict.fromkeys(("warmup_steps", "num_warmup_steps"), config.warmup_steps)
        facts |= {"learning_rate": config.learning_rate}
        peaks = [float(peak) for peak in self._peaks if peak is not None]
        if peaks:
            facts["max_lr"] = peaks[0] if len(peaks) == 1 else peaks
        # WHY total_steps too where it has a default: torch's OneCycleLR then needs other arguments.
        return {
            name: facts[name]
            for name, parameter in taken.items()
            if name in facts and (parameter.default is parameter.empty or name == "total_steps")
        }

    def _function(
        self, path: str, build: Callable[..., Any], arguments: dict[str, Any]
    ) -> Callable[..., Any]:
        def rate(peak: Any, step: int) -> Any:
            what = f"--lr_schedule {path} failed at step {step} with {arguments}"
            with told_as(OptimizerError, what, fix=_FORMS):
                found = build(step=step, **arguments)
            is_number = isinstance(found, numbers.Real) and not isinstance(found, bool)
            if not is_number or not math.isfinite(found) or found < 0:
                raise OptimizerError(
                    f"--lr_schedule {path} gives {found!r} at step {step}; need a number, 0 or "
                    "more: the share of learning_rate",
                    fix=_FORMS,
                )
            return peak * float(found)

        for step in sorted({0, self.total_steps // 2, max(0, self.total_steps - 1)}):
            rate(1.0, step)
        return rate


def learning_rate(config: OptimizerConfig, peak: Any, *, step: int, total_steps: int) -> Any:
    """Return the learning rate of step, 0 <= step < total_steps, of a built-in schedule.

    peak: that of the group; after a linear warm-up it falls by _SHARES. Any: a float, or a tensor.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    length = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / length)
    return peak * _SHARES[config.lr_schedule](done)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:  # Any: options of a parameter group
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def is_known(optimizer: Optimizer) -> bool:
    """Return whether it is one of KNOWN. WHY the exact type: a subclass may do anything."""
    return type(optimizer) in KNOWN


def save_state(
    schedule: Schedule, trainable: Mapping[str, torch.nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Tree]]:
    """Return the state of a schedule and its optimizer: live tensors by name, and the rest.

    Nothing is copied. Raises OptimizerError for a value that can't be saved.
    """
    optimizer, cls = schedule.optimizer, type(schedule.optimizer)
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Tree] = {"groups": _changed_options(schedule, tensors)}
    if is_known(optimizer):
        for name, parameter in trainable.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{PREFIX}{name}.{key}"] = value
    elif (cls.state_dict, cls.load_state_dict) != (Optimizer.state_dict, Optimizer.load_state_dict):
        # its class saves and loads its state in its own way
        rest["whole"] = _packed(optimizer.state_dict(), f"{PREFIX}whole", tensors)
    else:
        rest["state"] = {
            name: _packed(dict(state), f"{PREFIX}{name}", tensors)
            for name, parameter in trainable.items()
            if (state := optimizer.state.get(parameter))
        }
        shared = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
        rest["shared"] = _packed(shared, f"{PREFIX}shared", tensors)
    if schedule.has_state:
        rest["schedule"] = _packed(schedule.state(), f"{PREFIX}schedule", tensors)
    return {name: t.detach() if t.requires_grad else t for name, t in tensors.items()}, rest


@torch.no_grad()
def restore_state(
    schedule: Schedule,
    trainable: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, Tensor],
    rest: Mapping[str, Tree],
) -> None:
    """Load a state that save_state returned, into the optimizer and schedule of a run.

    The optimizer keeps tensors as they are where they fit its parameters: copies would take memory.
    """
    optimizer = schedule.optimizer
    if "whole" in rest:
        optimizer.load_state_dict(unpack(rest["whole"], tensors))
    elif "state" in rest:
        optimizer.state.clear()
        for name, tree in rest["state"].items():
            place = partial(_placed, trainable[name])
            optimizer.state[trainable[name]] = map_tensors(unpack(tree, tensors), place)
        optimizer.state.update(unpack(rest["shared"], tensors))
    else:
        _restore_known(optimizer, trainable, tensors)
    if schedule.has_state and "schedule" in rest:
        schedule.restore(unpack(rest["schedule"], tensors))
    groups = rest.get("groups") or [{}] * len(schedule.base)
    for group, base, changed in zip(optimizer.param_groups, schedule.base, groups, strict=True):
        if "whole" not in rest:
            group.update(base)
        group.update({option: unpack(tree, tensors) for option, tree in changed.items()})


def state_problems(
    schedule: Schedule, trainable: Mapping[str, torch.nn.Parameter], rest: Mapping[str, Tree]
) -> list[str]:
    """Say why a saved state can't be loaded into the optimizer of this run; usually nothing."""
    problems = []
    num_groups = len(rest.get("groups") or schedule.base)
    if num_groups != len(schedule.base):
        problems.append(
            f"optimizer: the checkpoint has {num_groups} parameter groups, this run has "
            f"{len(schedule.base)}"
        )
    if unknown := [name for name in rest.get("state", {}) if name not in trainable]:
        problems.append(f"optimizer: the checkpoint has a state of {', '.join(unknown[:5])}")
    if schedule.has_state != ("schedule" in rest):
        whose = "the checkpoint's" if "schedule" in rest else "this run's"
        problems.append(f"lr_schedule: only {whose} is a scheduler with a state")
    return problems


def _changed_options(schedule: Schedule, tensors: dict[str, Tensor]) -> list[dict[str, Tree]]:
    """Return, for each group, the options that differ from those that it was built with.

    WHY only those: the others are settings, and a resumed run may have other ones.
    """
    groups = zip(schedule.optimizer.param_groups, schedule.base, strict=True)
    return [
        {
            option: _packed(value, f"{PREFIX}groups.{number}.{option}", tensors)
            for option, value in group.items()
            if option != "params" and not (option in base and _is_same(value, base[option]))
        }
        for number, (group, base) in enumerate(groups)
    ]


def _packed(value: Any, name: str, tensors: dict[str, Tensor]) -> Tree:  # Any: a foreign state
    return pack(value, name, tensors, error=OptimizerError)


def _is_same(one: Any, other: Any) -> bool:  # Any: options of a parameter group
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    # WHY the same: of an object, such as a function, nobody can say whether it changed.
    return bool(one == other) if isinstance(one, bool | int | float | str | dict) else True


def _restore_known(
    optimizer: Optimizer, trainable: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    for name, parameter in trainable.items():
        prefix = f"{PREFIX}{name}."
        state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        for key, value in state.items():
            is_alike = value.device == parameter.device and value.stride() == parameter.stride()
            # WHY not the step count: of a parameter of one number it has that shape, too
            if value.shape == parameter.shape and not is_alike and key != "step":
                state[key] = _like(parameter, value)
            elif optimizer.defaults.get("fused") or optimizer.defaults.get("capturable"):
                state[key] = value.to(parameter.device)  # its kernels read the step count there
        if state:
            optimizer.state[parameter] = state


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    # WHY: the same device and memory layout as the parameter (channels_last).
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _placed(parameter: Tensor, value: Tensor) -> Tensor:
    """Move a part of its state to the device of the parameter; a number stays where it was kept."""
    if value.shape == parameter.shape and value.dim():
        return _like(parameter, value)
    return value.to(parameter.device) if value.dim() or value.is_cuda else value
