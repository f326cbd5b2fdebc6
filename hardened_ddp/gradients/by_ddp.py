"""DDP's hooks: gradients are sent bucket by bucket, while backward still runs.

A step in which some rank has no sample, and each retry, keep their gradients on the rank, and add
them up once backward is over, in the order of the buckets: so the weights are bitwise the same.

Read next: buckets.py, the communication hook, and how a rank that failed takes part in the sums.
The documented methods are in sums.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.gradients.after_backward import sum_with_marks, used_anywhere
from hardened_ddp.gradients.buckets import Buckets, forget_used
from hardened_ddp.gradients.sums import LocalGradients, Marks, Sums
from hardened_ddp.ranks.group import Group


class ByDdp:
    """The GradientSum of ranks whose gradients DDP sends."""

    how = "summed by DDP during backward"

    def __init__(
        self,
        ddp: DistributedDataParallel,
        group: Group,
        *,
        buckets: Buckets | None,
        counts: bool,
        allows_unused: bool,
    ) -> None:
        """buckets: our hook in ddp; None: DDP's own, or torch's for PowerSGD.

        counts: the loss is a mean over something else than samples.
        """
        self.local = LocalGradients(ddp.module)
        self.call: nn.Module = ddp
        self.allows_unused = allows_unused
        self.factor = 1.0
        self._ddp: DistributedDataParallel | None = ddp
        self._group = group
        self._buckets = buckets
        self._sums_count = counts
        self._finds_unused = ddp.find_unused_parameters
        self._is_within = False

    @property
    def tells_of_failures(self) -> bool:
        if self.allows_unused and not self._finds_unused:
            return True  # nothing is sent within backward any more
        return self._buckets is not None and self._buckets.can_send_nan

    def sends_within(self, window: Window) -> bool:
        # WHY: DDP takes find_unused_parameters only when it is built; else it waits for every one
        can_send = self._finds_unused or not self.allows_unused
        return can_send and window.is_for_all(self._group.world_size)

    def begin(self, window: Window, *, keeps_local: bool) -> None:
        self._is_within = not keeps_local and self.sends_within(window)
        # WHY: without our hook, DDP's own all-reduce divides by the ranks
        divides = self._is_within and self._buckets is None
        self.factor = float(self._group.world_size) if divides else 1.0
        if self._is_within and self._buckets is not None:
            self._buckets.begin()

    def around(self, *, is_last: bool) -> AbstractContextManager[object]:
        # WHY around forward too: DDP decides there whether its hooks send what backward gives.
        if (is_last and self._is_within) or self._ddp is None:
            return nullcontext()
        return self._ddp.no_sync()

    def note_count(self, count: float | torch.Tensor) -> None:
        if self._buckets is not None:
            self._buckets.note_count(count)

    def send_nan_for_rest(self) -> bool:
        if not self._is_within:
            return True  # its mark is enough
        return self._buckets is not None and self._buckets.send_nan_for_rest()  # collective

    def finish(self, mine: Marks, *, window: Window, on_device: bool) -> Sums | None:
        if not self._is_within:
            return self._sum_local(mine)  # collective
        buckets = self._buckets
        if buckets is None:
            count = self._sum_count(mine.count) if self._sums_count else 0.0  # collective
            return Sums(num_samples=window.size, count=count)
        if on_device and not buckets.are_old:
            return self._sums_on_device(buckets, mine, window)
        some_failed, are_finite = buckets.read(mine.has_failed)  # collective
        if some_failed:
            buckets.reset()
            return None
        if buckets.are_old:
            buckets.renew()  # collective
        count = float(buckets.total()) if self._sums_count else 0.0
        return Sums(num_samples=window.size, count=count, are_finite=are_finite)

    def allow_unused(self) -> None:
        self.allows_unused = True

    def start_over(self) -> None:
        if self._buckets is not None:
            self._buckets.reset()  # WHY: DDP then rebuilds its buckets, on all ranks

    def warm_up(self, run: Callable[[nn.Module], None]) -> None:
        """Run synced forward and backward passes; their gradients are discarded. Collective.

        WHY: DDP rebuilds its buckets after the first backward; from 3 ranks on that changes the
        order of additions. With the warm-up before the first step of every start, a resumed run
        adds in the same order as the unbroken one, so it is bitwise equal. A static graph needs
        one pass more. WHY another pass after that: the ranks agree on the new buckets in a
        forward, by a collective; a rank without a sample in the next step would not reach it. And
        our hook records them.
        """
        for _ in range(3 if self._ddp is not None and self._ddp.static_graph else 2):
            if self._buckets is not None:
                self._buckets.begin()
            run(self.call)  # collective

    def release(self) -> None:
        """Drop the DDP wrapper; the module stays.

        WHY: if DDP holds the last reference to the process group, its destructor waits for gloo's
        thread while it holds the GIL, which that thread may need: the process would never end.
        """
        if self._ddp is not None:
            self.call = self._ddp.module
            self._ddp = None

    def _sums_on_device(self, buckets: Buckets, mine: Marks, window: Window) -> Sums:
        """Leave it to the device whether some rank failed, or the gradient is not finite."""
        if mine.has_failed:
            buckets.disarm()
            is_bad = torch.ones((), device=self._group.device)
            return Sums(num_samples=window.size, is_bad=is_bad)
        count = buckets.total() if self._sums_count else 0.0
        return Sums(num_samples=window.size, count=count, is_bad=buckets.are_bad())

    def _sum_local(self, mine: Marks) -> Sums | None:
        """Add up gradients that stayed on the ranks. Collective: all ranks."""
        parameters = self.local.parameters
        if self.allows_unused:
            parameters = used_anywhere(parameters, self._group)  # collective
        if self._buckets is not None:
            self._buckets.sum_local(parameters)  # collective
            parameters = []
        found = sum_with_marks(parameters, mine, self._group)  # collective
        if self._ddp is not None:
            forget_used(self._ddp)
        return found

    def _sum_count(self, count: float | torch.Tensor) -> float:
        """Add up what counts over the ranks, where no hook of ours sends it. Collective."""
        device = self._group.device
        total = torch.as_tensor(count, dtype=torch.float64, device=device).clone()
        return float(self._group.sum_(total))  # collective
