"""Parameter groups: which parameters the optimizer updates, and with which options.

Owns: the groups that a model or task names in parameter_groups(), the groups without weight decay
(--no_weight_decay), and the check that each trainable parameter is in one group, once.
What goes wrong here: a parameter in two groups or in none, a model made for several optimizers.
Does not own: the optimizer (optimizer.py).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hardened_ddp.data.foreign_code import told_as
from hardened_ddp.errors import OptimizerError
from hardened_ddp.model.muon import MUON, split_for_muon
from hardened_ddp.settings.config import OptimizerConfig
from hardened_ddp.task.output import described

log = logging.getLogger(__name__)

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
