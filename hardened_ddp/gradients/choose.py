"""The choice of what sums the gradients: nothing, shared memory, or DDP with one of its hooks."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hardened_ddp.errors import ModelError
from hardened_ddp.gradients.by_ddp import ByDdp
from hardened_ddp.gradients.sums import AfterBackward, GradientSum, OneRank
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.config import Config, DdpConfig

log = logging.getLogger(__name__)

# The dtype in which our hook sends gradients.
_SENT_AS: Mapping[str, torch.dtype | None] = {
    "none": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


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
    comm_hook = config.ddp.comm_hook
    if group.world_size == 1:
        return OneRank(module, group.device)
    # WHY always: it checks that the ranks' parameters agree, and broadcasts them
    ddp = _build_ddp(module, config.ddp, finds_unused=finds_unused)  # collective
    # WHY not with --debug: whoever wants to see DDP at work is shown it
    if group.shared is not None and comm_hook == "none" and not config.loop.debug:
        return AfterBackward(module, group, allows_unused=finds_unused)
    if comm_hook == "bf16" and group.backend != "nccl":
        raise ModelError(
            f"comm_hook bf16 needs NCCL between GPUs, and this run uses {group.backend}",
            fix="--comm_hook fp16, which works everywhere",
        )
    # WHY: a collective within forward, as SyncBatchNorm's, is seen by no hook
    sends_nan = config.loop.step_retry == "on" and not calls_collectives
    found = ByDdp(ddp, group, sent_as=_SENT_AS[comm_hook], counts=counts, sends_nan=sends_nan)
    if sends_nan and not found.tells_of_failures:
        log.warning(
            "an error of one rank within a step ends this attempt, and a restart continues from "
            "the step before: the reducer of this torch lacks _reset_state or _rebuild_buckets, so "
            "a failed rank can't tell the others in time"
        )
    return found


def _build_ddp(
    module: nn.Module, config: DdpConfig, *, finds_unused: bool
) -> DistributedDataParallel:
    # WHY off: DDP's own broadcast of buffers is a collective inside forward, where the exception
    # of one rank would leave the others waiting. torch 2.13 renamed the argument.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    renamed = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    arguments: dict[str, Any] = {renamed: False}  # Any: mypy knows one of the names
    # WHY no device_ids: with them DDP walks through all inputs again, to move what is there
    return DistributedDataParallel(  # collective
        module,
        find_unused_parameters=finds_unused,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        bucket_cap_mb=config.bucket_cap_mb,
        **arguments,
    )
