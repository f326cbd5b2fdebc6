"""One optimizer step: the window's samples forward and backward, gradients averaged, weights moved.

Owns the order forward, backward, all-reduce, unscale, clip, update. The first three are done in
retry.py, which also does them again if a rank fails in one of them.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from hardened_ddp.data.ledger import LedgerWriter
from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.errors import (
    HardenedError,
)
from hardened_ddp.model.optimizer import learning_rate, set_learning_rate
from hardened_ddp.model.precision import clip
from hardened_ddp.ranks.heartbeat import ALL_REDUCE
from hardened_ddp.reporting.step_clock import StepClock
from hardened_ddp.step.failure import explain_failure
from hardened_ddp.step.late import Attempt
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts, Progress
from hardened_ddp.step.passes import Passes
from hardened_ddp.step.retry import StepRetry
from hardened_ddp.step.totals import Totals

log = logging.getLogger(__name__)


class Stepper:
    """Does optimizer steps with the parts of a run, and adds up their losses."""

    def __init__(
        self, parts: Parts, *, clock: StepClock, before_update: Callable[[], None]
    ) -> None:
        self.parts = parts
        self.clock = clock
        self.before_update = before_update
        self.passes = Passes(parts, clock)
        self.left_out = LeftOut(parts)
        self.retry = StepRetry(parts, self.passes, self.left_out)
        self.grad_norm: torch.Tensor | None = None
        self.looks_closely = False
        """Set it before a step to have grad_norm measured in it and missing gradients named."""

        self._known_unused: set[str] = set()

        self.has_unread_totals = False
        """Steps were done since read_totals. The same on all ranks."""

        self.ledger: LedgerWriter | None = None

        self.is_whole = True
        """Weights and optimizer state are those of a step boundary: not half updated."""

        self.commit_lock = threading.Lock()
        """Held while weights and progress move: another thread that holds it sees a whole step."""

        self.buffers_before: Sequence[torch.Tensor] = ()
        """The moving buffers at the last step boundary; a forward under way has changed them."""

        self._doubtful: Attempt | None = None
        """The last step, if nobody has looked yet whether its gradient was good."""

        config = parts.config
        self._has_schedule = (
            config.optimizer.lr_schedule != "constant" or config.optimizer.warmup_steps > 0
        )
        set_learning_rate(parts.optimizer, config.optimizer.learning_rate)

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return float(self.parts.optimizer.param_groups[0]["lr"])

    def read_totals(self, progress: Progress) -> dict[str, float]:
        """Give mean loss and accuracy since the last reading, and start anew. Collective."""
        self.settle(progress)  # collective
        sums = self.passes.totals.read(self.parts.group)  # collective
        self.passes.totals = Totals(self.parts.task, self.parts.device)
        self.has_unread_totals = False
        return sums

    def forget(self) -> None:
        """Drop what was added up since the last report: those steps are taken back. Rank-local."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.passes.totals = Totals(self.parts.task, self.parts.device)
        self.has_unread_totals = False
        self.buffers_before = ()
        self._doubtful = None

    def is_finite(self) -> bool:
        """Say whether losses since the last reading, and the last gradient, are numbers.

        Rank-local; waits for the device.

        WHY: a checkpoint of poisoned weights would push out the good ones.
        """
        is_bad = self._doubtful is not None and self._doubtful.is_bad()
        return not is_bad and math.isfinite(self.passes.totals.loss())

    def do(self, window: Window, batches: Sequence[Batch], progress: Progress) -> None:
        """Train on this rank's batches of window, and commit it. Collective: all ranks.

        On a GPU the step may be in doubt until the next one or settle. Raises SampleError,
        OutOfMemoryError, StepError or PeerLostError, each naming rank, step, phase and samples;
        then nothing of the window is committed.
        """
        if self.ledger is not None:
            ids = [batch.indices.numpy() for batch in batches]
            self.ledger.bring(progress.step, progress.epoch, ids)
        if not self.retry.is_quick(window):
            self.settle(progress)  # collective
        attempt = self._bring(window, batches, progress)  # collective
        if self._is_last_bad():
            self.settle(progress)  # collective
            attempt = self._bring(window, batches, progress)  # collective
        self._commit(attempt, progress)
        self.has_unread_totals = True
        self.clock.mark("optimizer")
        self.parts.group.heartbeat.end_step(progress.step)

    def settle(self, progress: Progress) -> None:
        """Bring the last step out of doubt: do it again if it was bad. Collective: all ranks.

        Call it before the weights, the losses or progress are read for more than the next step.
        """
        if not self._is_last_bad():
            self._doubtful = None
            return
        with self.commit_lock:
            attempt = self.take_back(progress)
        if attempt is not None:
            with self._explained(attempt, progress):
                self._set_rate(progress)
                attempt.has_gradient = self.retry.do_again(attempt, progress)  # collective
            self._commit(attempt, progress)

    def take_back(self, progress: Progress) -> Attempt | None:
        """Make progress that of the weights; give the last step if the device left it out.

        Rank-local, while no other thread commits a step. Waits for the device.
        """
        attempt = self._doubtful
        is_bad = attempt is not None and attempt.is_bad()
        self._doubtful = None  # WHY not before: another thread may ask while this one waits
        if attempt is None or not is_bad:
            return None
        self.parts.replica.put_back_buffers(attempt.buffers)
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.passes.totals.go_back(attempt.before)
        self.parts.precision.go_back(attempt.scale_before)
        self.buffers_before = attempt.buffers
        progress.step -= 1
        progress.cursor = attempt.window.start
        return attempt

    def _is_last_bad(self) -> bool:
        """Say whether the last step is to be done again. Rank-local, main thread."""
        if self._doubtful is None:
            return False
        # WHY so: this rank may wait here for another one, whose part of a sum is missing
        with self.parts.group.heartbeat.within(ALL_REDUCE):
            return self._doubtful.is_bad()

    def _bring(self, window: Window, batches: Sequence[Batch], progress: Progress) -> Attempt:
        """Bring the gradient of a window to all ranks. Collective: all ranks."""
        # WHY: forward changes them; if the step fails, they are those of the last step again
        self.buffers_before = buffers = self.parts.replica.copy_buffers()
        scale = self.parts.precision.mark()
        attempt = Attempt(window, batches, buffers, self.passes.totals.mark(), scale)
        with self._explained(attempt, progress):
            self._set_rate(progress)
            attempt.has_gradient = self.retry.do(attempt, progress)  # collective
        return attempt

    def _commit(self, attempt: Attempt, progress: Progress) -> None:
        """Move weights and progress."""
        with self._explained(attempt, progress), self.commit_lock:
            if attempt.has_gradient:
                self._update(attempt)
            progress.step += 1
            progress.cursor = attempt.window.stop
            self.buffers_before = ()
            self._doubtful = attempt if attempt.flag is not None else None
        self.parts.optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def _explained(self, attempt: Attempt, progress: Progress) -> Iterator[None]:
        """Put back what a step that fails has changed, and name the step in the error."""
        parts = self.parts
        try:
            yield
        except Exception as error:
            if self.is_whole:
                parts.replica.put_back_buffers(attempt.buffers)
            if isinstance(error, HardenedError):
                raise
            samples = [int(index) for batch in attempt.batches for index in batch.indices]
            raise explain_failure(
                error, parts.group, step=progress.step, phase=self.passes.phase, samples=samples
            ) from error

    def _set_rate(self, progress: Progress) -> None:
        config = self.parts.config.optimizer
        if self._has_schedule:
            rate = learning_rate(config, step=progress.step, total_steps=self.parts.total_steps)
            set_learning_rate(self.parts.optimizer, rate)

    def _update(self, attempt: Attempt) -> None:
        """Unscale, clip, update the weights. Every rank has the same gradients: no vote."""
        parts = self.parts
        self.passes.phase = "optimizer"
        max_norm = parts.config.optimizer.clip_grad_norm
        if self.looks_closely and attempt.failure is None:
            self._name_unused()
        flag = None if attempt.flag is None else attempt.flag.on_device
        parts.precision.leave_out(parts.optimizer, flag)
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
