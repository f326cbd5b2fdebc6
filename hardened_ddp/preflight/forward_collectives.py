"""Collectives that a model calls within its own forward: SyncBatchNorm, losses that gather.

Every rank must run as many such forwards in each step, or the others wait for it: in the last step
of an epoch, for example. With some collectives, on tensors of the same size, too. This finds them
before training, as torch dispatches them, and refuses what can't give that: windows, evaluations
and settings. What a failed rank does is in step/retry.py.
"""

import contextlib
import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch, take
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.data.batches.sampler import WindowSampler, num_micro_batches
from hardened_ddp.errors import ModelError
from hardened_ddp.model.effects import Effects, Operators
from hardened_ddp.model.replica import NO_COLLECTIVES, ForwardCollectives
from hardened_ddp.preflight.trial import Refusal, Trial, try_on_all_ranks
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress

log = logging.getLogger(__name__)

_NAMESPACES = ("c10d", "_c10d_functional")
_NO_COLLECTIVES = ("wait_tensor", "monitored_barrier")
_OURS = Path(__file__).parent.parent
_TORCHS = Path(torch.__file__).parent


@contextlib.contextmanager
def watching(*, is_on: bool = True) -> Iterator[list[tuple[str, list[torch.Size]]]]:
    """Note the collectives that are called inside: name and place, and the sizes of their tensors.

    Not with one rank, nor of a compiled model. WHY not: torch does not compile under such a mode.
    """
    calls: list[tuple[str, list[torch.Size]]] = []

    def note(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func.namespace in _NAMESPACES and not func.__name__.startswith(_NO_COLLECTIVES):
            name = func.__name__.partition(".")[0].strip("_")
            calls.append((f"{name} in {_place()}", [tensor.shape for tensor in tensors_of(args)]))

    with Operators(note) if is_on else contextlib.nullcontext():
        yield calls


def find_collectives(
    trial: Trial, sample: Batch, refusal: Refusal, *, in_training: bool
) -> ForwardCollectives:
    """Find the collectives of forwards, in training and in evaluation. Collective: all ranks.

    in_training: the probe has seen some there. Raises as refusal says if such a forward fails; one
    in evaluation is tried later.
    """
    if trial.group.world_size == 1:
        return NO_COLLECTIVES
    if trial.is_compiled:
        syncs = any(isinstance(part, nn.SyncBatchNorm) for part in trial.model.modules())
        return ForwardCollectives(("allgather in SyncBatchNorm",)) if syncs else NO_COLLECTIVES

    def run(batch: Batch, effects: Effects) -> tuple[list[str], bool]:
        with torch.set_grad_enabled(trial.model.training):
            with watching() as seen:
                trial.score(batch.copied())
            if not seen:
                return [], False
            longer = take(batch, [*range(batch.num_samples), 0]).to(trial.group.device)
            with watching() as more:
                trial.score(longer)
        return [name for name, _ in seen], seen != more

    def find(refusal: Refusal | None, *, evaluates: bool) -> tuple[tuple[str, ...], bool]:
        everyone = try_on_all_ranks(trial, [sample], run, refusal, evaluates=evaluates)
        calls, fit_batch = next((found[0] for found in everyone if found), ([], False))
        return tuple(calls), fit_batch

    none: tuple[tuple[str, ...], bool] = (), False
    calls, fit_batch = find(refusal, evaluates=False) if in_training else none  # collective
    in_evaluation, fit_too = find(None, evaluates=True)  # collective
    return ForwardCollectives(calls, in_evaluation, fit_batch or fit_too)


def check_forwards(parts: Parts, progress: Progress) -> None:
    """Raise ModelError if ranks would run unequal forwards of such a model. The same on all ranks.

    Say once which collectives there are.
    """
    found = parts.replica.collectives
    if not (found or found.in_evaluation):
        return
    named = "; ".join(dict.fromkeys([*found.calls, *found.in_evaluation]))
    log.warning(
        "the model's forward runs collectives (%s): every rank runs the same number of forwards in "
        "each step and evaluation, and an error of one rank in it ends this attempt",
        named,
        extra=ON_EVERY_RANK,
    )
    if problem := next(_problems(parts, progress), None):
        raise ModelError(
            f"the model's forward runs collectives ({named}), in which all ranks wait for each "
            f"other: {problem[0]}",
            fix=problem[1],
        )


def _problems(parts: Parts, progress: Progress) -> Iterator[tuple[str, str]]:
    """Yield why ranks would run unequal forwards, and the fix."""
    found, sampler, loop = parts.replica.collectives, parts.sampler, parts.config.loop
    tests = parts.eval_loader if found.in_evaluation and loop.evaluates else None
    world_size = parts.group.world_size
    if loop.continue_on_error and (found or tests is not None):
        yield (
            "a sample that is left out would be missing in one rank's batch",
            "leave out --continue_on_error, and remove samples that can't be read from the dataset",
        )
    runs: list[tuple[str, int, int, str]] = []  # what, its samples, those of a batch, the fix
    if found and not isinstance(sampler, WindowSampler):
        yield (
            "the shards of a stream end at different steps on different ranks",
            "a map-style dataset with --drop_last, or the model without these collectives",
        )
    elif found:
        whole, batch_size = sampler.global_batch, sampler.batch_size
        if sampler.end >= whole:
            fix = f"--global_batch_size with a multiple of {world_size}, the number of ranks"
            runs.append(("each step", whole, batch_size, fix))
        fix = "--drop_last" if sampler.size >= whole else "a smaller --batch_size, and --drop_last"
        rests = [(sampler.end - start) % whole for start in (0, progress.cursor)]
        runs += [("the last step of an epoch", rest, batch_size, fix) for rest in rests if rest]
    if tests is not None:
        fix = "--eval_every 0; or call them in training only: if self.training"
        runs.append(("the test set", tests.size, tests.batch_size, fix))
    for what, size, batch_size, fix in runs:
        if text := _uneven(world_size, size, batch_size, fit_batch=found.fit_batch):
            yield f"{what} has {size} samples for {world_size} ranks: {text}", fix


def _uneven(world_size: int, size: int, batch_size: int, *, fit_batch: bool) -> str:
    """Say how forwards on size samples differ between ranks; empty if they don't."""
    most, least = -(-size // world_size), size // world_size  # of rank 0, and of the last one
    needed = num_micro_batches(size, batch_size=batch_size, world_size=world_size)
    if least < needed:
        return f"rank {world_size - 1} has {least} for the {needed} forwards of the others"
    if fit_batch and most != least:
        return (
            f"rank 0 would send {most} in its batches, rank {world_size - 1} {least}, and these "
            "collectives need equal sizes"
        )
    return ""


def _place() -> str:
    """Name the line of the caller's own code: neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if not path.is_relative_to(_TORCHS) and not path.is_relative_to(_OURS):
            return f"{path.name}:{frame.lineno}"
        if "batchnorm" in path.name:
            return "SyncBatchNorm"
    return "torch"
