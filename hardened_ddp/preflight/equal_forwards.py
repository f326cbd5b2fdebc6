"""A model with collectives in forward needs as many forwards on each rank, in every step.

Owns the check of that before training, and before the command evaluate: which windows, evaluations
and settings can't give it. Then the run is refused with what to change, where it would hang in the
last step of an epoch.
Does not own: finding the collectives (forward_collectives.py), the number of micro-batches, which
is the same on all ranks that have samples for it (data/batches/sampler.py).
"""

import logging

import torch

from hardened_ddp.data.batches.batch import Batch, take
from hardened_ddp.data.batches.loader import EvalLoader
from hardened_ddp.data.batches.sampler import WindowSampler, num_micro_batches, share_of
from hardened_ddp.errors import ModelError
from hardened_ddp.model.effects import Effects
from hardened_ddp.model.replica import NO_COLLECTIVES, ForwardCollectives
from hardened_ddp.preflight.forward_collectives import find_in_evaluation
from hardened_ddp.preflight.trial import Refusal, Trial, try_on_all_ranks
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress
from hardened_ddp.task.output import fix_for_gradients

log = logging.getLogger(__name__)

_TRIED = 4  # samples, of which one is used to look for collectives


def check_forwards(parts: Parts, progress: Progress) -> None:
    """Raise ModelError if ranks would run unequal forwards of such a model. The same on all ranks.

    Say once which collectives there are.
    """
    found = parts.replica.collectives
    if not found or parts.group.world_size == 1:
        return
    log.warning(
        "the model's forward runs collectives (%s): every rank runs the same number of forwards in "
        "each step, and an error of one rank in it ends this attempt",
        "; ".join(dict.fromkeys(found.calls)),
        extra=ON_EVERY_RANK,
    )
    if problem := _problem(parts, progress):
        raise _refusal(found, *problem)


def _problem(parts: Parts, progress: Progress) -> tuple[str, str] | None:
    """Return why ranks would run unequal forwards, and the fix; None if they don't."""
    config, sampler, collectives = parts.config, parts.sampler, parts.replica.collectives
    if config.data.batch_size is None:
        return (
            "the search of --batch_size auto ends differently on each rank",
            "give a --batch_size; --max_steps 20 shows soon whether it fits",
        )
    if config.loop.continue_on_error:
        return ("a sample that is left out would be missing in one rank's batch", _LEAVE_OUT)
    if parts.train_loader.split is not None:
        return ("--split_by_length cuts a micro-batch by its samples", "--no_split_by_length")
    if not isinstance(sampler, WindowSampler):
        return (
            "the shards of a stream end at different steps on different ranks",
            "a map-style dataset with --drop_last, or the model without these collectives",
        )
    world_size = parts.group.world_size
    sizes = {sampler.global_batch: "each step"} if sampler.end >= sampler.global_batch else {}
    for start in (0, progress.cursor):
        if rest := (sampler.end - start) % sampler.global_batch:
            sizes.setdefault(rest, "the last step of an epoch")
    for size, when in sizes.items():
        if text := _uneven(world_size, size, sampler.batch_size, fit_batch=collectives.fit_batch):
            fix = _fix_of(sampler, when, world_size)
            return f"{when} has {size} samples for {world_size} ranks: {text}", fix
    return _problem_of_evaluation(parts)


_LEAVE_OUT = "leave out --continue_on_error, and remove samples that can't be read from the dataset"


def _fix_of(sampler: WindowSampler, when: str, world_size: int) -> str:
    if when == "each step":
        return f"--global_batch_size with a multiple of {world_size}, the number of ranks"
    if sampler.size < sampler.global_batch:
        return "a smaller --batch_size, and --drop_last"
    return "--drop_last"


def _problem_of_evaluation(parts: Parts) -> tuple[str, str] | None:
    config, loader = parts.config, parts.eval_loader
    found = parts.replica.collectives
    if loader is None or not config.loop.eval_every or not found.in_evaluation:
        return None
    text = _uneven_in(loader, parts.group.world_size, fit_batch=found.fit_batch)
    return (text, f"--eval_every 0, or {_IN_TRAINING_ONLY}") if text else None


def check_equal_evaluation(
    trial: Trial, loader: EvalLoader, *, channels_last: bool, leaves_out: bool, instead: str
) -> None:
    """Raise ModelError if ranks would run unequal forwards in an evaluation. Collective: all ranks.

    For a model that no probe has seen in it. It runs a sample through it, where that can matter.
    leaves_out: samples that can't be read. instead: what the user can do.
    """
    world_size = trial.group.world_size
    is_even = loader.size % world_size == 0 and not leaves_out
    if world_size == 1 or is_even:
        return
    found = _try_a_sample(trial, loader, channels_last=channels_last)  # collective
    if not found:
        return
    text = _uneven_in(loader, world_size, fit_batch=found.fit_batch)
    fix = f"{instead}; or {_IN_TRAINING_ONLY}"
    if leaves_out and not text:
        text, fix = "a sample that is left out would be missing in one rank's batch", _LEAVE_OUT
    if text:
        raise _refusal(found, text, fix)


def _try_a_sample(trial: Trial, loader: EvalLoader, *, channels_last: bool) -> ForwardCollectives:
    """Find the collectives of a forward on one of the first test samples. Collective.

    WHY the same sample on all ranks: a rank may have none of its own.
    """
    indices = torch.arange(min(_TRIED, loader.size))
    batches: list[Batch] = []
    found = NO_COLLECTIVES

    def read(loader: EvalLoader, effects: Effects) -> bool:
        batches.extend(loader.reader.batches(lambda: iter([(0, indices)])))
        return batches[0].num_samples > 0

    def run(batch: Batch, effects: Effects) -> None:
        nonlocal found
        one = take(batch, [0]).to(trial.group.device, channels_last=channels_last)
        with torch.no_grad(), trial.precision.autocast():
            found = find_in_evaluation(trial, one)  # collective

    is_read = try_on_all_ranks(trial, [loader], read, CANT_EVALUATE)  # collective
    if all(flags == [True] for flags in is_read):  # else the evaluation will report it
        try_on_all_ranks(trial, batches, run, CANT_EVALUATE, evaluates=True)  # collective
    return found


CANT_EVALUATE = Refusal(
    what="the test set can't be evaluated",
    fix=lambda error: fix_for_gradients(error) or "the whole traceback is in this rank's log",
)


def _refusal(found: ForwardCollectives, text: str, fix: str) -> ModelError:
    calls = "; ".join(dict.fromkeys(found.calls))
    return ModelError(
        f"the model's forward runs collectives ({calls}), in which all ranks wait for each "
        f"other: {text}",
        fix=fix,
    )


_IN_TRAINING_ONLY = "call them in training only: if self.training"


def _uneven_in(loader: EvalLoader, world_size: int, *, fit_batch: bool) -> str:
    """Say how forwards on a test set differ between ranks; empty if they don't."""
    text = _uneven(world_size, loader.size, loader.batch_size, fit_batch=fit_batch)
    return text and f"the test set has {loader.size} samples for {world_size} ranks: {text}"


def _uneven(world_size: int, size: int, batch_size: int, *, fit_batch: bool) -> str:
    """Say how forwards on size samples differ between ranks; empty if they don't."""
    lengths = [
        stop - start
        for start, stop in (
            share_of(size, rank=rank, world_size=world_size) for rank in range(world_size)
        )
    ]
    needed = num_micro_batches(size, batch_size=batch_size, world_size=world_size)
    if lengths[-1] < needed:
        return f"rank {world_size - 1} has {lengths[-1]} for the {needed} forwards of the others"
    if fit_batch and lengths[0] != lengths[-1]:
        return (
            f"rank 0 would send {lengths[0]} in its batches, rank {world_size - 1} {lengths[-1]}, "
            "and these collectives need equal sizes"
        )
    return ""
