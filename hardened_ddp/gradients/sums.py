"""What a step asks of the object that sums its gradients over the ranks.

There are three: one_rank.py (nothing to add up), after_backward.py (CPU ranks: once backward is
over, through shared memory) and by_ddp.py (DDP's hooks: while backward still runs). A step never
asks which one it has. In each of them the sums themselves tell all ranks that one failed: no
further message is sent.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.gradients.local import LocalGradients


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """What this rank adds to the gradients of a step."""

    has_failed: bool
    num_samples: int
    """Its samples that are in the gradients."""

    count: float | torch.Tensor
    """What counts in them, such as valid tokens. On the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """What came of a step, over all ranks; the gradients themselves lie in parameter.grad."""

    num_samples: int
    count: float | torch.Tensor = 0.0
    """What counts in the step; on the device if is_bad is."""

    are_finite: bool = False
    """The gradients are known to be finite. False: not known."""

    is_bad: torch.Tensor | None = None
    """1.0 if some rank failed or the gradient is not finite, else 0.0: on the device, of shape (),
    the same on all ranks. None: it is known here that no rank failed."""


class GradientSum(Protocol):
    """Sums the gradients of the steps of one model over the ranks."""

    local: LocalGradients
    """This rank's gradients; after finish those of all ranks."""

    call: nn.Module
    """What training calls for a forward: DDP's prepares its hooks."""

    how: str
    """How they are summed, for the start of the log."""

    allows_unused: bool
    """A parameter may get no gradient on some rank, which counts as zero there."""

    @property
    def tells_of_failures(self) -> bool:
        """A rank whose forward or backward failed can tell the others within the sums."""

    def sends_within(self, window: Window) -> bool:
        """Return whether gradients of a step are sent while its backward runs."""

    def begin(self, window: Window, *, keeps_local: bool) -> None:
        """Begin a try at a step. keeps_local: nothing is sent before finish. Rank-local."""

    def around(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Surround forward and backward of a micro-batch; is_last: of this try. Rank-local."""

    def before_backward(self, count: float | torch.Tensor, *, is_last: bool) -> float:
        """Prepare for the backward of a micro-batch; return the factor for its loss. Rank-local.

        count: what counts in this rank's samples of the step so far. The backward that follows is
        collective if is_last and gradients are sent within it.
        """

    def missing(self, window: Window) -> list[str]:
        """Name the parameters that must have a gradient after this backward, and have none."""

    def send_nan_for_rest(self) -> bool:
        """For a rank that failed: take part in what the others still send. Collective.

        Returns False if that is impossible: then the others don't know that this rank failed.
        """

    def finish(self, mine: Marks, *, window: Window, is_late: bool) -> Sums | None:
        """Complete the sums of a try; None: some rank failed. Collective: all ranks.

        is_late: the device may be the first to know whether a rank failed, see Sums.is_bad.
        """

    def allow_unused(self) -> None:
        """Allow from now on that a parameter gets no gradient. Rank-local: all ranks call it."""

    def start_over(self) -> None:
        """Forget a try that was taken back. Rank-local: all ranks call it."""

    def warm_up(self, run: Callable[[nn.Module], None]) -> None:
        """Let run do forward and backward until nothing changes any more. Collective: all ranks."""

    def release(self) -> None:
        """Drop what holds the process group; the module stays."""


def count_on(device: torch.device, count: float | torch.Tensor) -> torch.Tensor:
    """Return what counts in a rank's samples on device: float64, of shape ()."""
    if isinstance(count, torch.Tensor) and count.device == device:
        return count.to(torch.float64)
    # WHY full: a number of the host would be copied to the device, which waits for it
    return torch.full((), float(count), dtype=torch.float64, device=device)
