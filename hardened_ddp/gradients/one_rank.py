"""One rank: its gradients are the sums."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.gradients.buckets import flag_of
from hardened_ddp.gradients.local import LocalGradients
from hardened_ddp.gradients.sums import Marks, Sums, count_on


class OneRank:
    """The GradientSum of a run on one rank."""

    how = "of one rank"
    tells_of_failures = True
    allows_unused = True

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.local = LocalGradients(module)
        self.call = module
        self._device = device
        self._nothing = nullcontext()

    def sends_within(self, window: Window) -> bool:
        return True  # nothing is to be sent after it

    def begin(self, window: Window, *, keeps_local: bool) -> None:
        """Nothing is left of an earlier try."""

    def around(self, *, is_last: bool) -> AbstractContextManager[object]:
        return self._nothing

    def before_backward(self, count: float | torch.Tensor, *, is_last: bool) -> float:
        return 1.0

    def missing(self, window: Window) -> list[str]:
        return []

    def send_nan_for_rest(self) -> bool:
        return True

    def finish(self, mine: Marks, *, window: Window, is_late: bool) -> Sums | None:
        if not is_late:
            if mine.has_failed:
                return None
            return Sums(num_samples=mine.num_samples, count=float(mine.count))
        if mine.has_failed:
            is_bad = torch.ones((), device=self._device)
        else:
            is_bad = flag_of(self.local.real()).to(self._device)
        count = count_on(self._device, mine.count)
        return Sums(num_samples=window.size, count=count, is_bad=is_bad)

    def allow_unused(self) -> None:
        """It is always allowed: no other rank waits for a gradient."""

    def start_over(self) -> None:
        """Nothing is left of a try."""

    def warm_up(self, run: Callable[[nn.Module], None]) -> None:
        """Nothing changes with the first backward."""

    def release(self) -> None:
        """There is no process group."""
