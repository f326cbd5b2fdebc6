"""One optimizer step: the window's samples forward and backward, gradients averaged, weights moved.

Owns the order forward, backward, all-reduce, unscale, clip, update. The first three are done in
healing.py, which also does them again if a rank fails in one of them.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence

import torch

from hardened_ddp.data.ledger import LedgerWriter
from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.errors import (
    HardenedError,
)
from hardened_ddp.model.optimizer import learning_rate, set_learning_rate
from hardened_ddp.model.precision import clip
from hardened_ddp.reporting.step_clock import StepClock
from hardened_ddp.training.failure import explain_failure
from hardened_ddp.training.healing import Healer
from hardened_ddp.training.left_out import LeftOut
from hardened_ddp.training.parts import Parts, Progress
from hardened_ddp.training.passes import Passes
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
        self.passes = Passes(parts, clock)
        self.left_out = LeftOut(parts)
        self.healer = Healer(parts, self.passes, self.left_out)
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

        config = parts.config
        self._has_schedule = (
            config.optimizer.lr_schedule != "constant" or config.optimizer.warmup_steps > 0
        )
        set_learning_rate(parts.optimizer, config.optimizer.learning_rate)

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return float(self.parts.optimizer.param_groups[0]["lr"])

    def read_totals(self) -> dict[str, float]:
        """Give mean loss and accuracy since the last reading, and start anew. Collective."""
        sums = self.passes.totals.read(self.parts.group)  # collective
        self.passes.totals = Totals(self.parts.device)
        self.has_unread_totals = False
        return sums

    def forget(self) -> None:
        """Drop what was added up since the last report: those steps are taken back. Rank-local."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.passes.totals = Totals(self.parts.device)
        self.has_unread_totals = False
        self.buffers_before = ()

    def is_finite(self) -> bool:
        """Say whether this rank's losses since the last reading are numbers. Waits for the device.

        WHY: a checkpoint of poisoned weights would push out the good ones.
        """
        return math.isfinite(self.passes.totals.loss())

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
        if self._has_schedule:
            set_learning_rate(
                parts.optimizer,
                learning_rate(
                    parts.config.optimizer, step=progress.step, total_steps=parts.total_steps
                ),
            )
        try:
            has_gradient = self.healer.do(window, batches, progress, buffers)  # collective
            with self.commit_lock:
                if has_gradient:
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
                error, parts.group, step=progress.step, phase=self.passes.phase, samples=samples
            ) from error
        parts.optimizer.zero_grad(set_to_none=True)
        self.has_unread_totals = True
        self.clock.mark("optimizer")
        parts.group.beacon.end_step(progress.step)

    def _update(self) -> None:
        """Unscale, clip, update the weights. Every rank has the same gradients: no vote."""
        parts = self.parts
        self.passes.phase = "optimizer"
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
