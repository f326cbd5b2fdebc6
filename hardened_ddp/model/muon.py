"""The optimizer muon: torch's Muon for the matrices of hidden layers, AdamW for all the rest.

Owns which parameter is updated by which of the two, and one torch.optim.Optimizer of both: they
share its state and its groups, so schedules, checkpoints and retries see one optimizer.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import filter as filter_names
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from hardened_ddp.errors import OptimizerError
from hardened_ddp.settings.wording import listed

log = logging.getLogger(__name__)

MUON, ADAMW = "muon", "adamw"
BY_MUON = "by_muon"  # the option of a group whose parameters Muon updates


class MuonAndAdamW(Optimizer):
    """Updates the groups with by_muon by Muon, and the others by AdamW."""

    def __init__(
        self,
        params: Sequence[dict[str, Any]],  # Any: options of a group
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        *,
        muon: Sequence[str] = (),
        adamw: Sequence[str] = (),
        **of_muon: Any,  # Any: momentum, ns_steps and such, see torch.optim.Muon
    ) -> None:
        """muon, adamw: read by split_for_muon. of_muon may have AdamW's betas, too."""
        betas = tuple(of_muon.pop("betas", (0.9, 0.999)))
        both: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, both | {"betas": betas, **of_muon})
        # WHY that rule: one learning rate then fits both
        of_muon.setdefault("adjust_lr_fn", "match_rms_adamw")
        mine = [group for group in self.param_groups if group.get(BY_MUON)]
        others = [group for group in self.param_groups if not group.get(BY_MUON)]
        self.parts: list[Optimizer] = []
        if mine:
            self.parts.append(torch.optim.Muon(mine, **both, **of_muon))
        if others:
            self.parts.append(AdamW(others, **both, betas=betas, fused=True))
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
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    apart = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    ids = {id(weight) for weight in (*apart, *linear[-1:])}
    matrices = {name for name, parameter in named.items() if parameter.dim() == 2}
    chosen = {name for name in matrices if id(named[name]) not in ids}
    for which, change in ((MUON, chosen.update), (ADAMW, chosen.difference_update)):
        given = arguments.get(which, ())
        for pattern in given if isinstance(given, list | tuple) else [given]:
            if not (found := filter_names(named, str(pattern))):
                raise _wrong(f"{which} has {pattern!r}, which no parameter is called", named)
            change(found)
    if not chosen or chosen - matrices:
        raise _wrong(f"muon would update {listed(sorted(chosen - matrices)) or 'nothing'}", named)
    mine = [name for name in named if name in chosen]
    rest = [name for name in named if name not in chosen]
    log.info("muon updates %s; adamw %s", listed(mine), listed(rest) or "nothing")
    ids = {id(named[name]) for name in mine}
    split = [
        {**group, "params": [p for p in group["params"] if (id(p) in ids) == which], BY_MUON: which}
        for group in groups
        for which in (True, False)
    ]
    return [group for group in split if group["params"]]


def _wrong(what: str, names: Iterable[str]) -> OptimizerError:
    return OptimizerError(
        f"--optimizer muon: {what}",
        fix="give it matrices, --optimizer_args '{muon: [\"*weight\"]}', of: " + listed([*names]),
    )
