"""Forward and backward over this rank's micro-batches of one window.

Owns the weighting: losses are sums, divided by the samples of the whole window, so accumulation, a
short last window and uneven shares all give the gradient of one big batch.
"""

import contextlib
import math
from collections.abc import Sequence

from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.ranks.heartbeat import BACKWARD, FORWARD, OPTIMIZER
from hardened_ddp.reporting.step_clock import StepClock
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.totals import Totals


class LossNotFinite(ArithmeticError):
    """A forward gave a loss that is no number. Its backward was not run."""


class Passes:
    """Does forward and backward, and adds up the losses."""

    def __init__(self, parts: Parts, clock: StepClock) -> None:
        self.parts = parts
        self.clock = clock
        self.totals = Totals(parts.task, parts.device)
        self.phase = "forward"
        """What is under way, for a message about an exception in it."""

        self.batch: Batch | None = None
        """The micro-batch under way, for a message about a hang in it."""

        self._watches_loss = parts.watches_loss

    def run(self, window: Window, batches: Sequence[Batch], *, keep_local: bool) -> None:
        """Run all batches forward and backward; the last backward averages unless keep_local."""
        parts, heartbeat = self.parts, self.parts.group.heartbeat
        # The mean is over the window. DDP's own sum divides by world_size besides: undone here.
        is_divided = parts.replica.averages and not keep_local
        scale = (parts.group.world_size if is_divided else 1) / window.size
        for index, batch in enumerate(batches):
            batch = batch.to(parts.device, channels_last=parts.replica.channels_last)
            is_synced = index == len(batches) - 1 and not keep_local
            self.batch, self.phase = batch, "forward"
            heartbeat.enter(FORWARD)
            with contextlib.nullcontext() if is_synced else parts.replica.no_sync():
                with parts.precision.autocast():
                    score = parts.task.score(parts.replica.call, batch.inputs, batch.targets)
                if self._watches_loss and not math.isfinite(value := score.loss_sum.item()):
                    raise LossNotFinite(f"the loss is {value}")
                self.clock.mark("forward")
                self.phase = "backward"
                heartbeat.enter(BACKWARD)
                parts.precision.backward(score.loss_sum * scale)  # collective if is_synced
            self.totals.add(score)
            self.clock.mark("backward")
        self.batch = None
        heartbeat.enter(OPTIMIZER)
