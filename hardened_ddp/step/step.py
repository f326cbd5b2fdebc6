"""One optimizer step: forward, backward, sum over the ranks, update. Read from train_step down.

Forward, backward and the sum are in gradient.py; how gradients get to the other ranks, in
gradients/. What happens when a rank fails is in retry.py. A GPU runs behind the host: what follows
from that is in async_device.py, and here where Stepper.device is used, which is None on the CPU.
"""

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.errors import ANY_FAILURE, HardenedError, PeerLostError
from hardened_ddp.model.moving_buffers import NO_COPIES, Copies
from hardened_ddp.model.precision import clip
from hardened_ddp.model.schedule import is_known
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.seeding import seed_update
from hardened_ddp.step.async_device import AsyncDevice
from hardened_ddp.step.failure import Failure, error_of, explain_failure, format_samples
from hardened_ddp.step.gradient import Attempt, Gradient, Outcome
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress
from hardened_ddp.step.records import Records
from hardened_ddp.step.retry import StepRetry


class CopiesWeights(Protocol):
    """What may still be copying the weights of the last step: a checkpoint write under way."""

    is_copying: bool

    def before_update(self) -> None:
        """Wait until the weights may change."""


@dataclass(slots=True)
class Live:
    """Whether the live tensors are those of a step boundary: for a thread that saves them."""

    # Held while weights and progress change: a thread that holds it sees a whole step.
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_at_boundary: bool = True  # weights and optimizer state are not half updated

    # The moving buffers at the last step boundary, before a forward under way changed them. None:
    # no forward is under way.
    buffers_before: Copies | None = None

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Keep other threads out while a state is loaded; if that fails, no state is saved."""
        with self.lock:
            self.is_at_boundary = False
            yield
            self.is_at_boundary = True


class Stepper:
    """Does optimizer steps with the parts of a run."""

    def __init__(
        self, parts: Parts, progress: Progress, *, left_out: LeftOut, saver: CopiesWeights
    ) -> None:
        self.parts = parts
        self.progress = progress
        self.gradient = Gradient(parts, progress, left_out=left_out)
        # What only a device that runs behind the host needs; None: the host does the work.
        self.device: AsyncDevice | None = None
        if parts.is_async_device:
            self.device = AsyncDevice(parts, progress, self.gradient.totals)
        self.retry = StepRetry(self.gradient)
        self.live = Live()
        self.last_good = -1  # The last step that succeeded. The same on all ranks.
        self._saver = saver
        self.records = Records(parts, progress, left_out)
        self._seeds_update = not is_known(parts.optimizer)
        parts.replica.buffers.note_bits()

    def train_step(self, window: Window, batches: Sequence[Batch]) -> Outcome:
        """Train on this rank's batches of window, and commit it. Collective: all ranks.

        On a GPU the next step, or confirm_last_step, may find that it has to be retried. Raises
        SampleError, OutOfMemoryError, NonFiniteError, UnusedParameterError, TooManyErrors,
        StepError or PeerLostError, with rank and cause; then nothing of the step is committed.
        """
        progress = self.progress
        if (ledger := self.records.ledger) is not None:
            ids = [batch.indices.numpy() for batch in batches]
            ledger.bring(progress.step, progress.epoch, ids)
        if self.device is not None and not self.device.can_run_ahead(window):
            self.confirm_last_step()  # collective
        attempt = self.compute_gradient(window, batches)  # collective: forward, backward, sum
        if self.device is not None and self.confirm_last_step():  # collective
            attempt = self.compute_gradient(window, batches)  # collective: at the right weights
        self.commit(attempt)  # the update
        self.parts.group.tracker.end_step(progress.step)
        is_late = self.device is not None
        if is_late and (attempt.is_reported or is_due(progress.step, self.parts.compares_every)):
            self.confirm_last_step()  # collective: loss or weights are read before the next step
        return attempt.outcome

    def compute_gradient(self, window: Window, batches: Sequence[Batch]) -> Attempt:
        """Forward, backward and sum; again, until the gradient is good. Collective: all ranks."""
        parts = self.parts
        # For a retry: forward changes the buffers, and adds to the losses.
        moving = parts.replica.buffers
        self.gradient.writes.begin(batches)
        self.live.buffers_before = buffers = moving.copies() if moving.known else NO_COPIES
        step = self.progress.step + 1
        is_last = step >= parts.length.total or window.start + window.size >= parts.sampler.end
        attempt = Attempt(
            window,
            batches,
            self.gradient.totals.mark(),
            buffers=buffers,
            is_reported=is_last or is_due(step, parts.config.loop.log_interval),
        )
        if parts.replica.attributes.watched:
            attempt.attributes = parts.replica.attributes.begin_step()
        if parts.precision.scaler is not None:
            attempt.scale_before = parts.precision.mark()
        if parts.schedule.has_state:
            attempt.schedule_before = parts.schedule.mark()
        if self.device is not None:
            self.device.begin(attempt)
        try:
            on_device = self.device is not None and self.device.checks_one_step_late
            attempt.failure = self.gradient.run(attempt, is_retry=False)  # collective
            sums = self.gradient.reduce(attempt, on_device=on_device)  # collective
            if sums is None:
                self.retry.until_done(attempt)  # collective
            elif self.device is not None:
                self.device.note(sums)
        except ANY_FAILURE as error:
            self._fail(error, attempt, first=attempt.failure)
        return attempt

    def commit(self, attempt: Attempt) -> None:
        """Update weights and progress. Rank-local: every rank has the same gradient."""
        try:
            if self.device is not None:
                self.device.before_update()
            with self.live.lock:
                if attempt.outcome is Outcome.DONE:
                    self._update(attempt)
                    self.last_good = self.progress.step
                    self.retry.given_up.clear()
                elif self.records.digests is not None:
                    self.records.commit(attempt)
                if self.parts.schedule.has_state:
                    self._end_schedule_step()
                self.progress.step += 1
                self.progress.cursor = attempt.window.start + attempt.window.size
                self.live.buffers_before = None
                if attempt.attributes:
                    self.parts.replica.attributes.end_step()
                if self.device is not None:
                    self.device.after_update()
        except ANY_FAILURE as error:
            self._fail(error, attempt)
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.gradient.totals.num_steps += 1

    def _update(self, attempt: Attempt) -> None:
        """Unscale, clip, update the weights. Every rank has the same gradients."""
        parts = self.parts
        max_norm = parts.config.optimizer.clip_grad_norm
        is_at_interval = is_due(self.progress.step + 1, parts.config.loop.log_interval)
        if max_norm > 0 or is_at_interval:
            parts.precision.unscale(parts.optimizer)
            norm = clip(parts.gradients.local.by_name.values(), max_norm=max_norm)
            self.gradient.totals.grad_norm = attempt.norm = norm
        if self.records.digests is not None:
            self.records.commit(attempt)  # WHY here: an optimizer may change or free gradients
        if self._saver.is_copying:
            self._saver.before_update()
        self.live.is_at_boundary = False
        if self._seeds_update:
            seed, step = parts.config.device.seed, self.progress.step
            seed_update(seed, step=step, device_type=parts.device.type)
        if (scaler := parts.precision.scaler) is None:
            parts.optimizer.step()
        else:  # skips it on all ranks alike if the gradient overflowed
            scaler.step(parts.optimizer)
            scaler.update()
        if parts.average is not None:
            parts.average.update(self.progress.step + 1, self._skipped(attempt))
        self.live.is_at_boundary = True

    def _skipped(self, attempt: Attempt) -> torch.Tensor | None:
        """Return 1.0 on the device if it skipped the update; None: the host knows it did not."""
        if self.parts.precision.scaler is not None:
            return self.parts.precision.has_backed_off(attempt.scale_before)
        return None if self.device is None else self.device.skipped()

    def _end_schedule_step(self) -> None:
        """Step the scheduler object, also after a step that was left out: it counts steps."""
        if self._saver.is_copying:
            self._saver.before_update()
        self.live.is_at_boundary = False
        if self.progress.step + 1 < self.parts.length.total:  # WHY: torch's may end with the run
            self.parts.schedule.end_step()
        self.live.is_at_boundary = True

    def confirm_last_step(self) -> bool:
        """Read the flag of the last step; do the step again if it was bad. Collective: all ranks.

        Returns whether it was bad. Call it before weights, losses or progress are used for anything
        but the next step.
        """
        step = None if self.device is None else self.device.take_bad()
        if step is None or self.device is None:
            return False
        attempt = step.attempt
        with self.live.lock:
            self.gradient.undo(attempt)
            self.take_back_on_host(attempt)
            self.live.buffers_before = attempt.buffers
            self.progress.step -= 1
            self.progress.cursor = attempt.window.start
            self.device.take_back(step)
        try:
            self.retry.do_again(attempt, loss=step.loss())  # collective
        except ANY_FAILURE as error:
            self._fail(error, attempt)
        self.commit(attempt)
        return True

    def take_back_on_host(self, attempt: Attempt) -> None:
        """Undo what a commit without an update has changed besides the tensors. Rank-local."""
        self.parts.precision.go_back(attempt.scale_before)
        self.parts.schedule.go_back(attempt.schedule_before)
        self.parts.replica.attributes.put_back(attempt.attributes)

    def _fail(
        self, error: BaseException, attempt: Attempt, *, first: Failure | None = None
    ) -> NoReturn:
        """Undo the changes of a step that fails, and raise its error, which names the step.

        first: this rank's own failure before it. WHY: on a GPU with an error, what follows raises
        again, elsewhere.
        """
        if self.live.is_at_boundary:
            self.live.is_at_boundary = False
            # WHY suppress: on a GPU that reports an error all later calls fail. The first one tells
            # rank, step and samples, and what can't be undone is not saved.
            with contextlib.suppress(*ANY_FAILURE):
                self.gradient.writes.note()
                self.parts.replica.buffers.put_back(attempt.buffers)
                self.parts.replica.attributes.put_back(attempt.attributes)
                self.live.is_at_boundary = True
        if isinstance(error, HardenedError):
            raise error
        group, samples = self.parts.group, format_samples(attempt.batches)
        where = f"step {self.progress.step}, {group.tracker.phase.label}, samples {samples}"
        fix = "halve --batch_size and double --accumulation_steps: the same gradient"
        explained = explain_failure(error, group, where, memory_fix=fix)
        if first is not None and not isinstance(explained, PeerLostError):
            explained = error_of(first.kind, first.text)
        raise explained from error

    def end_epoch(self) -> None:
        """Go to the start of the next epoch, if this one is over. Rank-local."""
        with self.live.lock:
            self.progress.end_epoch(self.parts.sampler.end)

    def read_totals(self) -> dict[str, float]:
        """Return mean loss and metrics since the last reading, and reset them. Collective."""
        self.confirm_last_step()  # collective
        sums = self.gradient.totals.read(self.parts.group)  # collective
        self.gradient.totals.reset()
        self.records.after_report()  # collective
        return sums

    def is_finite(self) -> bool:
        """Return whether losses since the last reading, and the last gradient, are finite.

        Rank-local; waits for the device, on the main thread. WHY: a checkpoint of weights with NaN
        would replace a good one.
        """
        unconfirmed = None if self.device is None else self.device.unconfirmed
        # WHY: the device may wait for another rank, and this rank must not be named for it
        with self.parts.group.tracker.within(Phase.ALL_REDUCE):
            is_bad = unconfirmed is not None and unconfirmed.is_bad()
            return not is_bad and math.isfinite(self.gradient.totals.loss())

    def start_over(self) -> None:
        """Reset everything that depends on steps after the loaded state. Rank-local."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.gradient.totals.reset()
        self.live.buffers_before = None
        self.parts.replica.buffers.note_bits()
        if self.device is not None:
            self.device.forget()
        self.last_good = -1
        self.retry.given_up.clear()


def is_due(count: int, every: int | None) -> bool:
    """Return whether count is a multiple of every; every 0 or None: never."""
    return every is not None and every > 0 and count % every == 0
