"""The probe before training: a few samples forward and backward, whose effects are undone.

It finds which parameters get no gradient (by name, on each rank), which buffers and attributes a
forward changes, and whether logits and labels fit; those of the test set, too. With --task auto
the output of a first forward says which task fits the labels.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.checks import Limit, parts_of
from hardened_ddp.data.batches.loader import EvalLoader
from hardened_ddp.data.sources.datasets import TaskData
from hardened_ddp.errors import ModelError, UnusedParameterError
from hardened_ddp.model.effects import Effects, InputEffects, span_of
from hardened_ddp.model.precision import Precision
from hardened_ddp.model.replica import NO_COLLECTIVES, ForwardCollectives
from hardened_ddp.preflight.forward_collectives import find_collectives, watching
from hardened_ddp.preflight.trial import Refusal, Trial, try_on_all_ranks
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.seeding import keeping_random_state
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.settings.config import FindUnused, TaskConfig
from hardened_ddp.settings.wording import counted, listed
from hardened_ddp.step.parts import Parts
from hardened_ddp.task.build import build_task, task_that_fits
from hardened_ddp.task.output import fix_for
from hardened_ddp.task.own_metrics import OwnMetrics
from hardened_ddp.task.task import Task

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Findings:
    """What the probe found, over all ranks."""

    # Which parameters got no gradient, and on which ranks; empty: all got one everywhere.
    unused: str = ""
    moving_buffers: tuple[str, ...] = ()

    collectives: ForwardCollectives = NO_COLLECTIVES  # of the model's forward

    # Attributes that forward reads and makes: each rank has its own.
    own_tensors: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()  # attributes that forward replaces, and never reads
    changes_inputs: bool = False  # forward or loss change a batch in place
    limits: Sequence[Limit] = ()  # of inputs that are the numbers of rows of an embedding


def probe(trial: Trial, samples: Sequence[Batch]) -> Findings:
    """Run samples through the model, locally, and compare the findings. Collective: all ranks.

    Raises ModelError on every rank if the model failed on any.
    """
    module, task, group = trial.model, trial.task, trial.group
    shapes = saved_shapes(module)
    has_labels = samples[0].targets is not None
    fix = partial(fix_for, inputs=samples[0].inputs, has_labels=has_labels)
    refusal = Refusal(what="a first batch can't be trained on", fix=fix)

    def run(batch: Batch | None, effects: Effects) -> Any:  # Any: JSON
        if batch is None:
            return trial.attributes.changes()
        inputs = InputEffects(batch.copied())
        watches = group.world_size > 1 and not trial.is_compiled
        with _limits_of(module, inputs.batch) as limits, watching(is_on=watches) as seen:
            output, score = trial.score(inputs.batch)
        if task.own is not None:
            try_metrics(task.own, output, inputs.batch, group)
        refuse_unregistered(module, score.loss_sum)
        refuse_late_buffers(module, shapes)
        score.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch
        refuse_sparse(module)
        unused = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
        if not seen and not trial.is_compiled:
            _look_closer(trial, effects, inputs)
        return {
            "unused": unused,
            "moving": sorted(effects.moving()),
            "own": sorted(effects.remade()),
            "outputs": sorted(effects.outputs()),
            "inputs": inputs.are_changed(),
            "limits": limits,
            "has_calls": bool(seen),
            "learned": task.learned(),
        }

    # None: what is no tensor is looked at once the tensors of all samples are put back
    everyone = try_on_all_ranks(trial, [*samples, None], run, refusal)  # collective
    notes = [found[:-1] for found in everyone if found is not None]
    findings = _compare(notes)
    has_calls = any(each["has_calls"] for found in notes for each in found)
    collectives = find_collectives(trial, samples[0], refusal, in_training=has_calls)  # collective
    learned: dict[str, Any] = {}
    for found in reversed(notes):  # the lowest rank that found something out
        learned |= found[-1]["learned"]
    task.take_over(learned)
    warn_of_unsaved(findings.own_tensors)
    trial.attributes.note_built()
    trial.attributes.agree([found[-1] for found in everyone if found is not None])
    return replace(findings, collectives=collectives)


@contextlib.contextmanager
def _limits_of(module: nn.Module, batch: Batch) -> Iterator[list[tuple[str, int, str]]]:
    """Note which inputs, as they are, choose rows of an embedding in a forward, and of how many."""
    found: list[tuple[str, int, str]] = []
    parts = parts_of(batch.inputs).items()
    inputs = {name: part for name, part in parts if isinstance(part, torch.Tensor)}

    def note(name: str, embedding: Any, args: Any, named: Any) -> None:  # Any: of either class
        rows = args[0] if args else named["input"]
        for part, tensor in inputs.items():
            is_it = span_of(rows) == span_of(tensor) and rows.numel() == tensor.numel()
            if is_it and rows.dtype == tensor.dtype:
                found.append((part, embedding.num_embeddings, f"the embedding {name}"))

    with contextlib.ExitStack() as hooks:
        for name, part in module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                hook = part.register_forward_pre_hook(partial(note, name), with_kwargs=True)
                hooks.enter_context(hook)
        yield found


def check_evaluation(parts: Parts) -> None:
    """Raise ModelError on every rank if the test set can't be measured. Collective: all ranks.

    Scores the first samples of each rank's share. WHY at the start: the first evaluation may be
    hours away, and labels of another form than those of the training part would end the run there.
    """
    config, loader, replica = parts.config, parts.eval_loader, parts.replica
    if loader is None or not config.loop.evaluates:
        return
    if replica.collectives.in_evaluation:
        return  # a rank whose sample can't be read would leave the others waiting in forward
    # WHY a copy: a check learns from what it sees, and each rank sees something else.
    trial = Trial(replica.module, copy.copy(parts.task), parts.precision, parts.group)
    is_compiled = config.model.compile

    def score(loader: EvalLoader, effects: Effects) -> None:
        batch = loader.first_samples()
        if batch.bad and not config.loop.continue_on_error:
            bad = batch.bad[0]
            raise ModelError(
                f"test sample {bad.name} can't be read: {bad.error}",
                fix="fix it, or leave such samples out with --continue_on_error",
            )
        # WHY eager: the model would be compiled for this size, too
        eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        if batch.num_samples:
            with torch.no_grad(), eager:
                trial.score(replica.inputs.send(batch, parts.device))

    refusal = Refusal(
        what="the test set can't be evaluated",
        fix=lambda _: (
            "the whole traceback is in this rank's log; --eval_every 0 trains without evaluations"
        ),
    )
    try_on_all_ranks(trial, [loader], score, refusal, evaluates=True)  # collective


def _look_closer(trial: Trial, effects: Effects, inputs: InputEffects) -> None:
    """Look once more what a forward and backward write, operator by operator. Rank-local.

    Finds more, as a rule: WHY not instead, some models can't run so.
    """
    batch, task = inputs.original.copied(), copy.copy(trial.task)

    def train() -> None:
        with trial.precision.autocast():
            score = task.score(task.forward(trial.model, batch), batch)
        score.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch

    try:
        with keeping_random_state():
            effects.run(train, inputs, batch)
    except Exception:  # WHY broad: torch and the user's model, under a mode; it ran without
        log.debug("the trial operator by operator failed", exc_info=True)


def saved_shapes(module: nn.Module) -> Shapes:
    """Return the shape of each tensor that a checkpoint saves."""
    state = module.state_dict().items()
    return {name: tuple(part.shape) for name, part in state if isinstance(part, torch.Tensor)}


def refuse_late_buffers(module: nn.Module, before: Shapes) -> None:
    """Raise ModelError if a forward made a saved buffer, or changed its shape. Rank-local.

    before: the shapes before it. WHY: it would not be made equal on the ranks, and the model as it
    is built again, to resume or evaluate, could not take what was saved.
    """
    after = saved_shapes(module).items()
    if found := [name for name, shape in after if before.get(name) != shape]:
        raise ModelError(
            f"a forward made or resized what a checkpoint saves: {', '.join(found[:8])}",
            fix="give buffers their final shape in the constructor, or run one batch through the "
            "model there, as the observers of quantization need; persistent=False for a cache",
        )


def warn_of_unsaved(own: Sequence[str]) -> None:
    """Name the tensors that forward makes and reads again. Rank-local: the same on all ranks."""
    if own:
        log.warning(
            "forward makes tensors, or changes their shape, that it reads in the next one: %s. No "
            "checkpoint saves them, and each rank has its own: after a resume the model begins "
            "without them. In their final shape from the constructor on, they are saved",
            ", ".join(own[:8]),
            extra=ON_EVERY_RANK,
        )


def refuse_sparse(module: nn.Module) -> None:
    """Raise ModelError if a gradient is sparse. Rank-local."""
    found = [n for n, p in module.named_parameters() if p.grad is not None and p.grad.is_sparse]
    if found:
        raise ModelError(
            f"the gradients of {', '.join(found[:8])} are sparse: they can't be summed over ranks "
            "with the others, nor checked",
            fix="leave sparse=True out, of nn.Embedding for instance",
        )


def refuse_unregistered(module: nn.Module, loss: torch.Tensor) -> None:
    """Raise ModelError if a parameter is used that is none of the model's. Rank-local.

    WHY: it would be neither trained nor saved, and nobody told. By its class: a tensor that only
    needs a gradient, such as an input, is no parameter.
    """
    known = {id(parameter) for parameter in module.parameters()}
    found: dict[int, nn.Parameter] = {}
    seen: set[Any] = {None}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        if (node := waiting.pop()) in seen:
            continue
        seen.add(node)
        used = getattr(node, "variable", None)  # of a node that adds up the gradient of a leaf
        if isinstance(used, nn.Parameter) and id(used) not in known:
            found[id(used)] = used
        waiting += [before for before, _ in node.next_functions]
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
    with watching(is_on=group.world_size > 1) as seen:
        own.check(output, batch)
    if seen:
        raise ModelError(
            f"--metrics: {seen[0][0]} is called by a metric. Rank 0 alone measures, with the "
            "samples of all ranks: it would wait for the others forever",
            fix="leave collectives out of update(), compute() and reset()",
        )


def choose_find_unused(wanted: FindUnused, findings: Findings) -> bool:
    """Decide find_unused_parameters from the setting and the probe. Rank-local.

    Raises UnusedParameterError if it is switched off but needed.
    """
    if findings.unused and wanted == "off":
        raise UnusedParameterError(
            f"{findings.unused}. DDP would wait forever for their gradients",
            fix="--find_unused_parameters auto, or use them in forward, or freeze them "
            "(requires_grad=False)",
        )
    if findings.unused:
        log.warning("find_unused_parameters: on, because %s", findings.unused)
    return bool(findings.unused) or wanted == "on"


def _compare(everyone: Sequence[Sequence[dict[str, Any]]]) -> Findings:
    """Merge what the ranks found in each sample, with the same result on each rank."""

    found = [each for notes in everyone for each in notes]

    def union(key: str) -> list[str]:
        return sorted({name for each in found for name in each[key]})

    own, moving = union("own"), union("moving")
    return Findings(
        unused=_unused(everyone),
        moving_buffers=tuple(name for name in moving if name not in own),
        own_tensors=tuple(own),
        outputs=tuple(name for name in union("outputs") if name not in {*moving, *own}),
        changes_inputs=any(each["inputs"] for each in found),
        limits=[Limit(*x) for x in sorted({tuple(x) for each in found for x in each["limits"]})],
    )


def _unused(everyone: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Say which parameters got no gradient, and where; empty if there are none."""
    of_ranks = [sorted({n for found in notes for n in found["unused"]}) for notes in everyone]
    unused = sorted({name for names in of_ranks for name in names})
    if not unused:
        return ""
    where = listed(unused)
    if any(names != unused for names in of_ranks):
        parts = [f"rank {r}: {', '.join(names[:8]) or 'none'}" for r, names in enumerate(of_ranks)]
        where = "; ".join(parts)
    is_varying = any(found["unused"] != everyone[0][0]["unused"] for n in everyone for found in n)
    kind = "on some ranks or batches" if is_varying else "on all ranks"
    gets = "gets" if len(unused) == 1 else "get"
    return f"{counted(len(unused), 'parameter')} {gets} no gradient {kind}: {where}"


def choose_task(
    model: nn.Module,
    sample: Batch,
    data: TaskData,
    config: TaskConfig,
    group: Group,
    *,
    saved: Mapping[str, Any] | None = None,  # Any: the numbers of a checkpoint
) -> Task:
    """Return the task of a run: as asked, as it began, or as fits the first batch.

    Collective: all ranks. Raises ModelError or ConfigError on all ranks alike.
    """
    began_with = (saved or {}).get("task", {})
    name = config.task
    if name == "auto":
        name = began_with.get("name") or _fitting_name(model, sample, group)  # collective
    task = build_task(name, model, data, config)
    task.take_over(began_with.get("learned", {}))
    return task


def _fitting_name(model: nn.Module, sample: Batch, group: Group) -> str:
    """Return the name of the task that fits the first batch of rank 0. Collective."""
    caller, shapes = Task(), saved_shapes(model)
    caller.attach(model)

    def run(batch: Batch, effects: Effects) -> tuple[str, str, str]:
        with torch.no_grad():
            output = caller.forward(model, batch)
        refuse_late_buffers(model, shapes)
        try:
            return *task_that_fits(output, batch), ""
        except ModelError as error:  # WHY no failure: rank 0's batch decides
            return "", error.message, error.fix

    trial = Trial(model, caller, Precision("off", group.device), group)
    fix = partial(fix_for, inputs=sample.inputs, has_labels=sample.targets is not None)
    refusal = Refusal(what="the model failed on a first batch", fix=fix)
    found = try_on_all_ranks(trial, [sample], run, refusal, evaluates=True)  # collective
    choice: tuple[str, str, str] = next(outcomes[0] for outcomes in found if outcomes)
    name, why, remedy = choice
    if not name:
        raise ModelError(f"rank 0: {why}", fix=remedy)
    log.info("task: %s, because of the first batch: %s", name, why)
    return name
