"""The state of a run: what is in it, how it is saved, and how it is loaded on all ranks.

Owns when a checkpoint is due, and the names inside of one: model.NAME, optimizer.PARAMETER.KEY.
Rank 0 writes, in the background; a failed write is a warning, and older checkpoints stay. There is
nothing of a single rank in a checkpoint, no random state, and the sampler state of streams only:
the rest follows from seed, step and cursor. Also whether a state fits, and how others get it.
Does not own: how it gets to disk (checkpoint/), which checkpoint is taken (run_folder.py).
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Protocol

import torch

from hardened_ddp.checkpoint.folder import Best
from hardened_ddp.checkpoint.store import CheckpointStore, CheckpointWriter, WriteCost
from hardened_ddp.checkpoint.tensors import TensorSpec, differences, specs_of
from hardened_ddp.errors import ANY_FAILURE, CheckpointError, CheckpointMismatchError
from hardened_ddp.model.average import AVERAGE
from hardened_ddp.model.moving_buffers import NO_COPIES, Copies
from hardened_ddp.model.optimizer import allocate_state
from hardened_ddp.model.schedule import PREFIX, is_known, restore_state, save_state, state_problems
from hardened_ddp.preflight.forward_collectives import check_forwards
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.resources import keep_freed_memory
from hardened_ddp.settings.config import RunConfig
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
Read = Callable[[Sequence[str]], Tensors]  # gives the tensors of these names

# Begins the names of tensors that a forward changes, and that only an attribute holds.
MOVING = "moving."
_CHUNK_BYTES = 16 * 2**20

TRAINING_SHARE = 0.01  # of training's time that saving may take
DISK_SHARE = 0.1  # of the disk's time: others use it, and each write wears it
MOST_S = 600.0  # until the first save, whatever its size: a loss of more would be a surprise

# Of a disk, in bytes/s, and what a small write takes: assumed until a first write was measured.
_SPEED = 500e6
_LEAST_S = 0.01

OTHER_THREAD_S = 600.0  # how long a thread that must save waits for another one that does


@dataclass(frozen=True, slots=True)
class Saved:
    """A state to load: what is in it, on all ranks, and its tensors on one of them.

    WHY not the tensors: each rank would hold the whole state beside the live one, to its end.
    """

    specs: Mapping[str, TensorSpec]
    meta: Mapping[str, Any]  # Any: JSON
    source: int = 0
    read: Read | None = None  # only on rank source


def share_state(group: Group, mine: Saved | None) -> Saved:
    """Tell every rank of a state that one rank has; the others give None. Collective: all ranks.

    WHY not let every rank read a file: then each node would need it, and a network file system may
    show them different versions of it.
    """
    told: list[Any] = []  # Any: JSON
    if mine is not None:
        told = [{name: list(spec) for name, spec in mine.specs.items()}, dict(mine.meta)]
    everyone = group.gather_json(told)  # collective
    source = next(rank for rank, state in enumerate(everyone) if state)
    layout, meta = everyone[source]
    specs = {name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in layout.items()}
    return Saved(specs, meta, source, None if mine is None else mine.read)


def receive(group: Group, saved: Saved, names: Sequence[str], device: torch.device) -> Tensors:
    """Give every rank the tensors of these names, on device. Collective: all ranks.

    Raises MainRankError on every rank if rank 0 can't read them.
    """
    received: Tensors = {}
    failures: list[BaseException] = []
    for chunk in _chunks(saved.specs, names):
        own: Tensors = {}
        if saved.read is not None and not failures:
            try:
                own = saved.read(chunk)
            except ANY_FAILURE as error:  # WHY broad, and no raise: the others wait for the rest
                failures.append(error)
        for name in chunk:
            shape, dtype = saved.specs[name]
            tensor = own.pop(name, None)
            if tensor is None:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            received[name] = tensor = tensor.to(device).contiguous()
            # WHY bytes: gloo does not move every dtype.
            flat = tensor.reshape(-1).view(torch.uint8)
            group.broadcast_(flat, source=saved.source)  # collective

    def check() -> None:
        if failures:
            raise failures[0]

    if saved.source:  # that rank had them in its memory
        check()
    else:  # WHY once, at the end: a vote for each chunk takes minutes for a large state
        group.run_on_main(check, what="reading the checkpoint")  # collective
    return received


def _chunks(specs: Mapping[str, TensorSpec], names: Sequence[str]) -> Iterator[list[str]]:
    """Yield names in groups of about _CHUNK_BYTES, so that little is in memory twice."""
    specs_here = (specs[name] for name in names)
    sizes = (math.prod(s.shape) * getattr(torch, s.dtype).itemsize for s in specs_here)
    ends = zip(names, accumulate(sizes), strict=True)
    for _, chunk in groupby(ends, key=lambda end: end[1] // _CHUNK_BYTES):
        yield [name for name, _ in chunk]


def check_fits(parts: Parts, saved: Saved) -> None:
    """Raise CheckpointMismatchError listing how the checkpoint differs. Rank-local."""
    meta = saved.meta
    live = {f"model.{name}": t for name, t in parts.replica.module.state_dict().items()}
    left_out = _base_names(parts) - saved.specs.keys()
    problems = differences(
        specs_of({name: tensor for name, tensor in live.items() if name not in left_out}),
        {name: spec for name, spec in saved.specs.items() if name.startswith("model.")},
    )
    averages = {name: spec for name, spec in saved.specs.items() if name.startswith(AVERAGE)}
    if parts.average is not None and averages:
        problems += differences(specs_of(parts.average.tensors()), averages)
    optimizer, task = type(parts.optimizer).__name__, parts.task.name
    trained = {"optimizer": (meta["optimizer"], optimizer), "task": (meta["task"]["name"], task)}
    for what, (there, here) in trained.items():
        if there != here:
            problems.append(f"{what}: the checkpoint was trained with {there}, now it is {here}")
    if meta["optimizer"] == optimizer:
        live_names = parts.gradients.local.by_name
        problems += state_problems(parts.schedule, live_names, meta["optimizer_state"])
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
    problems += parts.sampler.problems_with(meta["stream"])
    if problems:
        raise CheckpointMismatchError(
            f"the checkpoint of step {meta['step']} belongs to another run: " + "; ".join(problems),
            fix="leave out the flags that differ from the settings of that run (its config.yaml); "
            "or start a new run: without --resume, with another --run_name",
        )


def begin(parts: Parts, saved: Saved | None) -> Progress:
    """Say where the run stands, with the parts in that state. Collective: all ranks."""
    parts.group.tracker.begin("loading the checkpoint" if saved else "allocating optimizer state")
    if saved is None:
        progress = Progress()
        check_forwards(parts, progress)
        allocate_state(parts.optimizer)
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
    replica = parts.replica
    hidden = replica.buffers.to_save().keys() - replica.module.state_dict().keys()
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

    def get(prefix: str) -> Tensors:
        names = [name for name in saved.specs if name.startswith(prefix)]
        found = receive(group, saved, names, device)  # collective
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    if is_simple:
        parts.optimizer.state.clear()  # WHY: a state of before, at a rollback, would stay beside it
    # not strict with a base: check_fits has compared all names
    parts.replica.module.load_state_dict(get("model."), strict=not parts.base)  # collective
    if moving := get(MOVING):  # collective
        parts.replica.buffers.load(moving)
    if parts.average is not None:
        averages = get(AVERAGE)  # collective
        if not averages and meta["step"]:
            log.info("the checkpoint has no averages: --ema begins with its weights")
        parts.average.load(averages)
        del averages
    other = ("model.", MOVING, AVERAGE)
    rest = [name for name in saved.specs if not name.startswith(other)]
    large = [name for name in rest if is_simple and saved.specs[name].shape]
    small = [name for name in rest if name not in set(large)]  # such as step counts on the host
    state = receive(group, saved, large, device)  # collective
    state |= receive(group, saved, small, cpu)  # collective
    restore_state(parts.schedule, parts.gradients.local.by_name, state, meta["optimizer_state"])
    parts.replica.attributes.load(meta.get("attributes", {}))
    if parts.precision.scaler is not None:
        parts.precision.restore(dict(meta["precision"]))
    parts.sampler.restore(meta["stream"], epoch=meta["epoch"], cursor=meta["cursor"])
    # WHY if, and get: a checkpoint of an earlier version may have fewer
    known = (field.name for field in fields(Progress) if field.name in meta)
    return Progress(**{name: meta[name] for name in known})


def save_interval_s(size_bytes: int, measured: WriteCost | None) -> float:
    """Return how long to wait between two saves, so that they take at most a share of the time.

    size_bytes: of a state; it counts until a first write was measured.
    """
    if measured is not None:
        return max(measured.training_s / TRAINING_SHARE, measured.disk_s / DISK_SHARE)
    return min(MOST_S, (_LEAST_S + size_bytes / _SPEED) / TRAINING_SHARE)


class HasStep(Protocol):
    """How far a run is, or a loop of the user's own."""

    step: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint of a run, or of a loop of the user's own, holds: asked at each save."""

    tensors: Callable[[], Tensors]  # names the live ones; nothing is copied
    meta: Callable[[Any], dict[str, Any]]  # the numbers for the progress given to save; JSON
    # Of those tensors the ones that may change at any moment: on a GPU they are copied first.
    volatile: Callable[[Tensors], set[str]]


def contents_of(parts: Parts) -> Contents:
    def volatile(tensors: Tensors) -> set[str]:
        """Name what a forward may change, and the learning rate, which is set before it."""
        buffers = parts.replica.buffers
        names = {f"model.{name}" for name in (*buffers.may_move, *buffers.known)}
        names |= {f"{MOVING}{name}" for name in buffers.known}
        return names | {name for name in tensors if name.startswith(f"{PREFIX}groups.")}

    return Contents(partial(collect_tensors, parts), partial(collect_meta, parts), volatile)


class Saver:
    """Writes checkpoints of one run. On ranks other than 0 all but save_in_need do nothing."""

    def __init__(
        self, contents: Contents, store: CheckpointStore, *, group: Group, config: RunConfig
    ) -> None:
        self.contents = contents
        # The weights are being copied from a GPU: call before_update before they change.
        self.is_copying = False
        self._tracker = group.tracker
        self._writer = CheckpointWriter(store) if group.launch.is_main else None
        self._store = store
        self._saved_step = self._needed_step = -1
        self._in_need = threading.Lock()
        # Due after these epochs, and after these steps or, without those, when is_time says so.
        self.due_steps = _multiples_of(config.checkpoint_every_steps)
        self.due_epochs = _multiples_of(config.checkpoint_every_epochs)
        self._is_auto = config.checkpoint_every_steps is None
        self._is_wanted = False  # one was due while another was under way
        self._began_at = time.monotonic()
        if self._writer is not None:
            self._size_bytes = sum(tensor.nbytes for tensor in contents.tensors().values())
            if group.device.type == "cuda" and (self._is_auto or self.due_steps or self.due_epochs):
                self._writer.pin_ahead(self._size_bytes)

    def is_time(self) -> bool:
        """Say whether a checkpoint is due by the clock, or became due while one was being written.

        Rank-local: False but on rank 0.
        """
        if self._writer is None or self._writer.is_busy:
            return False
        if self._is_wanted or not self._is_auto:
            return self._is_wanted
        interval_s = save_interval_s(self._size_bytes, self._writer.cost)
        return time.monotonic() - self._began_at >= interval_s

    def save(self, progress: HasStep, *, best: Best | None = None) -> None:
        """Start writing the state of this step boundary; training goes on beside it. Rank-local."""
        if self._writer is None:
            return
        # WHY also for one that fails: the next steps would try again, and warn again
        self._is_wanted, self._began_at = False, time.monotonic()
        with self._tracker.within(Phase.CHECKPOINT):
            try:
                if best is not None:
                    self._writer.close()  # WHY: a best state must not be passed over as busy
                tensors = self.contents.tensors()
                self._is_wanted = not self._writer.submit(
                    progress.step,
                    tensors=tensors,
                    meta=self.contents.meta(progress),
                    volatile=self.contents.volatile(tensors),
                    best=best,
                )
                if not self._is_wanted:
                    self.is_copying = self._writer.is_copying
                    self._saved_step = progress.step
            except CheckpointError as error:
                self._warn(error)

    def save_last(self, progress: HasStep) -> None:
        """Write the state and wait until it is on the disk. Rank-local. Raises CheckpointError."""
        if self._writer is not None:
            with self._tracker.within(Phase.CHECKPOINT):
                self.save_in_need(progress)

    def save_in_need(self, progress: HasStep, *, tensors: Tensors | None = None) -> None:
        """Do as save_last on whatever rank this is. Rank-local. Raises CheckpointError.

        tensors: those of the state; None: the live ones.
        """
        # WHY: the main thread may have lost another rank while the last resort, after a signal, or
        # the watch for hangs saves the same step. Both would fail, and whoever is second would end
        # the process while the first one writes.
        if not self._in_need.acquire(timeout=OTHER_THREAD_S):
            raise CheckpointError(f"another thread has been writing for {OTHER_THREAD_S:g} s")
        try:
            if self._needed_step != progress.step:
                self._write_now(progress, tensors)
                self._needed_step = progress.step
        finally:
            self._in_need.release()

    def _write_now(self, progress: HasStep, tensors: Tensors | None) -> None:
        if self._writer is not None:
            self._writer.close()
            if self._saved_step == progress.step and self._writer.poll() is None:
                return  # else it failed in the background: once more, and now it must not be silent
        self._store.write(
            progress.step,
            tensors=self.contents.tensors() if tensors is None else tensors,
            meta=self.contents.meta(progress),
        )
        self._saved_step = progress.step

    def before_update(self) -> None:
        """Let copies under way finish with the old weights. Rank-local, before each update."""
        if self._writer is not None:
            with self._tracker.within(Phase.CHECKPOINT):
                self._writer.before_update()
        self.is_copying = False

    def tell_errors(self) -> None:
        """Report a write that failed. Rank-local."""
        if self._writer is not None and (error := self._writer.poll()) is not None:
            self._saved_step = -1
            self._warn(error)

    def close(self) -> None:
        """Wait for the write under way. Rank-local."""
        if self._writer is None:
            return
        self._tracker.enter(Phase.CHECKPOINT)  # WHY: this may take longer than any step
        try:
            self._writer.close()
        except CheckpointError as error:
            self._warn(error)
        self.tell_errors()

    def forget(self, discarded: Sequence[Path]) -> None:
        """Take note that checkpoints were set aside: the step may have to be saved again."""
        self._saved_step = -1
        for path in discarded:
            log.warning("set aside %s: its state may be wrong", path)

    def _warn(self, error: CheckpointError) -> None:
        log.warning("no new checkpoint, training continues with the older ones: %s", error)


def _multiples_of(every: int | None) -> range:
    return range(every, sys.maxsize, every) if every else range(0)


def _base_names(parts: Parts) -> set[str]:
    moving = {*parts.replica.buffers.names, *parts.replica.buffers.known}
    return {f"model.{name}" for name in parts.base.get("sha256", ()) if name not in moving}


def collect_tensors(
    parts: Parts, *, buffers: Copies = NO_COPIES, with_base: bool = False
) -> Tensors:
    """Name the live tensors of model and optimizer; nothing is copied. Rank-local.

    buffers: takes the place of the replica's moving buffers, where a forward is under way.
    with_base: also the frozen weights that no checkpoint has.
    """
    tensors = {f"model.{name}": t for name, t in parts.replica.module.state_dict().items()}
    for name in () if with_base else _base_names(parts):
        del tensors[name]
    moving = parts.replica.buffers
    for name, buffer in moving.to_save(buffers).items() if moving.known else ():
        in_model = f"model.{name}"
        tensors[in_model if in_model in tensors else f"{MOVING}{name}"] = buffer
    if parts.average is not None:
        tensors |= parts.average.tensors()
    state = save_state(parts.schedule, parts.gradients.local.by_name)[0]
    # WHY sorted: an optimizer that was restored may list its state in another order, and equal
    # states should be equal files.
    return tensors | dict(sorted(state.items()))


def replicated_tensors(parts: Parts) -> Tensors:
    """Name the live tensors that are equal on all ranks at every step boundary. Rank-local."""
    moving = (f"{MOVING}{name}" for name in parts.replica.buffers.names)
    kept = ("model.", "optimizer.", AVERAGE, *moving)
    tensors = collect_tensors(parts, with_base=True)
    return {name: tensor for name, tensor in tensors.items() if name.startswith(kept)}


def collect_meta(parts: Parts, progress: Progress) -> dict[str, Any]:
    """Give the numbers that belong to the tensors, as JSON. Rank-local."""
    scaler = parts.precision.scaler
    return {
        **asdict(progress),
        "global_batch": parts.global_batch,
        "batch_size": parts.config.data.batch_size,
        "global_batch_size": parts.config.data.global_batch_size,
        "accumulation_steps": parts.config.optimizer.accumulation_steps,
        "total_steps": parts.length.total,
        "lr_schedule": str(parts.schedule.config.lr_schedule),
        "channels_last": parts.replica.inputs.channels_last,
        "least_padding": parts.replica.inputs.least_padding,
        "world_size": parts.group.world_size,
        "seed": parts.config.device.seed,
        "optimizer": type(parts.optimizer).__name__,
        "optimizer_state": save_state(parts.schedule, parts.gradients.local.by_name)[1],
        "attributes": parts.replica.attributes.state(),
        "precision": {} if scaler is None else dict(scaler.state_dict()),
        "dataset": parts.config.data.dataset,
        "dataset_fingerprint": parts.data.fingerprint,
        "stream": parts.sampler.as_json(progress.epoch, progress.cursor),
        "model": parts.config.model.model,
        "model_args": dict(parts.config.model.model_args),
        "pretrained": parts.config.model.pretrained,
        "adapter": dict(parts.config.model.adapter),
        "base": dict(parts.base),
        "hub_config": getattr(parts.replica.module, "hub_config", None),
        "num_classes": parts.data.num_classes,
        "input_shape": list(parts.data.input_shape),
        "class_names": list(parts.data.class_names),
        "task": {"name": parts.task.name, "learned": parts.task.learned()},
        "torch": torch.__version__,
    }
