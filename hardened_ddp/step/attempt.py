"""One attempt at a step: what a retry needs, and the outcome."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.model.moving_attributes import Copies
from hardened_ddp.step.events import Event, Flag
from hardened_ddp.step.failure import Failure
from hardened_ddp.step.progress import Mark


class Outcome(Enum):
    """The outcome of a step. The same on all ranks."""

    DONE = "done"
    LEFT_OUT = "left out"
    """Given up under --continue_on_error: its samples are skipped, the weights don't change."""

    EMPTY = "empty"
    """Nothing in it counts, such as no valid token: the weights don't change."""


@dataclass(slots=True)
class Attempt:
    """The current step, and what a retry needs."""

    window: Window
    batches: Sequence[Batch]
    buffers: Sequence[torch.Tensor | None]
    """The moving buffers before it."""

    totals_before: Mark
    attributes: Copies = field(default_factory=dict)
    """The plain attributes that may move, before it."""

    scale_before: Sequence[torch.Tensor] = ()
    """Scale and growth tracker of fp16's scaler before it."""

    schedule_before: Any = None
    """The state of the schedule before it, if it has one. Any: from Schedule.mark."""

    outcome: Outcome = Outcome.DONE
    failure: Failure | None = None
    """How this rank failed in it."""

    count: float | torch.Tensor = 0.0
    """What counts in this rank's samples, such as valid tokens. On the device."""

    loss_after: torch.Tensor | float = 0.0
    """The sum of the losses after it, on the device."""

    begun: Event | None = None
    """On a device that runs behind the host: when what is copied above has been copied."""

    flag: Flag | None = None
    """Up: some rank failed in it, or its gradient is not finite. None: already known."""

    def loss(self) -> float:
        """Return this rank's loss in it. Waits for the device."""
        return float(self.loss_after) - float(self.totals_before[0])

    def is_bad(self) -> bool:
        """Return whether its flag is up. Waits for the device."""
        return self.flag is not None and self.flag.is_up()
