"""What an exception in a step means: whose it is, where it rose, and what to do.

Owns turning it into one of our errors, with rank, step, phase and samples.
"""

import logging
import traceback
from collections.abc import Sequence

import torch

from hardened_ddp.errors import HardenedError, OutOfMemoryError, StepError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.lost import lost_peer

log = logging.getLogger(__name__)


def explain_failure(
    error: Exception, group: Group, *, step: int, phase: str, samples: Sequence[int]
) -> HardenedError:
    """Say which rank, step, phase and samples an exception belongs to."""
    if (lost := lost_peer(error, group)) is not None:
        return lost
    text = (
        f"rank {group.launch.rank}, step {step}, {phase}, samples "
        f"{list(samples[:8])}{' ...' if len(samples) > 8 else ''}: {type(error).__name__}: {error} "
        f"({where_of(error)})"
    )
    log.debug("the step failed", exc_info=error)
    if is_out_of_memory(error):
        return OutOfMemoryError(
            text, fix="halve --batch_size and double --accumulation_steps: the same gradient"
        )
    return StepError(text, fix="the traceback is in this rank's log file")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether the GPU's allocator or the host's had nothing left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def where_of(error: BaseException) -> str:
    """Give file and line where an exception was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
