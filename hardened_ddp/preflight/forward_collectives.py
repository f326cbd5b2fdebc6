"""Collectives that a model calls within its own forward: SyncBatchNorm, losses that gather.

Every rank must run as many such forwards in each step, or the others wait for it: in the last step
of an epoch, for example. With some collectives, on tensors of the same size, too. This finds them
before training, as torch dispatches them, and refuses what can't give that: windows, evaluations
and settings. What a failed rank does is in step/retry.py.
"""

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch, take
from hardened_ddp.data.batches.loader import EvalLoader
from hardened_ddp.data.batches.sampler import WindowSampler, num_micro_batches, share_of
from hardened_ddp.errors import ModelError
from hardened_ddp.model.effects import Effects
from hardened_ddp.model.replica import NO_COLLECTIVES, ForwardCollectives
from hardened_ddp.preflight.trial import Refusal, Trial, try_on_all_ranks
from hardened_ddp.ranks.group import Group
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress
from hardened_ddp.task.output import fix_for_gradients

log = logging.getLogger(__name__)

_NAMESPACES = ("c10d", "_c10d_functional")
_NO_COLLECTIVES = ("wait_tensor", "monitored_barrier")
_WORDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_gather_into_tensor": "all_gather",
}
_OURS = Path(__file__).parent.parent
_TORCHS = Path(torch.__file__).parent

CANT_EVALUATE = Refusal(
    what="the test set can't be evaluated",
    fix=lambda error: fix_for_gradients(error) or "the whole traceback is in this rank's log",
)
_LEAVE_OUT = "leave out --continue_on_error, and remove samples that can't be read from the dataset"
_IN_TRAINING_ONLY = "call them in training only: if self.training"


_CAN_WATCH = hasattr(torch.utils, "_python_dispatch")
_Mode: Any = torch.utils._python_dispatch.TorchDispatchMode if _CAN_WATCH else object


class RefusedCollectiveError(Exception):
    """A collective was called where ranks must not wait for each other."""


class Watch(_Mode):  # type: ignore[misc]  # Any: torch's, which is private
    """Notes the collectives that are called inside.

    refuses: raise RefusedCollectiveError in place of them.
    """

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.refuses = refuses
        self.calls: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        """Of the tensors that are sent and received."""

    def __torch_dispatch__(
        self,
        func: Any,  # Any: as torch declares it
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace in _NAMESPACES and not func.__name__.startswith(_NO_COLLECTIVES):
            name = func.__name__.partition(".")[0].strip("_")
            self.calls.append(f"{_WORDS.get(name, name)} in {_place()}")
            self.shapes += [tuple(tensor.shape) for tensor in _tensors_in(args)]
            if self.refuses:
                raise RefusedCollectiveError(self.calls[-1])
        return func(*args, **(kwargs or {}))


def calls_of(call: Callable[[], object], group: Group) -> list[str]:
    """Return the collectives that call makes. With one rank there is nothing to see."""
    watch = Watch()
    with watch if _CAN_WATCH and group.world_size > 1 else contextlib.nullcontext():
        call()
    return watch.calls


@contextlib.contextmanager
def watching(
    module: nn.Module, group: Group, *, calls_forward: bool = False, refuses: bool = False
) -> Iterator[Watch]:
    """Watch a forward of module inside. With one rank there is nothing to see.

    calls_forward: what is called is its method forward, which is not what Module.compile compiles.
    refuses: the first collective raises instead, so that the forward is rank-local.
    """
    watch = Watch(refuses=refuses)
    # WHY not of a compiled model: torch does not compile under such a mode
    is_compiled = any(
        getattr(part, "_compiled_call_impl", None)
        for part in module.modules()
        if not (calls_forward and part is module)
    )
    can_watch = _CAN_WATCH and not is_compiled and group.world_size > 1
    with watch if can_watch else contextlib.nullcontext():
        yield watch
    has_sync_norm = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
    if not can_watch and group.world_size > 1 and module.training and has_sync_norm:
        watch.calls.append("all_gather in SyncBatchNorm")


def find_collectives(trial: Trial, watch: Watch, batch: Batch) -> ForwardCollectives:
    """Find out more about a model whose forward on batch was watched. Collective: all ranks.

    Of a batch with one sample more, and in evaluation mode.
    """
    if not watch.shapes:  # it could not be watched
        return ForwardCollectives(tuple(watch.calls))
    with torch.no_grad(), Watch() as longer:
        trial.score(_with_one_more(batch))
    trial.model.eval()
    try:
        with torch.no_grad(), Watch() as evaluation:
            trial.score(batch)
    finally:
        trial.model.train()
    return ForwardCollectives(
        tuple(watch.calls), longer.shapes != watch.shapes, bool(evaluation.calls)
    )


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


def _problem(parts: Parts, progress: Progress) -> tuple[str, str] | None:
    """Return why ranks would run unequal forwards, and the fix; None if they don't."""
    config, sampler, found = parts.config, parts.sampler, parts.replica.collectives
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
        if text := _uneven(world_size, size, sampler.batch_size, fit_batch=found.fit_batch):
            fix = "--drop_last"
            if when == "each step":
                fix = f"--global_batch_size with a multiple of {world_size}, the number of ranks"
            elif sampler.size < sampler.global_batch:
                fix = "a smaller --batch_size, and --drop_last"
            return f"{when} has {size} samples for {world_size} ranks: {text}", fix
    loader = parts.eval_loader
    if loader is None or not config.loop.eval_every or not found.in_evaluation:
        return None
    text = _uneven_in(loader, world_size, fit_batch=found.fit_batch)
    return (text, f"--eval_every 0, or {_IN_TRAINING_ONLY}") if text else None


def _try_a_sample(trial: Trial, loader: EvalLoader, *, channels_last: bool) -> ForwardCollectives:
    """Find the collectives of a forward on one of the first test samples. Collective.

    WHY the same sample on all ranks: a rank may have none of its own.
    """
    indices = torch.arange(min(4, loader.size))  # one of them is used
    batches: list[Batch] = []
    watches: list[Watch] = []

    def read(loader: EvalLoader, effects: Effects) -> bool:
        batches.extend(loader.reader.batches(lambda: iter([(0, indices)])))
        return batches[0].num_samples > 0

    def run(batch: Batch, effects: Effects) -> None:
        one = take(batch, [0]).to(trial.group.device, channels_last=channels_last)
        with torch.no_grad(), trial.precision.autocast():
            for part in (one, _with_one_more(one)):
                with watching(trial.model, trial.group, calls_forward=True) as watch:
                    trial.task.forward(trial.model.forward, part)  # collective
                watches.append(watch)
                if not watch.shapes:
                    break

    is_read = try_on_all_ranks(trial, [loader], read, CANT_EVALUATE)  # collective
    if any(flags != [True] for flags in is_read):  # the evaluation will report it
        return NO_COLLECTIVES
    try_on_all_ranks(trial, batches, run, CANT_EVALUATE, evaluates=True)  # collective
    calls = tuple(watches[0].calls)
    return ForwardCollectives(calls, watches[0].shapes != watches[-1].shapes, bool(calls))


def _refusal(found: ForwardCollectives, text: str, fix: str) -> ModelError:
    calls = "; ".join(dict.fromkeys(found.calls))
    return ModelError(
        f"the model's forward runs collectives ({calls}), in which all ranks wait for each "
        f"other: {text}",
        fix=fix,
    )


def _uneven_in(loader: EvalLoader, world_size: int, *, fit_batch: bool) -> str:
    """Say how forwards on a test set differ between ranks; empty if they don't."""
    text = _uneven(world_size, loader.size, loader.batch_size, fit_batch=fit_batch)
    return text and f"the test set has {loader.size} samples for {world_size} ranks: {text}"


def _uneven(world_size: int, size: int, batch_size: int, *, fit_batch: bool) -> str:
    """Say how forwards on size samples differ between ranks; empty if they don't."""
    shares = [share_of(size, rank=rank, world_size=world_size) for rank in (0, world_size - 1)]
    most, least = (stop - start for start, stop in shares)  # the lower ranks have the longer ones
    needed = num_micro_batches(size, batch_size=batch_size, world_size=world_size)
    if least < needed:
        return f"rank {world_size - 1} has {least} for the {needed} forwards of the others"
    if fit_batch and most != least:
        return (
            f"rank 0 would send {most} in its batches, rank {world_size - 1} {least}, and these "
            "collectives need equal sizes"
        )
    return ""


def _with_one_more(batch: Batch) -> Batch:
    return take(batch, [*range(batch.num_samples), 0])


def _tensors_in(value: Any) -> list[torch.Tensor]:  # Any: arguments of a collective
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors_in(part)]
    return []


def _place() -> str:
    """Name the line of the caller's own code: neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if not path.is_relative_to(_TORCHS) and not path.is_relative_to(_OURS):
            return f"{path.name}:{frame.lineno}"
        if "batchnorm" in path.name:
            return "SyncBatchNorm"
    return "torch"
