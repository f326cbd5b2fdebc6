"""The state of a run, loaded into its parts on all ranks.

Owns: whether a state fits, how it gets from the rank that has it to the others, and where the run
then stands.
Does not own: what is in a state (saving.py), which checkpoint is taken (resume.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hardened_ddp.checkpoint.tensors import TensorSpec, differences, specs_of
from hardened_ddp.errors import CheckpointMismatchError
from hardened_ddp.model.optimizer_state import is_known, restore_state, state_problems
from hardened_ddp.preflight.equal_forwards import check_forwards
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.host_memory import keep_freed_memory
from hardened_ddp.step.memory import fit_into_memory
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress

Tensors = dict[str, torch.Tensor]
Read = Callable[[Sequence[str]], Tensors]
"""Gives the tensors of these names."""

MOVING = "moving."
"""Begins the names of tensors that a forward changes, and that only an attribute holds."""

_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Saved:
    """A state to load: what is in it, on all ranks, and its tensors on one of them.

    WHY not the tensors: each rank would hold the whole state beside the live one, to its end.
    """

    specs: Mapping[str, TensorSpec]
    meta: Mapping[str, Any]  # Any: JSON
    source: int = 0
    read: Read | None = None
    """Only on rank source."""


def share_state(
    group: Group,
    specs: Mapping[str, TensorSpec],
    meta: Mapping[str, Any],
    read: Read | None,
    *,
    source: int = 0,
) -> Saved:
    """Tell every rank of a state that rank source has. Collective: all ranks.

    read: see Saved; None on the other ranks.
    WHY not let every rank read a file: then each node would need it, and a network file system may
    show them different versions of it.
    """
    mine: list[dict[str, Any]] = [{}, {}]  # Any: JSON
    if group.launch.rank == source:
        layout = {name: [list(spec.shape), spec.dtype] for name, spec in specs.items()}
        mine = [layout, dict(meta)]
    layout, meta = group.gather_json(mine)[source]  # collective
    found = {name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in layout.items()}
    return Saved(found, meta, source, read)


def receive(group: Group, saved: Saved, names: Sequence[str], device: torch.device) -> Tensors:
    """Give every rank the tensors of these names, on device. Collective: all ranks.

    Raises MainRankError on every rank if rank 0 can't read them.
    """
    received: Tensors = {}
    for chunk in _chunks(saved.specs, names):
        own = _read_on_source(group, saved, chunk)  # collective
        for name in chunk:
            shape, dtype = saved.specs[name]
            tensor = own.pop(name, None)
            if tensor is None:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            received[name] = tensor = tensor.to(device).contiguous()
            # WHY bytes: gloo does not move every dtype.
            flat = tensor.reshape(-1).view(torch.uint8)
            group.broadcast_(flat, source=saved.source)  # collective
    return received


def _chunks(specs: Mapping[str, TensorSpec], names: Sequence[str]) -> Iterator[list[str]]:
    """Yield names in groups of about _CHUNK_BYTES, so that little is in memory twice."""
    chunk: list[str] = []
    size_bytes = 0
    for name in names:
        chunk.append(name)
        size_bytes += math.prod(specs[name].shape) * getattr(torch, specs[name].dtype).itemsize
        if size_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
    if chunk:
        yield chunk


def _read_on_source(group: Group, saved: Saved, names: Sequence[str]) -> Tensors:
    """Read tensors on rank saved.source; the others get none. Collective: all ranks."""
    found: Tensors = {}

    def read() -> None:
        found.update({} if saved.read is None else saved.read(names))

    if saved.source:  # that rank has them in its memory
        read()
    else:
        group.run_on_main(read, what="reading the checkpoint")  # collective
    return found


def check_fits(parts: Parts, saved: Saved) -> None:
    """Raise CheckpointMismatchError listing how the checkpoint differs. Rank-local."""
    meta = saved.meta
    live = parts.replica.module.state_dict()
    problems = differences(
        specs_of({f"model.{name}": tensor for name, tensor in live.items()}),
        {name: spec for name, spec in saved.specs.items() if name.startswith("model.")},
    )
    if meta["optimizer"] != type(parts.optimizer).__name__:
        problems.append(
            f"optimizer: checkpoint has {meta['optimizer']}, this run uses "
            f"{type(parts.optimizer).__name__}"
        )
    else:
        rest = meta.get("optimizer_state", {})
        problems += state_problems(parts.schedule, parts.replica.trainable, rest)
    if parts.schedule.is_bound and parts.length.total > meta["total_steps"]:
        problems.append(
            f"lr_schedule: its scheduler was made for {meta['total_steps']} steps, and the run now "
            f"has {parts.length.total}"
        )
    if meta["dataset_fingerprint"] != parts.data.fingerprint:
        problems.append(
            f"dataset: the checkpoint saw {meta['dataset']} {meta['dataset_fingerprint'][:12]}, "
            f"now it is {parts.config.data.dataset} {parts.data.fingerprint[:12]}: the order of "
            "samples would change"
        )
    problems += parts.sampler.problems_with(meta.get("stream"))
    task = meta.get("task", {"name": "classification"})["name"]
    if task != parts.task.name:
        problems.append(
            f"task: the checkpoint was trained with {task}, now it is {parts.task.name}"
        )
    if problems:
        raise CheckpointMismatchError(
            f"the checkpoint of step {meta['step']} belongs to another run: " + "; ".join(problems),
            fix="leave out the flags that differ from the settings of that run (its config.yaml); "
            "or start a new run: without --resume, with another --run_name",
        )


def begin(parts: Parts, saved: Saved | None) -> Progress:
    """Say where the run stands, with the parts in that state. Collective: all ranks.

    A fresh run tries what memory holds; a resumed one knows it, and all else.
    """
    parts.group.tracker.begin("loading the checkpoint" if saved else "allocating optimizer state")
    if saved is None:
        check_forwards(parts, Progress())
        progress = Progress(most_samples=fit_into_memory(parts))  # collective
        parts.replica.attributes.reset()  # the trials are over
    else:
        progress = restore(parts, saved)  # collective
        check_forwards(parts, progress)
    keep_freed_memory(parts.device.type)  # WHY now: what each step frees, the next one takes
    return progress


def has_all_that_moves(parts: Parts, saved: Saved) -> bool:
    """Return whether a state has all that is known to move. The same on all ranks.

    What began to move after it was saved, and only an attribute holds, is not in it.
    """
    buffers = parts.replica.buffers
    hidden = [name for name in buffers.to_save(()) if not buffers.are_saved([name])]
    is_here = all(f"{MOVING}{name}" in saved.specs for name in hidden)
    return all(parts.group.gather_json(is_here))  # collective


@torch.no_grad()
def restore(parts: Parts, saved: Saved) -> Progress:
    """Load a state; it goes over NCCL where there is one. Collective: all ranks.

    Raises CheckpointMismatchError; then nothing was loaded. Needs no more memory than the first
    step: the weights are let go before the optimizer's state comes, and that is not copied.
    """
    check_fits(parts, saved)
    group, meta = parts.group, saved.meta
    is_simple, cpu = is_known(parts.optimizer), torch.device("cpu")
    device = group.device if group.backend == "nccl" else cpu
    if is_simple:
        parts.optimizer.state.clear()  # WHY: a state of before, at a rollback, would stay beside it
    names = [name for name in saved.specs if name.startswith("model.")]
    model = receive(group, saved, names, device)  # collective
    parts.replica.module.load_state_dict({n.removeprefix("model."): t for n, t in model.items()})
    del model
    if names := [name for name in saved.specs if name.startswith(MOVING)]:
        moving = receive(group, saved, names, device)  # collective
        parts.replica.buffers.load({n.removeprefix(MOVING): t for n, t in moving.items()})
    rest = [name for name in saved.specs if not name.startswith(("model.", MOVING))]
    large = [name for name in rest if is_simple and saved.specs[name].shape]
    small = [name for name in rest if name not in set(large)]  # such as step counts on the host
    state = receive(group, saved, large, device)  # collective
    state |= receive(group, saved, small, cpu)  # collective
    restore_state(parts.schedule, parts.replica.trainable, state, meta.get("optimizer_state", {}))
    parts.replica.attributes.load(meta.get("attributes", {}))
    if parts.precision.scaler is not None:
        parts.precision.restore(dict(meta["precision"]))
    parts.sampler.restore(meta.get("stream"), epoch=int(meta["epoch"]), cursor=int(meta["cursor"]))
    return Progress(
        step=int(meta["step"]),
        epoch=int(meta["epoch"]),
        cursor=int(meta["cursor"]),
        # Checkpoints of earlier versions knew the accuracy only; -1: none yet.
        best_metric=meta.get(
            "best_metric", "accuracy" if meta.get("best_accuracy", -1) >= 0 else ""
        ),
        best_value=float(meta.get("best_value", meta.get("best_accuracy", 0.0))),
        stop_metric=str(meta.get("stop_metric", "")),
        stop_value=float(meta.get("stop_value", 0.0)),
        num_worse=int(meta.get("num_worse", 0)),
        num_errors=int(meta["num_errors"]),
        most_samples=int(meta["most_samples"]),
    )
