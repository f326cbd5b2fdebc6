"""Forward and backward over this rank's micro-batches of one window.

Owns the weighting: losses are sums, divided by the samples of the whole window, so accumulation, a
short last window and uneven shares all give the gradient of one big batch.
"""

import contextlib
from collections.abc import Sequence

from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.ranks.beacon import BACKWARD, FORWARD, OPTIMIZER
from hardened_ddp.reporting.step_clock import StepClock
from hardened_ddp.training.parts import Parts
from hardened_ddp.training.totals import Totals


class Passes:
    """Does forward and backward, and adds up the losses."""

    def __init__(self, parts: Parts, clock: StepClock) -> None:
        self.parts = parts
        self.clock = clock
        self.totals = Totals(parts.device)
        self.phase = "forward"
        """What is under way, for a message about an exception in it."""

        self.batch: Batch | None = None
        """The micro-batch under way, for a message about a hang in it."""

    def run(self, window: Window, batches: Sequence[Batch], *, keep_local: bool) -> None:
        """Run all batches forward and backward; the last backward averages unless keep_local."""
        parts, beacon = self.parts, self.parts.group.beacon
        # The mean is over the window. DDP divides by world_size besides, which this undoes.
        scale = (1 if keep_local else parts.group.world_size) / window.size
        for index, batch in enumerate(batches):
            batch = batch.to(parts.device, channels_last=parts.replica.channels_last)
            is_synced = index == len(batches) - 1 and not keep_local
            self.batch, self.phase = batch, "forward"
            beacon.enter(FORWARD)
            with contextlib.nullcontext() if is_synced else parts.replica.no_sync():
                with parts.precision.autocast():
                    scored = parts.objective(parts.replica.call, batch.inputs, batch.targets)
                self.clock.mark("forward")
                self.phase = "backward"
                beacon.enter(BACKWARD)
                loss = scored.loss_sum * scale
                if is_synced:
                    parts.replica.show_wait(loss)
                parts.precision.backward(loss)  # collective if is_synced
            self.totals.add(scored, batch.targets)
            self.clock.mark("backward")
        self.batch = None
        beacon.enter(OPTIMIZER)
