"""DDP's hooks: gradients are sent bucket by bucket, while backward still runs.

A step in which some rank has no sample, and each retry, keep their gradients on the rank, and add
them up once backward is over, in the order of the buckets: so the weights are bitwise the same.

The communication hook (Buckets) records the order and the content of the buckets, so that a rank
whose forward or backward failed can still take part in the remaining all-reduces: it sends NaN.
Then no rank waits forever, and every rank sees in its own sums that one failed, without a message.
WHY sums: losses are divided by the samples of the whole step, so the sum is the mean.
The documented methods are in sums.py. Read next: step/retry.py, what happens after a failure.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.gradients.after_backward import sum_with_marks, used_anywhere
from hardened_ddp.gradients.sums import LocalGradients, Marks, Sums, count_on, flag_of
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase

Work = torch.futures.Future[torch.Tensor]


class ByDdp:
    """The GradientSum of ranks whose gradients DDP sends."""

    how = "summed by DDP during backward"

    def __init__(
        self,
        ddp: DistributedDataParallel,
        group: Group,
        *,
        buckets: "Buckets | None",
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

    def begin(
        self, window: Window, *, keeps_local: bool, when_computed: Callable[[], None] | None = None
    ) -> None:
        self._is_within = not keeps_local and self.sends_within(window)
        # WHY: without our hook, DDP's own all-reduce divides by the ranks
        divides = self._is_within and self._buckets is None
        self.factor = float(self._group.world_size) if divides else 1.0
        if self._is_within and self._buckets is not None:
            self._buckets.begin(when_computed)

    def around(self, *, is_last: bool) -> AbstractContextManager[object]:
        # WHY around forward too: DDP decides there whether its hooks send what backward gives.
        if (is_last and self._is_within) or self._ddp is None:
            return nullcontext()
        return self._keep_local(self._ddp)

    @contextmanager
    def _keep_local(self, ddp: DistributedDataParallel) -> Iterator[None]:
        hooks = [] if self._buckets is None else self._buckets.take_in()
        try:
            with ddp.no_sync():
                yield
        finally:
            for hook in hooks:
                hook.remove()

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
                self._buckets.let_go()
            run(self.call)  # collective

    def release(self) -> None:
        """Drop the DDP wrapper; the module stays.

        WHY: if DDP holds the last reference to the process group, its destructor waits for gloo's
        thread while it holds the GIL, which that thread may need: the process would never end.
        """
        if self._ddp is not None:
            self.call = self._ddp.module
            self._ddp = None

    def _sums_on_device(self, buckets: "Buckets", mine: Marks, window: Window) -> Sums:
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
        if (ddp := self._ddp) is not None and ddp.find_unused_parameters and not ddp.static_graph:
            # WHY: DDP clears its marks of what was used when it sends gradients; these would count
            # in the next step, for a parameter without a gradient there. With this search DDP
            # rebuilds no buckets after a reset.
            _reset_reducer(ddp)
        return found

    def _sum_count(self, count: float | torch.Tensor) -> float:
        """Add up what counts over the ranks, where no hook of ours sends it. Collective."""
        device = self._group.device
        with self._group.tracker.within(Phase.ALL_REDUCE):  # WHY here: on a GPU float() waits
            total = torch.as_tensor(count, dtype=torch.float64, device=device).clone()
            return float(self._group.sum_(total))  # collective


class Buckets:
    """The sums of one model's gradients over all ranks, by DDP's hooks."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        group: Group,
        *,
        sent_as: torch.dtype | None = None,
        counts: bool = False,
        calls_collectives: bool = False,
    ) -> None:
        """Register the hook of ddp. sent_as: the dtype for sending; None: that of the gradients.

        counts: add up over the ranks, with the gradients, what note_count noted. calls_collectives:
        the model does so in its forward.
        """
        self._ddp = ddp
        self._group = group
        self._device = group.device
        self._sent_as = sent_as
        self._layout: list[list[torch.Tensor]] = []
        self._flats: list[torch.Tensor] = []
        """DDP's memory of each bucket; none before a backward has shown it."""

        self._under_way: list[list[torch.Tensor]] = []
        self._buffers: list[torch.Tensor] = []
        self._first = torch.empty(0)
        """The first bucket with the count behind it. WHY kept: sending needs no new memory."""

        self._futures: list[Work] = []
        self._when_computed: Callable[[], None] | None = None
        self._sums_count = counts
        self._count: float | torch.Tensor = 0.0
        self._total = torch.zeros((), dtype=torch.float64, device=group.device)
        self._total_work: dist.Work | None = None
        self.are_old = False
        """DDP has to rebuild its buckets. The same on all ranks."""

        ddp.register_comm_hook(None, self._send)

        # WHY: a collective within forward, as SyncBatchNorm's, is seen by no hook. And a reducer
        # that waits for a backward that never came has to be reset, and has to rebuild its buckets
        # before a rank can fail again; torch has no public function for either.
        has_functions = all(hasattr(ddp.reducer, n) for n in ("_reset_state", "_rebuild_buckets"))
        self.can_send_nan = not calls_collectives and has_functions
        """A rank that failed can take part in the all-reduces of the others."""

    def begin(self, when_computed: Callable[[], None] | None = None) -> None:
        """Forget what was sent in the last backward. Rank-local."""
        self._under_way, self._buffers, self._futures = [], [], []
        self._when_computed = when_computed
        self._total_work = None

    def let_go(self) -> None:
        """Drop all memory of DDP's buckets, before DDP builds others. Rank-local."""
        self.begin()
        self._flats = []

    def note_count(self, count: float | torch.Tensor) -> None:
        """Note what counts in this rank's samples, such as valid tokens, before a backward."""
        self._count = count

    def send_nan_for_rest(self) -> bool:
        """Send NaN in all remaining all-reduces of a backward that failed, or never began.

        Returns False if that is impossible or none remained: then the other ranks don't know that
        this one failed. Collective: the others are in that backward.
        """
        if not self.can_send_nan:
            return False
        self._group.tracker.enter(Phase.ALL_REDUCE)
        remaining = range(len(self._under_way), len(self._layout))
        is_beside = self._sums_count and self._total_work is None
        if remaining and is_beside and not self._rides(self._layout[0][0].dtype):
            dist.all_reduce(self._total.fill_(math.nan))
        for number in remaining:
            # WHY memory that is there: perhaps no other is left
            flat = self._flat(number)
            if number == 0 and self._rides(flat.dtype):
                flat = self._with_count(flat)
            elif self._sent_as is not None:
                flat = flat.view(self._sent_as)[: flat.numel()]
            dist.all_reduce(flat.fill_(math.nan))
        if remaining and self._ddp.find_unused_parameters and not self._ddp.static_graph:
            # After the last bucket DDP adds up which parameters each rank has used. WHY ones: it
            # takes the sum only for those, and each rank must see the NaN.
            count = sum(len(parameters) for parameters in self._layout)
            dist.all_reduce(torch.ones(count, dtype=torch.int32, device=self._device))
        for future in self._futures:
            future.wait()
        return bool(remaining)

    def read(self, failed_here: bool) -> tuple[bool, bool]:
        """Return whether any rank sent NaN in the last backward, the same on all ranks.

        And whether the sums are known to be finite. On the CPU they show both. WHY not on a GPU:
        reading a sum waits for the device. There the ranks exchange a flag over the CPU while the
        GPU still computes. Collective there.
        """
        if self._device.type == "cpu":
            if failed_here:
                return True, False
            # NaN and inf persist in a sum: one sum per bucket is usually enough
            are_finite = math.isfinite(sum(buffer.sum().item() for buffer in self._buffers))
            has_nan = not are_finite and any(math.isnan(buffer[0]) for buffer in self._buffers)
            return has_nan, are_finite
        if not self.can_send_nan:  # then a rank that fails ends the attempt
            return False, False
        flag = torch.tensor([float(failed_here)])
        if (work := self._group.start_max(flag)) is not None:  # collective
            self._group.finish(work)  # collective
        return bool(flag), False

    def are_bad(self) -> torch.Tensor:
        """Return 1.0 if a sum of the last backward is not finite, else 0.0. On the device, ().

        For a rank that did not fail itself. NaN sent by another rank counts too.
        """
        return flag_of(self._buffers)

    def disarm(self) -> None:
        """Make DDP ready for the next forward after a backward that did not end. Rank-local.

        DDP then rebuilds its buckets after the next backward, which is a collective: reset makes
        the other ranks do the same.
        """
        self.begin()
        _reset_reducer(self._ddp)

    def reset(self) -> None:
        """Disarm DDP, and have renew rebuild its buckets. Rank-local: all ranks call it."""
        self.disarm()
        self.are_old = True

    def renew(self) -> None:
        """Rebuild DDP's buckets after a reset and a backward in which no rank failed.

        WHY not in its next forward, as DDP does: a rank may fail before it. Collective.
        """
        self.are_old = False
        self.let_go()
        if hasattr(self._ddp.reducer, "_rebuild_buckets"):  # else see can_send_nan
            self._ddp.reducer._rebuild_buckets()  # collective

    def take_in(self) -> list[RemovableHandle]:
        """Have backward move gradients that stay local into DDP's buckets, until removed.

        WHY: beside them they take as much again, which a rank out of memory does not have.
        """
        if not (self._ddp.gradient_as_bucket_view and self._flats):
            return []
        return [
            parameter.register_post_accumulate_grad_hook(partial(_move, place))  # type: ignore[no-untyped-call]
            for flat, parameters in zip(self._flats, self._layout, strict=True)
            for place, parameter in zip(_places(flat, parameters), parameters, strict=True)
            if parameter.requires_grad  # else it was frozen since
        ]

    @torch.no_grad()
    def sum_local(self, used: Iterable[torch.Tensor]) -> None:
        """Add up gradients that stayed local, in the same order as the hook does. Collective.

        used: the parameters that have a gradient on some rank; the others keep none.
        """
        before = self._group.tracker.enter(Phase.ALL_REDUCE)
        used_ids = {id(parameter) for parameter in used}
        for number, parameters in enumerate(self._layout):
            flat = self._flat(number)
            places = _places(flat, parameters)
            for place, parameter in zip(places, parameters, strict=True):
                if parameter.grad is None:
                    place.zero_()
                else:
                    _move(place, parameter)
            sent = self._sent(number, flat)
            dist.all_reduce(sent)  # collective
            if sent is not flat:
                flat.copy_(sent[: flat.numel()])
            for place, parameter in zip(places, parameters, strict=True):
                parameter.grad = place if id(parameter) in used_ids else None
        self._group.tracker.enter(before)

    def total(self) -> torch.Tensor:
        """Return the sum of count over the ranks after the last backward: float64, of shape ()."""
        if self._total_work is not None:
            self._total_work.wait()
            self._total_work = None
        return self._total

    def _flat(self, number: int) -> torch.Tensor:
        """Return DDP's memory of a bucket, or other memory while that is not known."""
        if self._flats:
            return self._flats[number]
        parameters = self._layout[number]
        return parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))

    def _rides(self, dtype: torch.dtype) -> bool:
        """Return whether the count is sent within the first bucket, of gradients of dtype.

        Else beside it. WHY not in 16 bits: bf16 counts to 256, fp16 to 2048.
        """
        is_wide = (self._sent_as or dtype) in (torch.float32, torch.float64)
        return self._sums_count and is_wide

    def _sent(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        """Return what is sent for a bucket: itself, in 16 bits, or with the count behind it."""
        if number == 0 and self._rides(flat.dtype):
            sent = self._with_count(flat)
            sent[:-1].copy_(flat)
            sent[-1].copy_(count_on(flat.device, self._count))
            return sent
        return flat if self._sent_as is None else flat.to(self._sent_as)

    def _with_count(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the memory in which the first bucket is sent with the count."""
        if self._first.numel() != flat.numel() + 1:
            self._first = flat.new_empty(flat.numel() + 1)
        return self._first

    def _send(self, state: None, bucket: dist.GradBucket) -> Work:
        """Start the all-reduce of one bucket: DDP's communication hook.

        What has no memory raises. WHY noted after its launch: what is not noted is still to send.
        """
        number, buffer = len(self._under_way), bucket.buffer()
        rides = number == 0 and self._rides(buffer.dtype)
        if self._sums_count and number == 0 and not rides:
            self._total.copy_(count_on(buffer.device, self._count))
            self._total_work = dist.all_reduce(self._total, async_op=True)  # collective
        sent = self._sent(number, buffer)
        if bucket.is_last() and self._when_computed is not None:
            self._when_computed()
        work = dist.all_reduce(sent, async_op=True)  # collective
        self._under_way.append(bucket.parameters())
        self._buffers.append(buffer)
        if bucket.is_last():
            self._layout, self._flats = self._under_way, self._buffers
            # From here on backward waits for the other ranks.
            self._group.tracker.enter(Phase.ALL_REDUCE)

        def received(summed: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            found = summed.value()[0]
            if rides:
                self._total.copy_(found[-1])
            return found if sent is buffer else buffer.copy_(found[: buffer.numel()])

        done: Work = work.get_future().then(received)
        self._futures.append(done)
        return done


def _reset_reducer(ddp: DistributedDataParallel) -> None:
    if hasattr(ddp.reducer, "_reset_state"):  # else see can_send_nan
        ddp.reducer._reset_state()


@torch.no_grad()
def _move(place: torch.Tensor, parameter: torch.Tensor) -> None:
    """Let the gradient of parameter lie at place: it adds up there."""
    gradient = parameter.grad
    if gradient is not None and gradient.data_ptr() != place.data_ptr():
        place.copy_(gradient)
        parameter.grad = place


def _places(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the view of a bucket for each parameter, with the memory layout of the parameter.

    WHY: the order of additions depends on the position in the bucket.
    """
    found, begin = [], 0
    for parameter in parameters:
        sides = zip(parameter.size(), parameter.stride(), strict=True)
        is_dense = parameter.numel() == 1 + sum((size - 1) * stride for size, stride in sides)
        part = flat[begin : begin + parameter.numel()]
        found.append(
            part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
            if is_dense
            else part.view(parameter.size())
        )
        begin += parameter.numel()
    return found
