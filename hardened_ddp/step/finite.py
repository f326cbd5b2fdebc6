"""Whether the loss and the gradient of a window are numbers, and how long they have not been.

Owns where that is looked at: on the CPU at each loss and at each gradient, after it was summed. On
GPUs a look would wait for the device in each step: there the gradient makes a flag on the device
(late.py), or else the loss of each report is looked at; with --continue_on_error all windows are.
fp16 is another matter: an overflow of its gradients is the GradScaler's business.
"""

import math

from hardened_ddp.step.parts import Parts
from hardened_ddp.step.passes import Passes
from hardened_ddp.step.totals import Mark


class FiniteCheck:
    """Looks at the numbers of windows."""

    def __init__(self, parts: Parts, passes: Passes) -> None:
        self.parts = parts
        self.passes = passes
        self.is_close = False
        """The window under way met a number that is none: each rank looks for where."""

        self.poisoned: list[str] = []
        """The windows given up for such numbers since the last good one. The same on all ranks."""

        self.last_good = -1
        """The last step that was done well. The same on all ranks."""

        # WHY no vote on the sum: every rank has the same one
        is_asked = parts.watches_loss or parts.config.loop.continue_on_error
        self._asks_sum = is_asked or (parts.looks_late and parts.config.loop.step_retry == "on")

    def own_problem(self, before: Mark) -> str:
        """Say what of this rank's own loss and gradient is no number; else empty. Rank-local."""
        if not self.is_close:  # on the CPU each loss was looked at before its backward
            return ""
        loss = self.passes.totals.loss_since(before)
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if self.parts.precision.scaler is not None or self.parts.replica.has_finite_gradients():
            return ""
        return "the gradient is not finite"

    def accepts_sum(self) -> bool:
        """Say whether the gradient over all ranks is made of numbers: the same on all ranks."""
        if self.parts.precision.scaler is not None or not (self._asks_sum or self.is_close):
            return True
        return self.parts.replica.has_finite_sums()

    def note_good(self, step: int) -> None:
        """Note that a step was done well."""
        self.poisoned.clear()
        self.last_good = step

    def forget(self) -> None:
        """Begin anew: the run went back."""
        self.poisoned.clear()
        self.last_good = -1
