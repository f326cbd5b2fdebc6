"""One try at a step: what it takes to do it again, and what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.step.failure import Failure
from hardened_ddp.step.late import Flag
from hardened_ddp.step.progress import Mark


class Outcome(Enum):
    """What became of a step, on all ranks alike."""

    DONE = "done"
    LEFT_OUT = "left out"
    """Given up under --continue_on_error: its samples are passed over, the weights stay."""


@dataclass(slots=True)
class Attempt:
    """The step under way, and what it takes to do it again."""

    window: Window
    batches: Sequence[Batch]
    buffers: Sequence[torch.Tensor]
    """The moving buffers before it."""

    totals_before: Mark
    scale_before: Sequence[torch.Tensor]
    """The numbers of fp16's scaler before it."""

    outcome: Outcome = Outcome.DONE
    failure: Failure | None = None
    """How this rank failed in it."""

    loss_after: torch.Tensor | float = 0.0
    """What the losses added up to after it, on the device."""

    flag: Flag | None = None
    """Up: some rank failed in it, or its gradient is not finite. None: that is known already."""

    def loss(self) -> float:
        """Give this rank's loss in it. Waits for the device."""
        return float(self.loss_after) - float(self.totals_before[0])

    def is_bad(self) -> bool:
        """Say whether its flag is up. Waits for the device."""
        return self.flag is not None and self.flag.is_up()
