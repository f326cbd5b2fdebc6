"""What a step asks of the object that sums its gradients over the ranks, and two such objects.

GradientSum itself is that of one rank. AfterBackward adds up once backward is over, through shared
memory: for CPU ranks of one machine. ByDdp (by_ddp.py) has DDP's hooks send while backward still
runs. A step never asks which one it has. In each of them the sums themselves tell all ranks that
one failed. ByDdp sends more where it adds up after backward, and on a GPU without a late flag.
WHY not by DDP's hooks on one machine: these overlap sending with backward, which gains nothing
where every core computes, and shared memory (ranks/shared_sum.py) is many times as fast. There a
mark of each rank that failed is added up with the gradients: one that has no sample takes part with
zeros.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """What this rank adds to the gradients of a step."""

    has_failed: bool
    num_samples: int  # its samples that are in the gradients
    count: float | torch.Tensor  # What counts in them, such as valid tokens. On the device.


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """What came of a step, over all ranks; the gradients themselves lie in parameter.grad."""

    num_samples: int
    count: float | torch.Tensor = 0.0  # what counts in the step; on the device if is_bad is
    are_finite: bool = False  # The gradients are known to be finite. False: not known.

    # 1.0 if some rank failed or the gradient is not finite, else 0.0: on the device, of shape (),
    # the same on all ranks. None: it is known here that no rank failed.
    is_bad: torch.Tensor | None = None


class LocalGradients:
    """The gradients of the trained parameters on this rank."""

    def __init__(self, module: nn.Module) -> None:
        self.by_name = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.parameters: list[torch.Tensor] = list(self.by_name.values())
        self._has_complex = any(parameter.is_complex() for parameter in self.parameters)

    def are_finite(self) -> bool:
        """Return whether all gradients are finite. Waits for the device.

        On a GPU also whether they can be squared, see flag_of. WHY sums on the CPU: NaN and inf
        persist in them, and a sum is the fastest check that torch has there (isfinite takes five
        times as long). A sum of large numbers may overflow too, so if it is not finite, each
        gradient is checked.
        """
        gradients = self.real()
        if not all(gradient.is_cpu for gradient in gradients[:1]):
            return not flag_of(gradients).item()
        total = sum([gradient.sum().item() for gradient in gradients])
        return math.isfinite(total) or all(bool(g.isfinite().all()) for g in gradients)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients by factor; on a GPU by one kernel."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not gradients or (isinstance(factor, float) and factor == 1.0):
            return
        if isinstance(factor, torch.Tensor) and len({g.dtype for g in gradients}) == 1:
            # WHY: with a factor of another dtype, CUDA launches a kernel for each gradient
            factor = factor.to(gradients[0].dtype)
        torch._foreach_mul_(gradients, factor)

    def real(self) -> list[torch.Tensor]:
        """Return the gradients that there are, of complex parameters as pairs of real numbers."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [real(gradient) for gradient in found] if self._has_complex else found


class GradientSum:
    """Sums the gradients of the steps of one model over the ranks: here of one rank, its own.

    What returns here need do nothing where no gradient is sent within backward.
    """

    how = "of one rank"  # how they are summed, for the start of the log

    def __init__(self, module: nn.Module, group: Group, *, allows_unused: bool = True) -> None:
        """allows_unused: a parameter may get no gradient on some rank, which counts as zero.

        It may change, at the same step on all ranks.
        """
        self.local = LocalGradients(module)  # this rank's; after finish those of all ranks
        self.call = module  # what training calls for a forward: DDP's prepares its hooks
        self.allows_unused = allows_unused
        self.group = group

    @property
    def tells_of_failures(self) -> bool:
        """A rank whose forward or backward failed can tell the others within the sums."""
        return True

    def sends_within(self, window: Window) -> bool:
        """Return whether gradients of a step are sent while its backward runs."""
        return True  # nothing is to be sent after it

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
        return nullcontext()

    def note_count(self, count: float | torch.Tensor) -> None:
        """Note what counts in this rank's samples of the step so far. Rank-local.

        Before each backward, if the loss is no mean over samples.
        """

    def send_nan_for_rest(self) -> bool:
        """For a rank that failed: take part in what the others still send. Collective.

        Returns False if that is impossible: then the others don't know that this rank failed.
        """
        return True  # the mark of finish is enough

    def finish(self, mine: Marks, *, window: Window, on_device: bool) -> Sums | None:
        """Complete the sums of a try; None: some rank failed. Collective: all ranks.

        on_device: the device may be the first to know whether a rank failed, see Sums.is_bad.
        """
        if not on_device:
            if mine.has_failed:
                return None
            return Sums(num_samples=mine.num_samples, count=float(mine.count))
        device = self.group.device
        if mine.has_failed:
            is_bad = torch.ones((), device=device)
        else:
            is_bad = flag_of(self.local.real()).to(device)
        count = count_on(device, mine.count)
        return Sums(num_samples=window.size, count=count, is_bad=is_bad)

    def start_over(self) -> None:
        """Forget a try that was taken back. Rank-local: all ranks call it."""

    def warm_up(self, run: Callable[[nn.Module], None]) -> None:
        """Let run do forward and backward until nothing changes any more. Collective: all ranks."""

    def release(self) -> None:
        """Drop what holds the process group; the module stays."""


class AfterBackward(GradientSum):
    """The sums of CPU ranks that share memory."""

    how = "summed through shared memory after backward (--no_shared_memory: by DDP)"

    def sends_within(self, window: Window) -> bool:
        return False

    def finish(self, mine: Marks, *, window: Window, on_device: bool) -> Sums | None:
        parameters = self.local.parameters
        if self.allows_unused:
            parameters = used_anywhere(parameters, self.group)  # collective
        return sum_with_marks(parameters, mine, self.group)  # collective


def used_anywhere(parameters: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return the parameters that have a gradient on some rank; the others keep none. Collective."""
    is_used = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    uses = group.sum_(is_used).tolist()  # collective
    return [p for p, count in zip(parameters, uses, strict=True) if count]


def sum_with_marks(parameters: Sequence[torch.Tensor], mine: Marks, group: Group) -> Sums | None:
    """Add up the gradients of parameters, and the marks; None: some rank failed. Collective."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = real(parameter.grad) if parameter.is_complex() else parameter.grad
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    # WHY before the marks: on a GPU to read or to make them waits, perhaps for another rank
    before = group.tracker.enter(Phase.ALL_REDUCE)
    count = 0.0 if mine.has_failed else float(mine.count)
    marks = torch.tensor([mine.has_failed, mine.num_samples, count], device=group.device)
    # WHY among the gradients: saves an all-reduce
    by_dtype.setdefault(marks.dtype, []).append(marks)
    are_finite = group.shared is not None and bool(parameters)
    # WHY no early exit: every sum is a collective, also after one that is not finite
    for each in by_dtype.values():
        if group.shared is not None:
            are_finite &= group.shared.sum_(each, checks=True)  # collective
        else:
            group.sum_each_(each)  # collective
    num_failed, num_samples, total = marks.tolist()
    group.tracker.enter(before)
    if num_failed > 0:
        return None
    return Sums(num_samples=int(num_samples), count=total, are_finite=are_finite)


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
    """Return 1.0 if an element is NaN, inf or too large, else 0.0: float32, of shape ().

    On their device; the host does not wait. Too large: its square is not finite in float32. WHY:
    torch's fused Adam on CUDA then makes the weight NaN (it has inf - inf in exp_avg_sq). WHY the
    largest element: on a GPU that is one operation for all tensors, and other than a sum it can't
    overflow in 16 bits.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]  # none has no largest element
    if not filled:
        return torch.zeros(())
    # WHY not get_total_norm: its own work on the host takes half the time
    largest = torch.stack(torch._foreach_norm(filled, math.inf))
    most = math.inf if largest.dtype == torch.float64 else 2.0**64
    return largest.lt(most).logical_not().any().float()
