"""The probe before training: a few samples forward and backward, whose effects are undone.

Owns its findings: which parameters get no gradient (by name, on each rank), which buffers a forward
changes, whether logits and labels fit; and DDP's warm-up. The probe runs without DDP, so a model
that fails on one rank ends in one message on all, not in a hang.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.fetch import preserved_rng
from hardened_ddp.data.foreign_code import describe, line_of_user
from hardened_ddp.errors import ANY_FAILURE, HardenedError, ModelError, UnusedParameterError
from hardened_ddp.model.effects import Effects, InputEffects, untouched
from hardened_ddp.model.precision import Precision
from hardened_ddp.model.replica import NO_COLLECTIVES, ForwardCollectives
from hardened_ddp.preflight.forward_collectives import calls_of, find_collectives, watching
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.config import FindUnused
from hardened_ddp.settings.wording import counted
from hardened_ddp.task.first_batch import (
    check_score,
    refuse_late_buffers,
    saved_shapes,
    warn_of_unsaved,
)
from hardened_ddp.task.output import fix_for
from hardened_ddp.task.own_metrics import OwnMetrics
from hardened_ddp.task.task import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the probe found, over all ranks."""

    unused: tuple[str, ...]
    """Parameters that got no gradient on some rank in some probe batch."""

    is_varying: bool
    """Ranks or batches differ in the parameters that they use."""

    where: str
    """The same per rank, as text."""

    moving_buffers: tuple[str, ...]

    collectives: ForwardCollectives = NO_COLLECTIVES
    """Of the model's forward."""

    own_tensors: tuple[str, ...] = ()
    """Attributes that forward reads and makes: each rank has its own."""

    outputs: tuple[str, ...] = ()
    """Attributes that forward replaces, and never reads."""

    changes_inputs: bool = False
    """Forward or loss change a batch in place."""

    moves_attributes: bool = False
    """It changes plain attributes, such as a counter of its calls."""


def probe(
    module: nn.Module, samples: Sequence[Batch], *, task: Task, precision: Precision, group: Group
) -> Findings:
    """Run samples through module, locally, and compare the findings. Collective: all ranks.

    Raises ModelError on every rank if the model failed on any.
    """
    mine: dict[str, Any] = {"unused": [], "moving": [], "own": [], "outputs": [], "inputs": False}
    found = NO_COLLECTIVES
    try:
        refuse_nan(module)
        shapes = saved_shapes(module)
        for batch in samples:
            inputs = InputEffects(batch.copied())
            with untouched(module) as effects:
                with precision.autocast(), watching(module, group) as watch:
                    output = task.forward(module, inputs.batch)
                    task.check(output, inputs.batch)
                    score = check_score(task, task.score(output, inputs.batch))
                if task.own is not None:
                    try_metrics(task.own, output, inputs.batch, group)
                refuse_unregistered(module, score.loss_sum)
                refuse_late_buffers(module, shapes)
                score.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch
                refuse_sparse(module)
                mine["unused"].append(
                    [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
                )
                if not watch.calls:
                    _look_closer(module, effects, inputs, task=task, precision=precision)
                _note(mine, effects, inputs)
            module.zero_grad(set_to_none=True)
            if watch.calls and not found:

                def forward(batch: Batch) -> None:
                    with untouched(module), precision.autocast(), torch.no_grad():
                        task.score(task.forward(module, batch), batch)

                found = find_collectives(watch, module, batch, forward)  # collective
        mine["learned"] = task.learned()
    except HardenedError as error:
        mine["error"] = {"message": error.message, "fix": error.fix}
    except ANY_FAILURE as error:  # WHY broad: it is the user's model, and the other ranks wait
        log.debug("the probe failed", exc_info=True)
        mine["error"] = {
            "message": f"{describe(error)}{line_of_user(error)}",
            "fix": fix_for(error, batch.inputs, has_labels=batch.targets is not None),
        }
    everyone = group.gather_json(mine)  # collective
    findings = _compare(everyone)
    learned: dict[str, Any] = {}
    for notes in reversed(everyone):  # the lowest rank that found something out
        learned |= notes["learned"]
    task.take_over(learned)
    warn_of_unsaved(findings.own_tensors)
    return replace(findings, collectives=found)


def _look_closer(
    module: nn.Module, effects: Effects, inputs: InputEffects, *, task: Task, precision: Precision
) -> None:
    """Look once more what a forward and backward write, operator by operator. Rank-local.

    Finds more, as a rule: WHY not instead, some models can't run so.
    """
    batch, task = inputs.original.copied(), copy.copy(task)

    def train() -> None:
        with precision.autocast():
            score = task.score(task.forward(module, batch), batch)
        score.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch

    if any(getattr(part, "_compiled_call_impl", None) for part in module.modules()):
        return
    try:
        with preserved_rng():
            effects.run(train, inputs, batch)
    except Exception:  # WHY broad: torch and the user's model, under a mode; it ran without
        log.debug("the trial operator by operator failed", exc_info=True)


def _note(mine: dict[str, Any], effects: Effects, inputs: InputEffects) -> None:
    """Add what a trial found to what this rank has found. Any: JSON."""
    found = {"moving": effects.moving(), "own": effects.remade(), "outputs": effects.outputs()}
    for key, names in found.items():
        mine[key] = sorted({*mine[key], *names})
    mine["inputs"] = mine["inputs"] or inputs.are_changed()


def refuse_nan(module: nn.Module) -> None:
    """Raise ModelError if a parameter is NaN. Rank-local."""
    found = [name for name, part in module.named_parameters() if bool(part.detach().isnan().any())]
    if found:
        raise ModelError(
            f"NaN in the weights, before any step: {', '.join(found[:8])}",
            fix="check how they are initialized, torch.empty() for example, or --init_from",
        )


def refuse_sparse(module: nn.Module) -> None:
    """Raise ModelError if a gradient is sparse. Rank-local."""
    found = [n for n, p in module.named_parameters() if p.grad is not None and p.grad.is_sparse]
    if found:
        raise ModelError(
            f"the gradients of {', '.join(found[:8])} are sparse: they can't be summed over ranks "
            "with the others, nor checked",
            fix="leave sparse=True out, as in torch.nn.functional.embedding",
        )


def refuse_unregistered(module: nn.Module, loss: torch.Tensor) -> None:
    """Raise ModelError if a parameter is used that is none of the model's. Rank-local.

    WHY: it would be neither trained nor saved, and nobody told. By its class: a tensor that only
    needs a gradient, such as an input, is no parameter.
    """
    known = {id(parameter) for parameter in module.parameters()}
    found: dict[int, nn.Parameter] = {}
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        used = getattr(node, "variable", None)  # of a node that adds up the gradient of a leaf
        if isinstance(used, nn.Parameter) and id(used) not in known:
            found[id(used)] = used
        for before, _ in getattr(node, "next_functions", ()):
            if before not in seen:
                seen.add(before)
                waiting.append(before)
    if found:
        shapes = " and ".join(str(tuple(parameter.shape)) for parameter in list(found.values())[:4])
        raise ModelError(
            f"{counted(len(found), 'parameter')} in use, of shape {shapes}, that the model does "
            "not have: in a plain list or dict, or in the task, they would not be trained or saved",
            fix="hold them in the model, in an nn.ModuleList, nn.ModuleDict or nn.ParameterList; "
            "or requires_grad_(False), if they are to stay as they are",
        )


def try_metrics(own: OwnMetrics, output: Any, batch: Batch, group: Group) -> None:
    """Try the user's metrics on a batch. Rank-local, on all ranks. Raises ModelError.

    output: whatever a model returned.
    """
    calls = calls_of(lambda: own.check(output, batch), group)
    if calls:
        raise ModelError(
            f"--metrics: {calls[0]} is called by a metric. Rank 0 alone measures, with the "
            "samples of all ranks: it would wait for the others forever",
            fix="leave collectives out of update(), compute() and reset()",
        )


def choose_find_unused(wanted: FindUnused, findings: Findings) -> bool:
    """Decide find_unused_parameters from the setting and the probe; log it. Rank-local.

    Raises UnusedParameterError if it is switched off but needed.
    """
    kind = "on some ranks or batches" if findings.is_varying else "on all ranks"
    gets = "gets" if len(findings.unused) == 1 else "get"
    unused = counted(len(findings.unused), "parameter")
    text = f"{unused} {gets} no gradient {kind}: {findings.where}"
    match wanted:
        case "auto" | "on" if findings.unused:
            log.warning("find_unused_parameters: on, because %s", text)
            return True
        case "off" if findings.unused:
            raise UnusedParameterError(
                f"{text}. DDP would wait forever for their gradients",
                fix="--find_unused_parameters auto, or use them in forward, or freeze them "
                "(requires_grad=False)",
            )
        case "on":
            log.info(
                "find_unused_parameters: on as asked; every parameter got a gradient in the probe, "
                "so 'auto' would save the search of the graph in each step"
            )
            return True
        case "auto" | "off":
            return False
        case _:
            assert_never(wanted)


def _compare(everyone: Sequence[dict[str, Any]]) -> Findings:
    """Merge what the ranks found, with the same result on each rank."""
    failed = [(rank, notes["error"]) for rank, notes in enumerate(everyone) if "error" in notes]
    if failed:
        rank, error = failed[0]
        others = f" (and on {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise ModelError(
            f"a first batch can't be trained on, rank {rank}{others}: {error['message']}",
            fix=error["fix"],
        )
    unions = [sorted({name for names in notes["unused"] for name in names}) for notes in everyone]
    different = {tuple(names) for notes in everyone for names in notes["unused"]}
    union = sorted({name for names in unions for name in names})
    if all(names == union for names in unions):
        where = ", ".join(union[:8]) + (f" and {len(union) - 8} more" if len(union) > 8 else "")
    else:
        where = "; ".join(
            f"rank {rank}: {', '.join(names[:8]) or 'none'}" for rank, names in enumerate(unions)
        )
    found = {k: {name for notes in everyone for name in notes[k]} for k in ("moving", "own")}
    outputs = {name for notes in everyone for name in notes["outputs"]}
    return Findings(
        unused=tuple(union),
        is_varying=len(different) > 1,
        where=where,
        moving_buffers=tuple(sorted(found["moving"] - found["own"])),
        own_tensors=tuple(sorted(found["own"])),
        outputs=tuple(sorted(outputs - found["moving"] - found["own"])),
        changes_inputs=any(notes["inputs"] for notes in everyone),
    )
