"""On a GPU: whether the gradient of a step was good, learned one step later, without a wait.

Owns that look. To read a number on a GPU is to wait for all work before it, and to ask the other
ranks would be a message per step. So nobody asks: a rank that failed has sent NaN (buckets.py), and
that, or a gradient that is no number by itself, makes a flag on the device. The flag has the
optimizer leave everything as it is: found_inf of torch's fused optimizers, by which GradScaler
skips a step. It is the same on all ranks, because the sums are. Its copy is on its way to the host
while the next step is computed already; only then is it read, and if it is up, the host takes both
steps back and does them again (Stepper). So the host is at most one step ahead of the GPU.

With fp16 a gradient that is no number is an everyday matter: its GradScaler leaves such a step out
and takes a smaller scale. That is taken back too; the step done again tells what it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.step.failure import Failure
from hardened_ddp.step.totals import Mark


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


@dataclass(slots=True)
class Attempt:
    """The window under way, and what it takes to do it again."""

    window: Window
    batches: Sequence[Batch]
    buffers: Sequence[torch.Tensor]
    """The moving buffers before it."""

    before: Mark
    scale_before: Sequence[torch.Tensor]
    """The numbers of fp16's scaler before it."""

    failure: Failure | None = None
    """How this rank failed in it."""

    loss_after: torch.Tensor | float = 0.0
    """What the losses added up to after it, on the device."""

    has_gradient: bool = True
    """False: it was given up."""

    flag: Flag | None = None
    """Up: some rank failed in it, or its gradient is no number. None: that is known already."""

    def loss(self) -> float:
        """Give this rank's loss in it. Waits for the device."""
        return float(self.loss_after) - float(self.before[0])

    def is_bad(self) -> bool:
        """Say whether its flag is up. Waits for the device."""
        return self.flag is not None and self.flag.is_up()
