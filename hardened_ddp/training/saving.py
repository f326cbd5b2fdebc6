"""Saving the state of a run: what is in it, from which rank, and what if it fails.

Owns the calls into checkpoint/ during training, and the names inside a checkpoint: model.NAME,
optimizer.PARAMETER.KEY. Rank 0 writes, in the background. A failed write is a warning: training
goes on and older checkpoints stay. There is nothing of a single rank in a checkpoint, no random
state and no sampler state: those follow from seed, step and cursor.
Also when a checkpoint is due.
Does not own: how it gets to disk (checkpoint/), how it is
loaded (state.py).
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hardened_ddp.checkpoint.folder import Best
from hardened_ddp.checkpoint.store import CheckpointStore, CheckpointWriter, WriteCost
from hardened_ddp.errors import CheckpointError, NonFiniteError
from hardened_ddp.model.optimizer_state import PREFIX, is_known, save_state
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress
from hardened_ddp.training.state import MOVING, Tensors

log = logging.getLogger(__name__)

OTHER_THREAD_S = 600.0
"""How long a thread that must save waits for another one that does."""


class Pace:
    """Says when it is time to save, so that saving takes at most a share of the time."""

    SHARE = 0.01
    """Of training's time."""

    DISK_SHARE = 0.1
    """Of the disk's time: others use it, and each write wears it."""

    MOST_S = 600.0
    """Until the first save, whatever its size: a loss of more would be a surprise."""

    # Of a disk, in bytes/s, and what a small write takes: assumed until a first write was measured.
    _SPEED = 500e6
    _LEAST_S = 0.01

    def __init__(self, size_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        cost_s = self._LEAST_S + size_bytes / self._SPEED
        self._interval_s = min(self.MOST_S, cost_s / self.SHARE)
        self._began_at = clock()

    def is_time(self, measured: WriteCost | None) -> bool:
        """Say whether the last save began long enough ago. measured: what the last one cost."""
        if measured is not None:
            costs_s = (measured.training_s / self.SHARE, measured.disk_s / self.DISK_SHARE)
            self._interval_s = max(costs_s)
        return self._clock() - self._began_at >= self._interval_s

    def begin(self) -> None:
        """Note that a save begins."""
        self._began_at = self._clock()


class Saver:
    """Writes checkpoints of one run. On ranks other than 0 every call is cheap and does nothing."""

    def __init__(self, parts: Parts, store: CheckpointStore) -> None:
        self.parts = parts
        self.reads_weights = False
        """A write under way reads the weights: call before_update before they change."""

        self._tracker = parts.group.tracker
        self._writer = CheckpointWriter(store) if parts.group.launch.is_main else None
        self._store = store
        self._saved_step = self._needed_step = -1
        self._in_need = threading.Lock()
        self.warning = ""
        """Why the last checkpoint could not be written; empty: it could."""

        # A checkpoint is due after these steps and epochs; or else when is_time says so.
        run = parts.config.run
        self.due_steps = _multiples_of(run.checkpoint_every_steps)
        self.due_epochs = _multiples_of(run.checkpoint_every_epochs)
        self._is_auto = run.checkpoint_every_steps is None
        # Weights, and as a rule two numbers more for each in the optimizer.
        self._pace = Pace(3 * sum(p.nbytes for p in parts.replica.module.parameters()))

    def is_time(self) -> bool:
        """Say whether a checkpoint is due by the clock, or was when the last one was under way.

        Rank-local: False but on rank 0.
        """
        if self._writer is None:
            return False
        if self._writer.is_wanted:  # it was due while the writer was busy
            return True
        if self._writer.is_busy:
            return False
        return self._is_auto and self._pace.is_time(self._writer.cost)

    def save(self, progress: Progress, *, best: Best | None = None) -> None:
        """Start writing the state of this step boundary; training goes on beside it. Rank-local."""
        if self._writer is None:
            return
        with self._tracker.within(Phase.CHECKPOINT):
            self._start(self._writer, progress, best)

    def save_last(self, progress: Progress) -> None:
        """Write the state and wait until it is on the disk. Rank-local. Raises CheckpointError."""
        if self._writer is not None:
            with self._tracker.within(Phase.CHECKPOINT):
                self.save_in_need(progress)

    def save_in_need(self, progress: Progress, *, tensors: Tensors | None = None) -> None:
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

    def _write_now(self, progress: Progress, tensors: Tensors | None) -> None:
        write = self._store.write if self._writer is None else self._writer.write_now
        if self._writer is not None and self._saved_step == progress.step:
            self._writer.close()
            if self._writer.poll() is None:
                return  # else it failed in the background: once more, and now it must not be silent
        write(
            progress.step,
            tensors=collect_tensors(self.parts) if tensors is None else tensors,
            meta=collect_meta(self.parts, progress),
        )
        self._saved_step = progress.step

    def before_update(self) -> None:
        """Let a write under way finish with the old weights. Rank-local, before each update."""
        if self._writer is not None:
            with self._tracker.within(Phase.CHECKPOINT):
                self._writer.before_update()
        self.reads_weights = False

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
            if (error := self._writer.poll()) is not None:
                self._warn(error)
        except CheckpointError as error:
            self._warn(error)

    def forget(self, discarded: Sequence[Path]) -> None:
        """Take note that checkpoints were set aside: the step may have to be saved again."""
        self._saved_step = -1
        for path in discarded:
            log.warning("set aside %s: its state may be wrong", path)

    def _start(self, writer: CheckpointWriter, progress: Progress, best: Best | None) -> None:
        try:
            if best is not None:
                writer.close()  # WHY: a best state must not be passed over as busy
            was_started = writer.submit(
                progress.step,
                tensors=collect_tensors(self.parts),
                meta=collect_meta(self.parts, progress),
                volatile=volatile_names(self.parts),
                best=best,
            )
            if was_started:
                self.reads_weights = True
                self._saved_step = progress.step
                self._pace.begin()
        except CheckpointError as error:
            self._warn(error)

    def _warn(self, error: CheckpointError) -> None:
        self.warning = f"no new checkpoint, training continues with the older ones: {error}"
        log.warning("%s", self.warning)


def _multiples_of(every: int | None) -> range:
    return range(every, sys.maxsize, every) if every else range(0)


def collect_tensors(parts: Parts, *, buffers: Sequence[torch.Tensor | None] = ()) -> Tensors:
    """Name the live tensors of model and optimizer; nothing is copied. Rank-local.

    buffers: takes the place of the replica's moving buffers, where a forward is under way.
    """
    tensors = {f"model.{name}": t for name, t in parts.replica.module.state_dict().items()}
    moving = parts.replica.buffers
    for name, buffer in moving.to_save(buffers).items() if moving.known else ():
        in_model = f"model.{name}"
        tensors[in_model if in_model in tensors else f"{MOVING}{name}"] = buffer
    # WHY sorted: an optimizer that was restored may list its state in another order, and equal
    # states should be equal files.
    return tensors | dict(sorted(save_state(parts.schedule, parts.replica.trainable)[0].items()))


def replicated_tensors(parts: Parts) -> Tensors:
    """Name the live tensors that are equal on all ranks at every step boundary. Rank-local."""
    kept = ("model.", "optimizer.", *(f"{MOVING}{name}" for name in parts.replica.buffers.names))
    return {name: t for name, t in collect_tensors(parts).items() if name.startswith(kept)}


def collect_meta(parts: Parts, progress: Progress) -> dict[str, Any]:
    """Give the numbers that belong to the tensors, as JSON. Rank-local."""
    scaler, split = parts.precision.scaler, parts.train_loader.split
    return {
        **asdict(progress),
        "global_batch": parts.global_batch,
        "batch_size": parts.config.data.batch_size,
        "global_batch_size": parts.config.data.global_batch_size,
        "accumulation_steps": parts.config.optimizer.accumulation_steps,
        "total_steps": parts.length.total,
        "lr_schedule": str(parts.schedule.config.lr_schedule),
        "channels_last": parts.replica.channels_last,
        "split_by_length": split and split.least_values,
        "world_size": parts.group.world_size,
        "seed": parts.config.device.seed,
        "optimizer": type(parts.optimizer).__name__,
        "optimizer_state": save_state(parts.schedule, parts.replica.trainable)[1],
        "attributes": parts.replica.attributes.state(),
        "precision": {} if scaler is None else dict(scaler.state_dict()),
        "dataset": parts.config.data.dataset,
        "dataset_fingerprint": parts.data.fingerprint,
        "stream": parts.sampler.as_json(progress.epoch, progress.cursor),
        "model": parts.config.model.model,
        "model_args": dict(parts.config.model.model_args),
        "pretrained": parts.config.model.pretrained,
        "hub_config": getattr(parts.replica.module, "hub_config", None),
        "num_classes": parts.data.num_classes,
        "input_shape": list(parts.data.input_shape),
        "class_names": list(parts.data.class_names),
        "task": {"name": parts.task.name, "learned": parts.task.learned()},
        "torch": torch.__version__,
    }


def volatile_names(parts: Parts) -> set[str]:
    """Name the tensors that a forward may change: they must be copied at once when saving.

    Also the learning rate, if it is a tensor: it is set before the forward.
    """
    buffers = parts.replica.buffers
    names = {f"model.{name}" for name in (*buffers.may_move, *buffers.known)}
    names |= {f"{MOVING}{name}" for name in buffers.known}
    if is_known(parts.optimizer) and not parts.schedule.has_state:
        return names
    state = save_state(parts.schedule, parts.replica.trainable)[0]
    return names | {name for name in state if name.startswith(f"{PREFIX}groups.")}


def refuse_non_finite(loss: float, *, step: int) -> None:
    """Raise NonFiniteError if the mean loss up to step is not a number. The same on all ranks.

    WHY before saving: a checkpoint of poisoned weights would push out the good ones.
    """
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the training loss became {loss} by step {step}; the checkpoints before it are kept",
            fix="lower --learning_rate, set --clip_grad_norm 1, or --amp off; then --resume the "
            "run. --continue_on_error leaves such steps out",
        )
