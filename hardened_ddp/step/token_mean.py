"""The gradient as the mean over what counts, where that is not the samples: tokens, pixels.

How many of them a step has over all ranks is known only after backward. Until then the losses are
divided by a power of two near the samples, which keeps numbers in range and costs no precision.
"""

import logging
import math

import torch

from hardened_ddp.gradients.local import LocalGradients
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.attempt import Attempt, Outcome
from hardened_ddp.step.parts import Parts

log = logging.getLogger(__name__)


def divisor(num_samples: int) -> float:
    """Return what the losses of a step of num_samples are divided by before backward."""
    return 2.0 ** round(math.log2(num_samples))


def divide(parts: Parts, attempt: Attempt, count: float, *, step: int) -> None:
    """Make the gradient the mean over count, what counts in the step over all ranks. Rank-local.

    With a count of 0 there is nothing to learn, and no weight may change: weight decay and momentum
    would move the weights with a gradient of zeros too.
    """
    if count > 0:
        parts.gradients.local.scale(divisor(attempt.window.size) / count)
        return
    log.warning(
        "step %d: no label of its samples counts, so no weight changes", step, extra=ON_EVERY_RANK
    )
    parts.replica.buffers.put_back(attempt.buffers)
    attempt.outcome = Outcome.EMPTY


def divide_on_device(
    gradients: LocalGradients,
    count: float | torch.Tensor,
    is_bad: torch.Tensor,
    *,
    num_samples: int,
) -> torch.Tensor:
    """Do as divide does, without a wait for the device; return is_bad, or 1.0 if nothing counts.

    count and is_bad: over all ranks, of shape (), on the device.
    """
    total = torch.as_tensor(count)
    is_empty = total <= 0
    gradients.scale(divisor(num_samples) / torch.where(is_empty, 1.0, total))
    return torch.where(is_empty, torch.ones_like(is_bad), is_bad)
