"""On a GPU: whether the gradient of a step was good is read one step later, without a wait.

Owns that check. Reading a number on a GPU waits for all work before it, and asking the other ranks
would cost a message per step. Instead, a rank that failed has sent NaN (buckets.py), and that, or a
gradient that is not finite by itself, sets a flag on the device. The flag makes the optimizer skip
the update: it is found_inf of torch's fused optimizers, with which GradScaler skips a step. It is
the same on all ranks, because the sums are. It is copied to the host while the next step already
runs, and read only then; if it is up, the host takes back both steps and does them again (step.py).
So the host is at most one step ahead of the GPU.

With fp16 a gradient that is not finite is normal: GradScaler skips such a step and lowers the
scale. That is taken back too; the retry shows which of the two it was.
"""

from typing import TYPE_CHECKING

import torch

from hardened_ddp.ranks.phase import Phase
from hardened_ddp.step.boundary import Event, new_event

if TYPE_CHECKING:
    from hardened_ddp.step.attempt import Attempt
    from hardened_ddp.step.step import Stepper


class Flag:
    """A number on the device, and its asynchronous copy to the host."""

    def __init__(self, is_bad: torch.Tensor) -> None:
        """is_bad: of shape (), 1.0 if the gradient was bad, else 0.0."""
        self.on_device = self._on_host = is_bad
        self._arrived: Event | None = None

    def send(self) -> Event:
        """Queue the copy to the host; return the event after it. All that counts is queued."""
        if self.on_device.is_cuda:
            self._on_host = torch.empty((), dtype=self.on_device.dtype, pin_memory=True)
            self._on_host.copy_(self.on_device, non_blocking=True)
        self._arrived = new_event(self.on_device.device)
        return self._arrived

    def is_up(self) -> bool:
        """Return whether the gradient was bad. Waits until the device has computed it."""
        if self._arrived is not None:
            self._arrived.wait()
        return bool(self._on_host)


class LateLook:
    """The last step, as long as its flag has not been read."""

    def __init__(self, stepper: "Stepper") -> None:
        self._stepper = stepper
        self.attempt: Attempt | None = None

    def follow(self, attempt: "Attempt") -> None:
        """Remember a step that was just committed, if it has a flag to be read."""
        self.attempt = attempt if attempt.flag is not None else None

    def forget(self) -> None:
        """Drop the step: it was taken back, or is known to be good."""
        self.attempt = None

    def is_bad(self) -> bool:
        """Return whether the step must be done again. Main thread; waits for the device."""
        if self.attempt is None:
            return False
        # WHY: this rank may wait here for another one that has not joined an all-reduce
        with self._stepper.parts.group.tracker.within(Phase.ALL_REDUCE):
            return self.attempt.is_bad()

    def settle(self) -> None:
        """Read the flag of the last step; do the step again if it was bad. Collective: all ranks.

        Call it before weights, losses or progress are used for anything but the next step.
        """
        if not self.is_bad():
            self.attempt = None
            return
        stepper = self._stepper
        with stepper.commit_lock:
            attempt = self.take_back()
        if attempt is not None:
            with stepper.explained(attempt):
                stepper.retry.do_again(attempt)  # collective
            stepper.commit(attempt)

    def take_back(self) -> "Attempt | None":
        """Take the last step back if the device skipped its update; then return it, else None.

        Progress then matches the weights. Rank-local, while no other thread commits a step. Waits
        for the device.
        """
        stepper, attempt = self._stepper, self.attempt
        is_bad = attempt is not None and attempt.is_bad()
        self.attempt = None  # WHY not before: another thread may ask while this one waits
        if attempt is None or not is_bad:
            return None
        stepper.take_back(attempt)
        return attempt
