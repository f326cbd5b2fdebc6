"""What a step asks of the object that sums its gradients over the ranks.

There are three: OneRank (nothing to add up) and AfterBackward (CPU ranks of one machine: once
backward is over, through shared memory) in after_backward.py, and ByDdp (DDP's hooks: while
backward still runs) in by_ddp.py. A step never asks which one it has. In each of them the sums
themselves tell all ranks that one failed: no further message is sent.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from hardened_ddp.data.batches.sampler import Window


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


class LocalGradients:
    """The gradients of the trained parameters on this rank."""

    def __init__(self, module: nn.Module) -> None:
        self.by_name = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.parameters: list[torch.Tensor] = list(self.by_name.values())
        self._has_complex = any(parameter.is_complex() for parameter in self.parameters)

    def missing(self) -> list[str]:
        """Name the parameters without a gradient after the last backward."""
        return [name for name, parameter in self.by_name.items() if parameter.grad is None]

    def are_finite(self) -> bool:
        """Return whether all gradients are finite. Waits for the device.

        WHY sums: NaN and inf persist in them, and a sum is the fastest check that torch has
        (isfinite takes five times as long). A sum of large numbers may overflow too, so if it is
        not finite, each gradient is checked.
        """
        gradients = self.real()
        if all(gradient.device.type == "cpu" for gradient in gradients[:1]):
            sums = [gradient.sum().item() for gradient in gradients]
        else:  # one wait for all of them
            sums = torch.stack([g.sum().double() for g in gradients]).tolist()
        return math.isfinite(sum(sums)) or all(bool(g.isfinite().all()) for g in gradients)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients by factor; on a GPU by one kernel."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if isinstance(factor, float) and factor == 1.0:
            return
        if gradients and hasattr(torch, "_foreach_mul_"):
            if isinstance(factor, torch.Tensor) and len({g.dtype for g in gradients}) == 1:
                # WHY: with a factor of another dtype, CUDA launches a kernel for each gradient
                factor = factor.to(gradients[0].dtype)
            torch._foreach_mul_(gradients, factor)
            return
        for gradient in gradients:
            gradient.mul_(factor)

    def real(self) -> list[torch.Tensor]:
        """Return the gradients that there are, of complex parameters as pairs of real numbers."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [real(gradient) for gradient in found] if self._has_complex else found


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

    factor: float
    """What the losses of this try are multiplied by, where the sum divides by the ranks."""

    @property
    def tells_of_failures(self) -> bool:
        """A rank whose forward or backward failed can tell the others within the sums."""

    def sends_within(self, window: Window) -> bool:
        """Return whether gradients of a step are sent while its backward runs."""

    def begin(
        self, window: Window, *, keeps_local: bool, when_computed: Callable[[], None] | None = None
    ) -> None:
        """Begin a try at a step. keeps_local: nothing is sent before finish. Rank-local.

        when_computed: called within backward, before the last of the gradients are sent.
        """

    def around(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Surround forward and backward of a micro-batch; is_last: of this try. Rank-local.

        The backward of the last one is collective if gradients are sent within it.
        """

    def note_count(self, count: float | torch.Tensor) -> None:
        """Note what counts in this rank's samples of the step so far. Rank-local.

        Before each backward, if the loss is no mean over samples.
        """

    def send_nan_for_rest(self) -> bool:
        """For a rank that failed: take part in what the others still send. Collective.

        Returns False if that is impossible: then the others don't know that this rank failed.
        """

    def finish(self, mine: Marks, *, window: Window, on_device: bool) -> Sums | None:
        """Complete the sums of a try; None: some rank failed. Collective: all ranks.

        on_device: the device may be the first to know whether a rank failed, see Sums.is_bad.
        """

    def allow_unused(self) -> None:
        """Allow from now on that a parameter gets no gradient. Rank-local: all ranks call it."""

    def start_over(self) -> None:
        """Forget a try that was taken back. Rank-local: all ranks call it."""

    def warm_up(self, run: Callable[[nn.Module], None]) -> None:
        """Let run do forward and backward until nothing changes any more. Collective: all ranks."""

    def release(self) -> None:
        """Drop what holds the process group; the module stays."""


def real(gradient: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones, in the same memory; others as they are."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def count_on(device: torch.device, count: float | torch.Tensor) -> torch.Tensor:
    """Return what counts in a rank's samples on device: float64, of shape ()."""
    if isinstance(count, torch.Tensor) and count.device == device:
        return count.to(torch.float64)
    # WHY full: a number of the host would be copied to the device, which waits for it
    return torch.full((), float(count), dtype=torch.float64, device=device)


def flag_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return 1.0 if an element is NaN or inf, else 0.0: float32, of shape (), on their device.

    The host does not wait. WHY the largest element: on a GPU that is one operation for all tensors,
    and other than a sum it can't overflow in 16 bits.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]  # none has no largest element
    largest = torch.nn.utils.get_total_norm(filled, norm_type=math.inf)
    return largest.lt(math.inf).logical_not().float()
