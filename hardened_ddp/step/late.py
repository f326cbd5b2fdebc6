"""On a GPU: whether the gradient of a step was good, learned one step later, without a wait.

Owns that look. To read a number on a GPU is to wait for all work before it, and to ask the other
ranks would be a message per step. So nobody asks: a rank that failed has sent NaN (buckets.py), and
that, or a gradient that is not finite by itself, makes a flag on the device. The flag has the
optimizer leave everything as it is: found_inf of torch's fused optimizers, by which GradScaler
skips a step. It is the same on all ranks, because the sums are. Its copy is on its way to the host
while the next step is computed already; only then is it read, and if it is up, the host takes both
steps back and does them again (step.py). So the host is at most one step ahead of the GPU.

With fp16 a gradient that is not finite is an everyday matter: its GradScaler leaves such a step out
and takes a smaller scale. That is taken back too; the step done again tells what it was.
"""

from typing import TYPE_CHECKING

import torch

from hardened_ddp.ranks.phase import Phase

if TYPE_CHECKING:
    from hardened_ddp.step.attempt import Attempt
    from hardened_ddp.step.step import Stepper


class Flag:
    """A number of the device, on its way to the host."""

    def __init__(self, is_bad: torch.Tensor) -> None:
        """is_bad: of shape (), 1.0 if the gradient was bad, else 0.0."""
        self.on_device = is_bad
        self._arrived: torch.cuda.Event | None = None
        if is_bad.is_cuda:
            self._on_host = torch.empty((), dtype=is_bad.dtype, pin_memory=True)
            self._on_host.copy_(is_bad, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            self._arrived.record()
        else:
            self._on_host = is_bad

    def is_up(self) -> bool:
        """Say whether the gradient was bad. Waits until the device has come to it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._on_host)


class LateLook:
    """The last step, as long as nobody has looked whether its gradient was good."""

    def __init__(self, stepper: "Stepper") -> None:
        self._stepper = stepper
        self.attempt: Attempt | None = None

    def follow(self, attempt: "Attempt") -> None:
        """Take a step that was just committed: it is in doubt if it has a flag."""
        self.attempt = attempt if attempt.flag is not None else None

    def forget(self) -> None:
        """Drop the step: it is taken back, or known to be good."""
        self.attempt = None

    def is_bad(self) -> bool:
        """Say whether the step is to be done again. Main thread; waits for the device."""
        if self.attempt is None:
            return False
        # WHY so: this rank may wait here for another one, whose part of a sum is missing
        with self._stepper.parts.group.tracker.within(Phase.ALL_REDUCE):
            return self.attempt.is_bad()

    def settle(self) -> None:
        """Bring the last step out of doubt: do it again if it was bad. Collective: all ranks.

        Call it before the weights, the losses or progress are read for more than the next step.
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
        """Make progress that of the weights; give the last step if the device left it out.

        Rank-local, while no other thread commits a step. Waits for the device.
        """
        stepper, attempt = self._stepper, self.attempt
        is_bad = attempt is not None and attempt.is_bad()
        self.attempt = None  # WHY not before: another thread may ask while this one waits
        if attempt is None or not is_bad:
            return None
        stepper.take_back(attempt)
        return attempt
