"""One optimizer step: the window's samples forward and backward, gradients averaged, weights moved.

Owns the order forward, backward, all-reduce, unscale, clip, update, and the weighting: losses are
sums, divided by the samples of the whole window, so accumulation, a short last window and uneven
shares all give the gradient of one big batch.

Two forms. The fast one lets DDP average inside the last backward, overlapped with it. The safe one
keeps gradients local and adds them up afterwards; it serves windows in which some rank has no
sample, every window under --continue_on_error, where the ranks first vote, and CPU ranks of one
machine, for which it is the faster one.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hardened_ddp.data.ledger import LedgerWriter
from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.errors import (
    HardenedError,
    SampleError,
    TooManyErrors,
    UnusedParameterError,
)
from hardened_ddp.model.optimizer import learning_rate, set_learning_rate
from hardened_ddp.model.precision import clip
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.reporting.step_clock import StepClock
from hardened_ddp.training.failure import explain_failure
from hardened_ddp.training.parts import Parts, Progress
from hardened_ddp.training.totals import Totals

log = logging.getLogger(__name__)


class Stepper:
    """Does optimizer steps with the parts of a run, and adds up their losses."""

    def __init__(
        self, parts: Parts, *, clock: StepClock, before_update: Callable[[], None]
    ) -> None:
        self.parts = parts
        self.clock = clock
        self.before_update = before_update
        self.totals = Totals(parts.device)
        self.grad_norm: torch.Tensor | None = None
        self.looks_closely = False
        """Set it before a step to have grad_norm measured in it and missing gradients named."""

        self._known_unused: set[str] = set()

        self.left_out: list[dict[str, Any]] = []
        """What was left out and why, for the report; rank 0's list is complete."""

        self.has_unread_totals = False
        """Steps were done since read_totals. The same on all ranks."""

        self.ledger: LedgerWriter | None = None

        self.is_whole = True
        """Weights and optimizer state are those of a step boundary: not half updated."""

        self.commit_lock = threading.Lock()
        """Held while weights and progress move: another thread that holds it sees a whole step."""

        self.buffers_before: Sequence[torch.Tensor] = ()
        """The moving buffers at the last step boundary; a forward under way has changed them."""

        self._phase = "forward"
        config = parts.config
        self._has_schedule = (
            config.optimizer.lr_schedule != "constant" or config.optimizer.warmup_steps > 0
        )
        set_learning_rate(parts.optimizer, config.optimizer.learning_rate)
        self._checks_unused = (
            parts.replica.ddp is not None and not parts.replica.ddp.find_unused_parameters
        )

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return float(self.parts.optimizer.param_groups[0]["lr"])

    def read_totals(self) -> dict[str, float]:
        """Give mean loss and accuracy since the last reading, and start anew. Collective."""
        sums = self.totals.read(self.parts.group)  # collective
        self.totals = Totals(self.parts.device)
        self.has_unread_totals = False
        return sums

    def is_finite(self) -> bool:
        """Say whether this rank's losses since the last reading are numbers. Waits for the device.

        WHY: a checkpoint of poisoned weights would push out the good ones.
        """
        return math.isfinite(self.totals.loss())

    def do(self, window: Window, batches: Sequence[Batch], progress: Progress) -> None:
        """Train on this rank's batches of window, and commit it. Collective: all ranks.

        Raises SampleError, OutOfMemoryError, StepError or PeerLostError, each naming rank, step,
        phase and samples; then nothing of the window is committed.
        """
        parts = self.parts
        if self.ledger is not None:
            ids = [batch.indices.numpy() for batch in batches]
            self.ledger.bring(progress.step, progress.epoch, ids)
        # WHY: forward changes them; if the step fails, they are those of the last step again
        self.buffers_before = buffers = parts.replica.copy_buffers()
        seed_step(
            parts.config.device.seed,
            step=progress.step,
            rank=parts.group.launch.rank,
            device_type=parts.device.type,
        )
        if self._has_schedule:
            set_learning_rate(
                parts.optimizer,
                learning_rate(
                    parts.config.optimizer, step=progress.step, total_steps=parts.total_steps
                ),
            )
        try:
            if parts.config.loop.continue_on_error:
                did_agree = self._voted(window, batches, progress, buffers)  # collective
            else:
                did_agree = True
                self._unvoted(window, batches)  # collective
            with self.commit_lock:
                if did_agree:
                    self._update()
                progress.step += 1
                progress.cursor = window.stop
                self.buffers_before = ()
        except Exception as error:
            if self.is_whole:
                parts.replica.put_back_buffers(buffers)
            if isinstance(error, HardenedError):
                raise
            samples = [int(index) for batch in batches for index in batch.indices]
            raise explain_failure(
                error, parts.group, step=progress.step, phase=self._phase, samples=samples
            ) from error
        parts.optimizer.zero_grad(set_to_none=True)
        self.has_unread_totals = True
        self.clock.mark("optimizer")

    def _unvoted(self, window: Window, batches: Sequence[Batch]) -> None:
        """Forward and backward in the fast form, if every rank has samples."""
        for batch in batches:
            if batch.bad:
                raise SampleError(
                    f"rank {self.parts.group.launch.rank} can't read sample {batch.bad[0].index}: "
                    f"{batch.bad[0].error}",
                    fix="mend it, or leave such samples out with --continue_on_error",
                )
        has_empty_share = window.size < self.parts.group.world_size
        keep_local = has_empty_share or self.parts.replica.sums_after
        self._accumulate(window, batches, keep_local=keep_local)
        names = []
        if self._checks_unused and not has_empty_share:
            names = self.parts.replica.parameters_without_gradient()
        if names:
            raise UnusedParameterError(
                f"rank {self.parts.group.launch.rank}: no gradient came for {', '.join(names[:8])} "
                f"({len(names)} in all), which other ranks wait for",
                fix="--find_unused_parameters, or use them in every forward, or freeze them",
            )
        if keep_local:
            self.parts.replica.sum_gradients()  # collective
        self.parts.replica.sync_buffers()  # collective

    def _accumulate(self, window: Window, batches: Sequence[Batch], *, keep_local: bool) -> None:
        """Run all batches forward and backward; the last backward averages unless keep_local."""
        parts = self.parts
        # The mean is over the window. DDP divides by world_size besides, which this undoes.
        scale = (1 if keep_local else parts.group.world_size) / window.size
        for index, batch in enumerate(batches):
            batch = batch.to(parts.device, channels_last=parts.replica.channels_last)
            is_synced = index == len(batches) - 1 and not keep_local
            self._phase = "forward"
            with contextlib.nullcontext() if is_synced else parts.replica.no_sync():
                with parts.precision.autocast():
                    scored = parts.objective(parts.replica.call, batch.inputs, batch.targets)
                self.clock.mark("forward")
                self._phase = "backward"
                parts.precision.backward(scored.loss_sum * scale)  # collective if is_synced
            self.totals.add(scored, batch.targets)
            self.clock.mark("backward")

    def _voted(
        self,
        window: Window,
        batches: Sequence[Batch],
        progress: Progress,
        buffers: Sequence[torch.Tensor],
    ) -> bool:
        """Do the safe form with a vote; say whether there is a gradient to apply. Collective.

        A window that failed on some rank is left out on all; samples that can't be read are left
        out alone, and the gradient is that of the samples that remain.
        """
        parts, failure = self.parts, ""
        readable = [batch for batch in batches if batch.num_samples > 0]
        before = self.totals.copy()
        try:
            self._accumulate(window, readable, keep_local=True)
            if not math.isfinite(self.totals.loss_since(before)):
                failure = "the loss is not finite"
        except Exception as error:  # WHY broad: whatever it is, the other ranks must hear of it
            log.warning(
                "step %d: this rank failed in %s", progress.step, self._phase, exc_info=True
            )
            failure = f"{self._phase}: {type(error).__name__}: {error}"
        num_valid = sum(batch.num_samples for batch in readable)
        votes = torch.tensor([num_valid, int(bool(failure))])
        total_valid, num_failed = parts.group.sum_(votes).tolist()  # collective
        if total_valid < window.size or num_failed:
            self._report_left_out(batches, failure, progress)  # collective
        is_usable = not num_failed and total_valid > 0
        if is_usable:
            parts.replica.sum_gradients()  # collective
            # WHY no vote: every rank has the same average. fp16 overflow is the scaler's business.
            if parts.precision.scaler is None and not parts.replica.has_finite_gradients():
                # One entry, told by rank 0: no single rank or sample is known to be the cause.
                failure = "the gradient is not finite" if parts.group.launch.is_main else ""
                self._report_left_out([], failure, progress)  # collective
                is_usable = False
        if not is_usable:
            parts.optimizer.zero_grad(set_to_none=True)
            parts.replica.put_back_buffers(buffers)
            self.totals = before
            return False
        if total_valid < window.size:
            for parameter in parts.replica.trainable.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(window.size / total_valid)
        parts.replica.sync_buffers()  # collective
        return True

    def _report_left_out(self, batches: Sequence[Batch], failure: str, progress: Progress) -> None:
        """Count what is left out; stop all ranks above max_errors. Collective: all ranks."""
        here = {"step": progress.step, "epoch": progress.epoch}
        mine = [
            {**here, "index": bad.index, "error": bad.error}
            for batch in batches
            for bad in batch.bad
        ]
        if failure:
            samples = [int(index) for batch in batches for index in batch.indices]
            mine.append({**here, "window": samples, "error": failure})
        for rank, entries in enumerate(self.parts.group.gather_json(mine)):  # collective
            for entry in entries:
                what = f"sample {entry['index']}" if "index" in entry else "the whole window"
                log.warning(
                    "step %d left out %s: rank %d, %s", progress.step, what, rank, entry["error"]
                )
                self.left_out.append({"rank": rank, **entry})
                progress.num_errors += 1
        limit = self.parts.config.loop.max_errors
        if progress.num_errors > limit:
            raise TooManyErrors(
                f"{progress.num_errors} samples or windows were left out by step {progress.step}, "
                f"more than max_errors {limit}; the last: {self.left_out[-1]['error']}",
                fix="see skipped_samples.jsonl in the run folder; mend the cause or raise "
                "--max_errors",
            )

    def _update(self) -> None:
        """Unscale, clip, update the weights. Every rank has the same gradients: no vote."""
        parts = self.parts
        self._phase = "optimizer"
        max_norm = parts.config.optimizer.clip_grad_norm
        if self.looks_closely:
            self._name_unused()
        if max_norm > 0 or self.looks_closely:
            parts.precision.unscale(parts.optimizer)
            self.grad_norm = clip(parts.replica.trainable.values(), max_norm=max_norm)
        # WHY here: a checkpoint that is being written still reads the old weights.
        self.before_update()
        self.is_whole = False
        parts.precision.step(parts.optimizer)
        self.is_whole = True

    def _name_unused(self) -> None:
        """Say which parameters get no gradient any more: they stay as they are. Rank-local."""
        new = set(self.parts.replica.parameters_without_gradient()) - self._known_unused
        if new:
            self._known_unused |= new
            log.warning("no gradient comes any more for: %s", ", ".join(sorted(new)))
