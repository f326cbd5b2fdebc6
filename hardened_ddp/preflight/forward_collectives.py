"""Collectives that a model calls within its own forward: SyncBatchNorm, losses that gather.

Owns finding them: the probe's forwards run under Watch, which sees each collective of torch as it
is dispatched. A rank that runs fewer forwards than the others would leave them waiting; one whose
tensor has another size, too, if that is a collective on all samples of a batch.
Does not own: what follows from it (equal_forwards.py, step/retry.py).
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch, take
from hardened_ddp.model.replica import ForwardCollectives
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group

_NAMESPACES = ("c10d", "_c10d_functional")
_NO_COLLECTIVES = ("wait_tensor", "monitored_barrier")
_OURS = Path(__file__).parent.parent
_TORCHS = Path(torch.__file__).parent


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


_WORDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_gather_into_tensor": "all_gather",
}


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


def calls_of(call: Callable[[], object], group: Group) -> list[str]:
    """Return the collectives that call makes. With one rank there is nothing to see."""
    watch = Watch()
    with watch if _CAN_WATCH and group.world_size > 1 else contextlib.nullcontext():
        call()
    return watch.calls


def find_collectives(trial: Trial, watch: Watch, batch: Batch) -> ForwardCollectives:
    """Find out more about a model whose forward on batch was watched. Collective: all ranks.

    Of a batch with one sample more, and in evaluation mode.
    """
    if not watch.shapes:  # it could not be watched
        return ForwardCollectives(tuple(watch.calls))
    with torch.no_grad(), Watch() as longer:
        trial.score(take(batch, [*range(batch.num_samples), 0]))
    trial.model.eval()
    try:
        with torch.no_grad(), Watch() as evaluation:
            trial.score(batch)
    finally:
        trial.model.train()
    return ForwardCollectives(
        tuple(watch.calls), longer.shapes != watch.shapes, bool(evaluation.calls)
    )


def find_in_evaluation(trial: Trial, batch: Batch) -> ForwardCollectives:
    """Find the collectives of a model in evaluation mode. Collective: all ranks, one batch."""
    watches = []
    for part in (batch, take(batch, [*range(batch.num_samples), 0])):
        with watching(trial.model, trial.group, calls_forward=True) as watch:
            trial.task.forward(trial.model.forward, part)
        watches.append(watch)
        if not watch.shapes:
            break
    calls, shapes = watches[0].calls, [watch.shapes for watch in watches]
    return ForwardCollectives(tuple(calls), shapes[0] != shapes[-1], in_evaluation=bool(calls))


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
