"""DDP's hooks: gradients are sent bucket by bucket, while backward still runs.

A step in which some rank has no sample, each retry, and each step under --continue_on_error keep
their gradients on the rank, and add them up once backward is over, in the order of the buckets: so
the weights are bitwise the same.

Our communication hook (_send) records the order and the content of the buckets, so that a rank
whose forward or backward failed can still take part in the remaining all-reduces: it sends NaN.
Then no rank waits forever, and every rank sees in its own sums that one failed.
WHY sums: losses are divided by the samples of the whole step, so the sum is the mean.
The documented methods are in sums.py; sum_gradients_of chooses what sums the gradients of a run.
Read next: step/retry.py, what happens after a failure.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.gradients.sums import (
    AfterBackward,
    GradientSum,
    Marks,
    Sums,
    count_on,
    flag_of,
    sum_with_marks,
    used_anywhere,
)
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.settings.config import Config

Work = torch.futures.Future[torch.Tensor]

# The dtype in which our hook sends gradients, by --comm_hook.
_SENT_AS = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class ByDdp(GradientSum):
    """The sums of ranks whose gradients DDP sends."""

    how = "summed by DDP during backward"

    def __init__(
        self,
        ddp: DistributedDataParallel,
        group: Group,
        *,
        sent_as: torch.dtype | None = None,
        counts: bool = False,
        sends_nan: bool = True,
    ) -> None:
        """sent_as: the dtype in which gradients are sent; None: their own.

        counts: the loss is a mean over something else than samples, which is added up over the
        ranks. sends_nan: a rank that failed takes part in the sums of its step.
        """
        super().__init__(ddp.module, group, allows_unused=ddp.find_unused_parameters)
        self.call = self._ddp = ddp
        self._is_within = False
        # After the last bucket DDP adds up which parameters each rank has used.
        self._finds_unused = ddp.find_unused_parameters

        # WHY: a reducer that waits for a backward that never came has to be reset, and has to
        # rebuild its buckets before a rank can fail again; torch has no public function for either.
        has_functions = all(hasattr(ddp.reducer, n) for n in ("_reset_state", "_rebuild_buckets"))
        self._can_send_nan = sends_nan and has_functions
        self._sent_as = sent_as
        # The parameters of each bucket; none before a backward has shown it.
        self._layout: list[list[torch.Tensor]] = []

        # DDP's memory of each bucket; none while that is not known.
        self._flats: list[torch.Tensor] = []
        self._are_old = False  # DDP has to rebuild its buckets. The same on all ranks.
        self._sums_count = counts
        # WHY not in 16 bits: bf16 counts to 256, fp16 to 2048.
        sent = {sent_as or parameter.dtype for parameter in self.local.parameters}
        # What counts is sent behind the first bucket; else beside it.
        self._count_rides = counts and sent <= {torch.float32, torch.float64}

        # The first bucket with the count behind it. WHY kept: sending needs no new memory.
        self._first = torch.empty(0)
        self._ones = torch.ones(len(self.local.parameters), dtype=torch.int32, device=group.device)
        self._count: float | torch.Tensor = 0.0
        self._total = torch.zeros((), dtype=torch.float64, device=group.device)
        self._when_computed: Callable[[], None] | None = None
        self._forget_sent()
        ddp.register_comm_hook(None, self._send)

    @property
    def tells_of_failures(self) -> bool:
        return self._can_send_nan or (self.allows_unused and not self._finds_unused)

    def sends_within(self, window: Window) -> bool:
        # WHY: DDP takes find_unused_parameters only when it is built; else it waits for every one
        can_send = self._finds_unused or not self.allows_unused
        return can_send and window.is_for_all(self.group.world_size)

    def begin(
        self, window: Window, *, keeps_local: bool, when_computed: Callable[[], None] | None = None
    ) -> None:
        self._is_within = not keeps_local and self.sends_within(window)
        if self._is_within:
            self._forget_sent()
            self._when_computed = when_computed

    def around(self, *, is_last: bool) -> AbstractContextManager[object]:
        # WHY around forward too: DDP decides there whether its hooks send what backward gives.
        return nullcontext() if is_last and self._is_within else self._keep_local()

    @contextmanager
    def _keep_local(self) -> Iterator[None]:
        """Have backward keep gradients on this rank, and move them into DDP's buckets.

        WHY moved: beside them they take as much again, which a rank out of memory does not have.
        """
        flats = self._flats if self._ddp.gradient_as_bucket_view else []
        with ExitStack() as hooks:  # ends each of them
            for flat, parameters in zip(flats, self._layout, strict=bool(flats)):
                for place, parameter in zip(_places(flat, parameters), parameters, strict=True):
                    if parameter.requires_grad:  # else it was frozen since
                        hook = partial(_move, place)
                        hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            with self._ddp.no_sync():
                yield

    def note_count(self, count: float | torch.Tensor) -> None:
        self._count = count

    def send_nan_for_rest(self) -> bool:
        if not self._is_within:
            return True  # its mark is enough
        if not self._can_send_nan:
            return False
        self.group.tracker.enter(Phase.ALL_REDUCE)
        remaining = range(len(self._under_way), len(self._layout))
        is_beside = self._sums_count and not self._count_rides
        if remaining and is_beside and self._total_work is None:
            dist.all_reduce(self._total.fill_(math.nan))  # collective
        for number in remaining:
            # WHY memory that is there: perhaps no other is left
            flat = self._flat(number)
            if number == 0 and self._count_rides:
                flat = self._with_count(flat)
            elif self._sent_as is not None:
                flat = flat.view(self._sent_as)[: flat.numel()]
            dist.all_reduce(flat.fill_(math.nan))  # collective
        if remaining and self._finds_unused:
            # WHY ones: DDP takes the sum only for those, and each rank must see the NaN.
            dist.all_reduce(self._ones.fill_(1))  # collective
        for future in self._futures:
            future.wait()
        return bool(remaining)

    def finish(self, mine: Marks, *, window: Window, on_device: bool) -> Sums | None:
        if not self._is_within:
            return self._sum_local(mine)  # collective
        if on_device and not self._are_old:
            return self._sums_on_device(mine, window)
        some_failed, are_finite = self._read(mine.has_failed)  # collective
        if some_failed:
            self.start_over()
            return None
        if self._are_old:
            self._renew()  # collective
        count = float(self._total_count()) if self._sums_count else 0.0
        return Sums(num_samples=window.size, count=count, are_finite=are_finite)

    def start_over(self) -> None:
        self._disarm()
        self._are_old = True  # WHY: DDP then rebuilds its buckets, on all ranks

    def warm_up(self, run: Callable[[nn.Module], None]) -> None:
        """Run synced forward and backward passes; their gradients are discarded. Collective.

        WHY: DDP rebuilds its buckets after the first backward; from 3 ranks on that changes the
        order of additions. With the warm-up before the first step of every start, a resumed run
        adds in the same order as the unbroken one, so it is bitwise equal. WHY another pass after
        that: the ranks agree on the new buckets in a forward, by a collective; a rank without a
        sample in the next step would not reach it. And our hook records them.
        """
        for _ in range(2):
            self._forget_sent()
            self._flats = []  # WHY: DDP builds other buckets
            run(self.call)  # collective

    def release(self) -> None:
        """Drop the DDP wrapper; the module stays.

        WHY: if DDP holds the last reference to the process group, its destructor waits for gloo's
        thread while it holds the GIL, which that thread may need: the process would never end.
        """
        if isinstance(self.call, DistributedDataParallel):
            self.call = self.call.module
            del self._ddp

    def _forget_sent(self) -> None:
        """Forget what was sent in the last backward. Rank-local."""
        self._under_way: list[list[torch.Tensor]] = []
        self._buffers: list[torch.Tensor] = []
        self._futures: list[Work] = []
        self._when_computed = None
        self._total_work: dist.Work | None = None

    def _sums_on_device(self, mine: Marks, window: Window) -> Sums:
        """Leave it to the device whether some rank failed, or the gradient is not finite."""
        if mine.has_failed:
            self._disarm()
            is_bad = torch.ones((), device=self.group.device)
            return Sums(num_samples=window.size, is_bad=is_bad)
        count = self._total_count() if self._sums_count else 0.0
        # NaN sent by another rank counts too
        return Sums(num_samples=window.size, count=count, is_bad=flag_of(self._buffers))

    def _read(self, failed_here: bool) -> tuple[bool, bool]:
        """Return whether any rank sent NaN in the last backward, the same on all ranks.

        And whether the sums are known to be finite. On the CPU they show both. WHY not on a GPU:
        reading a sum waits for the device. There the ranks exchange a flag over the CPU while the
        GPU still computes. Collective there.
        """
        if not self._can_send_nan:  # then a rank that fails ends the attempt
            return False, False
        if self.group.device.type == "cpu":
            if failed_here:
                return True, False
            # NaN and inf persist in a sum: one sum per bucket is usually enough
            are_finite = math.isfinite(sum(buffer.sum().item() for buffer in self._buffers))
            has_nan = not are_finite and any(math.isnan(buffer[0]) for buffer in self._buffers)
            return has_nan, are_finite
        flag = torch.tensor([float(failed_here)])
        if (work := self.group.start_max(flag)) is not None:  # collective
            self.group.finish(work)  # collective
        return bool(flag), False

    def _disarm(self) -> None:
        """Make DDP ready for the next forward after a backward that did not end. Rank-local.

        DDP then rebuilds its buckets after the next backward, which is a collective: start_over
        makes the other ranks do the same.
        """
        self._forget_sent()
        _reset_reducer(self._ddp)

    def _renew(self) -> None:
        """Rebuild DDP's buckets after start_over and a backward in which no rank failed.

        WHY not in its next forward, as DDP does: a rank may fail before it. Collective.
        """
        self._are_old = False
        self._forget_sent()
        self._flats = []
        if hasattr(self._ddp.reducer, "_rebuild_buckets"):  # else see _can_send_nan
            self._ddp.reducer._rebuild_buckets()  # collective

    def _sum_local(self, mine: Marks) -> Sums | None:
        """Add up gradients that stayed on the ranks. Collective: all ranks."""
        parameters = self.local.parameters
        if self.allows_unused:
            parameters = used_anywhere(parameters, self.group)  # collective
        self._sum_buckets(parameters)  # collective
        found = sum_with_marks([], mine, self.group)  # collective
        if self._finds_unused:
            # WHY: DDP clears its marks of what was used when it sends gradients; these would count
            # in the next step, for a parameter without a gradient there. With this search DDP
            # rebuilds no buckets after a reset.
            _reset_reducer(self._ddp)
        return found

    @torch.no_grad()
    def _sum_buckets(self, used: Iterable[torch.Tensor]) -> None:
        """Add up gradients that stayed local, in the same order as the hook does. Collective.

        used: the parameters that have a gradient on some rank; the others keep none.
        """
        before = self.group.tracker.enter(Phase.ALL_REDUCE)
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
        self.group.tracker.enter(before)

    def _total_count(self) -> torch.Tensor:
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

    def _sent(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        """Return what is sent for a bucket: itself, in 16 bits, or with the count behind it."""
        if number == 0 and self._count_rides:
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
        rides = number == 0 and self._count_rides
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
            self.group.tracker.enter(Phase.ALL_REDUCE)

        def received(summed: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            found = summed.value()[0]
            if rides:
                self._total.copy_(found[-1])
            return found if sent is buffer else buffer.copy_(found[: buffer.numel()])

        done: Work = work.get_future().then(received)
        self._futures.append(done)
        return done


def _reset_reducer(ddp: DistributedDataParallel) -> None:
    if hasattr(ddp.reducer, "_reset_state"):  # else see _can_send_nan
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


def sum_gradients_of(
    module: nn.Module,
    group: Group,
    config: Config,
    *,
    finds_unused: bool,
    counts: bool = False,
    calls_collectives: bool = False,
) -> GradientSum:
    """Give every rank rank 0's weights, and choose what sums its gradients. Collective: all ranks.

    counts: what the loss is a mean over has to be added up with the gradients. calls_collectives:
    the model does so in its forward.
    """
    ddp_config = config.ddp
    if group.world_size == 1:
        return GradientSum(module, group)
    # WHY off: DDP's own broadcast of buffers is a collective inside forward, where the exception
    # of one rank would leave the others waiting. torch 2.13 renamed the argument.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    renamed = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    arguments: dict[str, Any] = {renamed: False}  # Any: mypy knows one of the names
    # WHY always: it checks that the ranks' parameters agree, and broadcasts them
    # WHY no device_ids: with them DDP walks through all inputs again, to move what is there
    ddp = DistributedDataParallel(  # collective
        module,
        find_unused_parameters=finds_unused,
        gradient_as_bucket_view=ddp_config.gradient_as_bucket_view,
        bucket_cap_mb=ddp_config.bucket_cap_mb,
        **arguments,
    )
    # WHY not with --debug: whoever wants to see DDP at work is shown it
    if group.shared is not None and ddp_config.comm_hook == "none" and not config.loop.debug:
        return AfterBackward(module, group, allows_unused=finds_unused)
    # WHY: a collective within forward, as SyncBatchNorm's, is seen by no hook
    sends_nan = config.loop.step_retry == "on" and not calls_collectives
    sent_as = _SENT_AS[ddp_config.comm_hook]
    return ByDdp(ddp, group, sent_as=sent_as, counts=counts, sends_nan=sends_nan)
