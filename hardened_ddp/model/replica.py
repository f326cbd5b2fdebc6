"""The model on this rank: one of world_size equal replicas, kept equal by DDP.

Owns the DDP wrapper, the choice of find_unused_parameters, and the buffers that a forward changes
(BatchNorm statistics), which are averaged after each step so that all replicas, and so any one
survivor's state, are the whole truth. WHY not DDP's own buffer broadcast: it is a collective inside
forward, where one rank's exception would leave the others waiting.

CPU ranks of one machine don't use DDP's hooks: these send gradients while backward still runs, and
where every core computes, sending beside it gains nothing. They are summed after backward, through
shared memory (ranks/shared_sum.py), which is many times as fast.

Evaluate and save replica.module: calling the DDP object on one rank alone is how runs hang.
Read next: probe.py (what is learned before wrapping), step/step.py (who calls this).
"""

import contextlib
import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hardened_ddp.errors import ModelError
from hardened_ddp.model.buckets import Buckets
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.ddp import CommHook, DdpConfig

log = logging.getLogger(__name__)

# What our hook rounds gradients to on their way; powersgd is torch's own hook.
_SENT_AS: Mapping[Literal["none", "bf16", "fp16"], torch.dtype | None] = {
    "none": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Replica:
    """A module and, with more than one rank, its DDP wrapper."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        ddp: DistributedDataParallel | None,
        moving_buffers: Sequence[str],
        sums_after: bool = False,
        channels_last: bool = False,
    ) -> None:
        self.module = module
        self.ddp = ddp
        self.group = group
        self.trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._parameters = list(self.trainable.values())
        buffers = dict(module.named_buffers())
        self.moving_names = list(moving_buffers)
        self.moving_buffers = [buffers[name] for name in moving_buffers]
        self.channels_last = channels_last
        """Whether images are to be stored so."""

        self.looks_for_unused = ddp is None or ddp.find_unused_parameters
        """A parameter may get no gradient on some rank: sum_gradients counts it as zero there."""

        self.sums_after = sums_after
        """Gradients stay local in backward, and sum_gradients adds them up: not DDP's hooks."""

        self.buckets: Buckets | None = None
        """What DDP's hooks send, if it is this program's communication hook that sends it."""

        self._sums_are_finite = False  # False: not known

        # WHY not through DDP then: its forward would get its hooks ready for nothing.
        self.call: nn.Module = module if ddp is None or self.sums_after else ddp

    def release(self) -> None:
        """Let go of the DDP wrapper; the module stays.

        WHY: if DDP is the last to hold the process group, its destructor waits for gloo's thread
        while it keeps Python's lock, which that thread may need: the process would never end.
        """
        self.ddp, self.call = None, self.module

    @property
    def averages(self) -> bool:
        """DDP divides the sum of the gradients by world_size. This program's own hook does not."""
        return self.ddp is not None and not self.sums_after and self.buckets is None

    @property
    def can_stand_in(self) -> bool:
        """A rank whose backward failed can do its part in the sums of the others."""
        return self.buckets is not None and self.buckets.can_stand_in

    @property
    def can_overlap(self) -> bool:
        """DDP can send within backward: it finds parameters that get no gradient, if it must."""
        if self.ddp is None or self.sums_after:
            return False
        return bool(self.ddp.find_unused_parameters) or not self.looks_for_unused

    def no_sync(self) -> AbstractContextManager[Any]:
        """Keep gradients on this rank inside. WHY forward too: DDP decides in forward."""
        has_hooks = self.ddp is not None and not self.sums_after
        return self.ddp.no_sync() if has_hooks else contextlib.nullcontext()  # type: ignore[union-attr]

    def parameters_without_gradient(self) -> list[str]:
        """Name the parameters that the last backward gave nothing. Rank-local."""
        if all(parameter.grad is not None for parameter in self._parameters):
            return []
        return [name for name, parameter in self.trainable.items() if parameter.grad is None]

    def has_finite_gradients(self) -> bool:
        """Say whether all gradients are numbers. Rank-local; waits for the device.

        WHY sums: nan and inf stay in them, and nothing that torch has reads each number for less
        (isfinite takes five times as long). Large numbers may give inf too, so only then each is
        asked.
        """
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self.group.device.type == "cpu":
            sums = [gradient.sum().item() for gradient in gradients]
        else:  # one wait for all of them
            sums = torch.stack([g.sum().double() for g in gradients]).tolist() if gradients else []
        return math.isfinite(sum(sums)) or all(bool(g.isfinite().all()) for g in gradients)

    def is_gradient_bad(self, failed_here: bool) -> torch.Tensor:
        """Say on the device whether some rank failed in it, or it is not made of numbers.

        1.0 or 0.0, of shape (), the same on all ranks. Very large numbers may look bad, too.
        """
        if failed_here:
            return torch.ones((), device=self.group.device)
        if self.buckets is not None:
            return self.buckets.are_bad()
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).float()
        return norm.to(self.group.device).isfinite().logical_not().float()

    def has_finite_sums(self) -> bool:
        """Say whether the gradient over all ranks is made of numbers. The same on all ranks."""
        is_known = self._sums_are_finite or (self.buckets is not None and self.buckets.are_finite)
        return is_known or self.has_finite_gradients()

    def sum_gradients(self, marks: Sequence[float] = ()) -> list[float]:
        """Add up local gradients over the ranks, and marks as well, which it returns. Collective.

        The safe form of DDP's own all-reduces: no hook waits for a backward that never comes, so
        a rank without samples, or one that failed, takes part with zeros. As with DDP, a parameter
        that no rank used keeps no gradient if such are looked for. marks: small whole numbers.
        """
        self._sums_are_finite = False
        if self.group.world_size == 1:
            return list(marks)
        parameters = self._parameters
        if self.looks_for_unused:
            is_used = torch.tensor([float(p.grad is not None) for p in parameters])
            uses = self.group.sum_(is_used).tolist()  # collective
            parameters = [p for p, count in zip(parameters, uses, strict=True) if count]
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        if self.buckets is not None:
            self.buckets.sum_local(parameters)  # collective
        else:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
        sums = torch.tensor(marks, device=self.group.device)
        if marks:  # WHY so: no message of their own
            by_dtype.setdefault(sums.dtype, []).append(sums)
        # WHY a list: every one has to be summed, also after one that is not finite
        finite = [self.group.sum_each_(each) for each in by_dtype.values()]  # collective
        self._sums_are_finite = all(finite) and self.buckets is None
        found: list[float] = sums.tolist()
        return found

    def copy_buffers(self) -> list[torch.Tensor]:
        """Copy the moving buffers, for put_back_buffers."""
        return [buffer.clone() for buffer in self.moving_buffers]

    @torch.no_grad()
    def put_back_buffers(self, copies: Sequence[torch.Tensor]) -> None:
        """Give the moving buffers the values that they had when copies were made."""
        for buffer, copy in zip(self.moving_buffers, copies, strict=True):
            buffer.copy_(copy)

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Make the moving buffers equal: float ones averaged, whole numbers rank 0's. Collective.

        Rank 0 has the largest share of each window, so its step counters are never behind.
        """
        if not self.moving_buffers or self.group.world_size == 1:
            return
        world_size, is_main = self.group.world_size, self.group.launch.is_main
        # WHY float64: it holds counters exactly and averages float32 without a rounding of its own.
        flat = torch.cat([buffer.reshape(-1).double() for buffer in self.moving_buffers])
        position = 0
        for buffer in self.moving_buffers:
            part = flat[position : position + buffer.numel()]
            part.mul_(1 / world_size if buffer.is_floating_point() else float(is_main))
            position += buffer.numel()
        self.group.sum_(flat)  # collective
        parts = torch.split(flat, [buffer.numel() for buffer in self.moving_buffers])
        for buffer, part in zip(self.moving_buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


def wrap(
    module: nn.Module,
    group: Group,
    config: DdpConfig,
    *,
    find_unused: bool,
    moving_buffers: Sequence[str],
    channels_last: bool = False,
) -> Replica:
    """Wrap module in DDP, which also gives every rank rank 0's weights. Collective: all ranks."""
    if group.world_size == 1:
        return Replica(
            module, group, ddp=None, moving_buffers=moving_buffers, channels_last=channels_last
        )
    arguments: dict[str, Any] = {
        "device_ids": [group.device.index] if group.device.type == "cuda" else None,
        "find_unused_parameters": find_unused,
        "static_graph": config.static_graph,
        "gradient_as_bucket_view": config.gradient_as_bucket_view,
        "bucket_cap_mb": config.bucket_cap_mb,
    }
    # torch 2.13 renamed it; see the module docstring for why it is off.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    arguments[
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    ] = False
    return Replica(
        module,
        group,
        ddp=DistributedDataParallel(module, **arguments),  # collective
        moving_buffers=moving_buffers,
        sums_after=group.shared is not None and config.comm_hook == "none",
        channels_last=channels_last,
    )


def choose_comm_hook(replica: Replica, name: CommHook, *, heals: bool) -> None:
    """Decide what sends gradients within backward: DDP itself, or a hook. Rank-local.

    heals: a rank's failure within backward is to be healed; the hook for that sends what DDP does.
    """
    ddp = replica.ddp
    if ddp is None or replica.sums_after:
        return
    if name == "powersgd":
        _use_power_sgd(ddp)
    elif heals or name != "none":
        if name == "bf16" and replica.group.backend != "nccl":
            raise ModelError(
                f"comm_hook bf16 needs NCCL between GPUs, and this run uses "
                f"{replica.group.backend}",
                fix="--comm_hook fp16, which works everywhere",
            )
        replica.buckets = Buckets(ddp, replica.group, sent_as=_SENT_AS[name])
    if heals and not replica.can_stand_in:
        log.warning(
            "an error of one rank within a step ends this attempt, and a restart goes on from the "
            "step before: with powersgd, SyncBatchNorm, or a torch whose reducer lacks "
            "_reset_state or _rebuild_buckets, the other ranks can't be told in time"
        )


def _use_power_sgd(ddp: DistributedDataParallel) -> None:
    """Compress by PowerSGD (Vogels, Karimireddy, Jaggi, 2019).

    The first steps go uncompressed: early gradients change too fast for its error feedback.
    """
    # WHY here: the import takes a tenth of a second that most runs need not wait for.
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    log.warning(
        "comm_hook powersgd keeps an error memory on each rank that is not in checkpoints: "
        "a resumed run is close to the unbroken one, not bitwise equal"
    )
