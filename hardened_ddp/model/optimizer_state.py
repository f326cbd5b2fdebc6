"""The state of the optimizer and its schedule as named tensors and JSON, and back.

Owns the names optimizer.PARAMETER.KEY of a checkpoint, and what has no such name: nested states,
numbers, options that a step changed, a scheduler's state. Those are a tree of JSON, in which a
tensor is its name in the checkpoint. Of torch's own adamw, adam and sgd there is nothing of that
kind, but for the learning rate.
What goes wrong here: a state that is neither tensor nor number, such as a function or a generator:
an OptimizerError, which preflight/optimizer_trial.py gets before the first step.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from hardened_ddp.errors import OptimizerError
from hardened_ddp.model.schedule import Schedule

KNOWN = (SGD, Adam, AdamW)
"""Their state is known, and their fused kernels skip a step by a flag on the device."""

PREFIX = "optimizer."
_TENSOR, _TUPLE, _LIST = "tensor", "tuple", "list"
_MAPPINGS: Mapping[str, type[dict[Any, Any]]] = {  # Any: keys and values of any kind
    "dict": dict,
    "ordered dict": OrderedDict,
    "counter": Counter,  # torch's MultiStepLR has one
}

Tree = Any
"""JSON: a number, text or null as it is; anything else as {kind: content}."""


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
        rest["whole"] = _pack(optimizer.state_dict(), f"{PREFIX}whole", tensors)
    else:
        rest["state"] = {
            name: _pack(dict(state), f"{PREFIX}{name}", tensors)
            for name, parameter in trainable.items()
            if (state := optimizer.state.get(parameter))
        }
        shared = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
        rest["shared"] = _pack(shared, f"{PREFIX}shared", tensors)
    if schedule.has_state:
        rest["schedule"] = _pack(schedule.state(), f"{PREFIX}schedule", tensors)
    return tensors, rest


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
        optimizer.load_state_dict(_unpack(rest["whole"], tensors))
    elif "state" in rest:
        optimizer.state.clear()
        for name, tree in rest["state"].items():
            state = _unpack(tree, tensors)
            optimizer.state[trainable[name]] = _placed(state, trainable[name])
        optimizer.state.update(_unpack(rest["shared"], tensors))
    else:
        _restore_known(optimizer, trainable, tensors)
    if schedule.has_state and "schedule" in rest:
        schedule.restore(_unpack(rest["schedule"], tensors))
    groups = rest.get("groups") or [{}] * len(schedule.base)
    for group, base, changed in zip(optimizer.param_groups, schedule.base, groups, strict=True):
        if "whole" not in rest:
            group.update(base)
        group.update({option: _unpack(tree, tensors) for option, tree in changed.items()})


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
        had = "had one" if "schedule" in rest else "had none"
        problems.append(
            f"lr_schedule: this run's scheduler has a state, or the checkpoint's: {had}"
        )
    return problems


def _changed_options(schedule: Schedule, tensors: dict[str, Tensor]) -> list[dict[str, Tree]]:
    """Return, for each group, the options that differ from those that it was built with.

    WHY only those: the others are settings, and a resumed run may have other ones.
    """
    groups = zip(schedule.optimizer.param_groups, schedule.base, strict=True)
    return [
        {
            option: _pack(value, f"{PREFIX}groups.{number}.{option}", tensors)
            for option, value in group.items()
            if option != "params" and not (option in base and _is_same(value, base[option]))
        }
        for number, (group, base) in enumerate(groups)
    ]


def _is_same(one: Any, other: Any) -> bool:  # Any: options of a parameter group
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and torch.equal(one, other)
    if type(one) is not type(other):
        return False
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


def _placed(value: Any, parameter: Tensor) -> Any:  # Any: the state of a parameter
    """Move tensors to the device of the parameter; a number stays where it was kept."""
    if isinstance(value, Tensor):
        if value.shape == parameter.shape and value.dim():
            return _like(parameter, value)
        return value.to(parameter.device) if value.dim() or value.is_cuda else value
    if isinstance(value, dict):
        return {key: _placed(part, parameter) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(part, parameter) for part in value)
    return value


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Tree:  # Any: a foreign state
    """Return value as JSON; its tensors go to tensors, under names that begin with name."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        unique = name
        while unique in tensors:  # a.b of {"a.b": t} and of {"a": {"b": t}}
            unique += "'"
        tensors[unique] = value.detach()
        return {_TENSOR: unique, "is_on_device": not value.is_cpu}
    if type(value) in (list, tuple):
        kind = _LIST if type(value) is list else _TUPLE
        return {kind: [_pack(part, f"{name}.{i}", tensors) for i, part in enumerate(value)]}
    mapping = next((word for word, kind in _MAPPINGS.items() if type(value) is kind), "")
    has_plain_keys = mapping and all(k is None or type(k) in (bool, int, float, str) for k in value)
    if has_plain_keys:
        # WHY pairs: JSON would turn a number as a key into text.
        return {mapping: [[key, _pack(v, f"{name}.{key}", tensors)] for key, v in value.items()]}
    keys = " with keys that are not text or numbers" if mapping else ""
    raise OptimizerError(
        f"{name} is a {type(value).__name__}{keys}: it can't be saved, so a resumed run would "
        "differ",
        fix="keep in the state what is a tensor, a number, text, or a dict, list or tuple of "
        "them; compute the rest from these",
    )


def _unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:  # Any: as it was packed
    if not isinstance(tree, Mapping):
        return tree
    if _TENSOR in tree:
        found = tensors[tree[_TENSOR]].clone()
        return found.cuda() if tree["is_on_device"] and torch.cuda.is_available() else found
    for word, kind in _MAPPINGS.items():
        if word in tree:
            return kind({key: _unpack(part, tensors) for key, part in tree[word]})
    parts = [_unpack(part, tensors) for part in tree.get(_LIST, tree.get(_TUPLE, []))]
    return parts if _LIST in tree else tuple(parts)
