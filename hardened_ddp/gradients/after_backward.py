"""Gradients that are added up once backward is over: of one rank, or of CPU ranks of one machine.

WHY not by DDP's hooks there: these overlap sending with backward, which gains nothing where every
core computes, and shared memory (ranks/shared_sum.py) is many times as fast. A mark of each rank
that failed is added up with the gradients, so one that has no sample, or failed, takes part with
zeros. The documented methods are in sums.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.gradients.sums import LocalGradients, Marks, Sums, count_on, flag_of, real
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase


class OneRank:
    """The GradientSum of a run on one rank: its gradients are the sums."""

    how = "of one rank"
    tells_of_failures = True
    allows_unused = True  # no other rank waits for a gradient
    factor = 1.0

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.local = LocalGradients(module)
        self.call = module
        self._device = device
        self._nothing = nullcontext()

    def sends_within(self, window: Window) -> bool:
        return True  # nothing is to be sent after it

    def begin(
        self, window: Window, *, keeps_local: bool, when_computed: Callable[[], None] | None = None
    ) -> None:
        """Nothing is left of an earlier try, and nothing is sent within backward."""

    def around(self, *, is_last: bool) -> AbstractContextManager[object]:
        return self._nothing

    def note_count(self, count: float | torch.Tensor) -> None:
        """Its mark has it."""

    def send_nan_for_rest(self) -> bool:
        return True  # nobody waits

    def finish(self, mine: Marks, *, window: Window, on_device: bool) -> Sums | None:
        if not on_device:
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
        """It is always allowed."""

    def start_over(self) -> None:
        """Nothing is left of a try."""

    def warm_up(self, run: Callable[[nn.Module], None]) -> None:
        """Nothing changes with the first backward."""

    def release(self) -> None:
        """There is no process group."""


class AfterBackward:
    """The GradientSum of CPU ranks that share memory."""

    how = "summed through shared memory after backward (--no_shared_memory: by DDP)"
    tells_of_failures = True
    factor = 1.0

    def __init__(self, module: nn.Module, group: Group, *, allows_unused: bool) -> None:
        self.local = LocalGradients(module)
        self.call = module
        self.allows_unused = allows_unused
        self._group = group
        self._nothing = nullcontext()

    def sends_within(self, window: Window) -> bool:
        return False

    def begin(
        self, window: Window, *, keeps_local: bool, when_computed: Callable[[], None] | None = None
    ) -> None:
        """Nothing is left of an earlier try, and nothing is sent within backward."""

    def around(self, *, is_last: bool) -> AbstractContextManager[object]:
        return self._nothing

    def note_count(self, count: float | torch.Tensor) -> None:
        """Its mark has it."""

    def send_nan_for_rest(self) -> bool:
        return True  # its mark is enough

    def finish(self, mine: Marks, *, window: Window, on_device: bool) -> Sums | None:
        parameters = self.local.parameters
        if self.allows_unused:
            parameters = used_anywhere(parameters, self._group)  # collective
        return sum_with_marks(parameters, mine, self._group)  # collective

    def allow_unused(self) -> None:
        self.allows_unused = True

    def start_over(self) -> None:
        """Nothing is left of a try."""

    def warm_up(self, run: Callable[[nn.Module], None]) -> None:
        """Nothing changes with the first backward."""

    def release(self) -> None:
        """It holds no process group of torch."""


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
