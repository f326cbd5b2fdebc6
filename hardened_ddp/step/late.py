"""On a GPU: whether the gradient of a step was good is read one step later, without a wait.

Owns that flag; Stepper.settle reads it. Reading a number on a GPU waits for all work before it, and
asking the other ranks would cost a message per step. Instead, a rank that failed has sent NaN
(buckets.py), and that, or a gradient that is not finite by itself, sets a flag on the device. The
flag makes the optimizer skip the update: it is found_inf of torch's fused optimizers, with which
GradScaler skips a step. It is the same on all ranks, because the sums are. It is copied to the host
while the next step already runs, and read only then; if it is up, the host takes back both steps
and does them again. So the host is at most one step ahead of the GPU.

With fp16 a gradient that is not finite is normal: GradScaler skips such a step and lowers the
scale. That is taken back too; the retry shows which of the two it was.
"""

import torch

from hardened_ddp.step.boundary import Event, new_event


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
