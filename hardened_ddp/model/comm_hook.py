"""The choice of what sends gradients within backward: DDP, our hook, or a compressing hook."""

import logging
from collections.abc import Mapping
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from hardened_ddp.errors import ModelError
from hardened_ddp.model.buckets import Buckets
from hardened_ddp.model.replica import Replica
from hardened_ddp.settings.ddp import CommHook

log = logging.getLogger(__name__)

# The dtype in which our hook sends gradients; powersgd is torch's own hook.
_SENT_AS: Mapping[Literal["none", "bf16", "fp16"], torch.dtype | None] = {
    "none": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def choose_comm_hook(
    replica: Replica, name: CommHook, *, retries: bool, counts: bool = False
) -> None:
    """Decide what sends gradients within backward: DDP itself, or a hook. Rank-local.

    retries: a step in which a rank fails is retried; the hook for that sends what DDP sends.
    counts: what the loss is a mean over has to be added up with the gradients.
    """
    ddp = replica.ddp
    if ddp is None:
        return
    if name == "powersgd":
        _use_power_sgd(ddp)
    elif retries or counts or name != "none":
        if name == "bf16" and replica.group.backend != "nccl":
            raise ModelError(
                f"comm_hook bf16 needs NCCL between GPUs, and this run uses "
                f"{replica.group.backend}",
                fix="--comm_hook fp16, which works everywhere",
            )
        sent_as = _SENT_AS[name]
        calls = bool(replica.collectives)
        replica.use_hook(
            Buckets(ddp, replica.group, sent_as=sent_as, counts=counts, calls_collectives=calls)
        )
    if retries and not replica.can_stand_in and not replica.collectives:  # those are said elsewhere
        log.warning(
            "an error of one rank within a step ends this attempt, and a restart continues from "
            "the step before: with powersgd, or a torch whose reducer lacks _reset_state or "
            "_rebuild_buckets, a failed rank can't tell the others in time"
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
