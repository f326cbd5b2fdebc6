"""The optimizer muon: torch's Muon for the matrices of hidden layers, AdamW for all the rest.

Owns which parameter is updated by which of the two, and one torch.optim.Optimizer of both: they
share its state and its groups, so schedules, checkpoints and retries see one optimizer.
Does not own: the groups that a model names (parameter_groups.py), building it (optimizer.py).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from hardened_ddp.errors import OptimizerError

log = logging.getLogger(__name__)

MUON = "muon"
BY_MUON = "by_muon"
"""The option of a group whose parameters Muon updates."""

_NUM_NAMED = 6


class MuonAndAdamW(Optimizer):
    """Updates the groups with by_muon by Muon, and the others by AdamW."""

    def __init__(
        self,
        params: Sequence[dict[str, Any]],  # Any: options of a group
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool = True,
        muon: Sequence[str] = (),
        adamw: Sequence[str] = (),
    ) -> None:
        """adjust_lr_fn: with match_rms_adamw one learning rate fits both, see torch.optim.Muon.

        muon, adamw: patterns of names that go to that one in any case; split_for_muon reads them.
        """
        if not hasattr(torch.optim, "Muon"):
            raise OptimizerError(
                f"--optimizer muon: torch {torch.__version__} has no torch.optim.Muon",
                fix="install torch 2.9 or newer, or choose --optimizer adamw",
            )
        both = {"lr": lr, "weight_decay": weight_decay}
        of_muon: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        of_muon |= {"adjust_lr_fn": adjust_lr_fn}
        of_adamw = {"betas": tuple(betas), "eps": eps, "fused": fused}
        super().__init__(params, both | of_muon | of_adamw)
        mine = [group for group in self.param_groups if group.get(BY_MUON)]
        others = [group for group in self.param_groups if not group.get(BY_MUON)]
        self.parts: list[Optimizer] = [torch.optim.Muon(mine, **both, **of_muon)]  # type: ignore[arg-type]  # their types differ
        if others:
            self.parts.append(AdamW(others, **both, **of_adamw))  # type: ignore[arg-type]  # as above
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # no loss
        """Update all parameters."""
        for part in self.parts:
            part.step()


def split_for_muon(
    groups: Sequence[dict[str, Any]],
    model: nn.Module,
    arguments: Mapping[str, Any],  # Any: optimizer_args
) -> list[dict[str, Any]]:
    """Split each group into what Muon and what AdamW updates. Raises OptimizerError; logs it.

    Muon: weights of two dimensions, but not of embeddings, and not of the last Linear, the output.
    WHY not those: their rows are apart from each other, which orthogonal updates would mix.
    arguments: muon and adamw may hold patterns of names, which win.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    excluded = {id(m.weight) for m in layers if isinstance(m, nn.Embedding)}
    excluded |= {id(layer.weight) for layer in linear[-1:]}
    patterns = {which: list(arguments.get(which, ())) for which in (MUON, "adamw")}
    for which, given in patterns.items():
        if unused := [p for p in given if not any(fnmatch(n, p) for n in names.values())]:
            raise OptimizerError(
                f"optimizer_args: {which} has {unused[0]!r}, which is no parameter of the model",
                fix=f"its parameters: {_some(list(names.values()))}",
            )

    def goes_to_muon(parameter: nn.Parameter) -> bool:
        name = names[id(parameter)]
        is_matrix = parameter.dim() == 2
        if any(fnmatch(name, pattern) for pattern in patterns["adamw"]):
            return False
        if any(fnmatch(name, pattern) for pattern in patterns[MUON]):
            if not is_matrix:
                raise OptimizerError(
                    f"optimizer_args: muon names {name}, which has {parameter.dim()} dimensions",
                    fix="Muon updates matrices: weights of two dimensions",
                )
            return True
        return is_matrix and id(parameter) not in excluded

    found = []
    for group in groups:
        for by_muon in (True, False):
            part = [p for p in group["params"] if goes_to_muon(p) == by_muon]
            if part:
                found.append({**group, "params": part, BY_MUON: by_muon})
    by = {
        which: [names[id(p)] for group in found if group[BY_MUON] == which for p in group["params"]]
        for which in (True, False)
    }
    if not by[True]:
        raise OptimizerError(
            "--optimizer muon: the model has no matrix for Muon, apart from embeddings and the "
            "output layer",
            fix="choose --optimizer adamw, or name them: --optimizer_args '{muon: [\"*weight\"]}'",
        )
    log.info("muon updates %s; adamw %s", _some(by[True]), _some(by[False]) or "nothing")
    return found


def _some(names: Sequence[str]) -> str:
    left = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {left} more" if left > 0 else "")
