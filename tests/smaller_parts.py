"""A model whose run has smaller micro-batches from a step on, although memory never ran out.

The reference for runs in which it did: the same parts of the same batches, so the same weights.
"""

from torch import nn

from hardened_ddp.step.failure import Failure
from hardened_ddp.step.gradient import Attempt, Gradient
from tests.plugins import FailingOnce
from tests.token_data import FailingLM


def points(num_classes: int, step: int, most: int) -> nn.Module:
    """Build FailingOnce without a fault; from step on, micro-batches have most samples."""
    _limit(step, most)
    return FailingOnce(num_classes)


def language_model(step: int, most: int) -> nn.Module:
    """Build FailingLM, which has enough memory; from step on, micro-batches have most samples."""
    _limit(step, most)
    return FailingLM()


def _limit(step: int, most: int) -> None:
    run = Gradient.run

    def limited(gradient: Gradient, attempt: Attempt, *, is_retry: bool) -> Failure | None:
        if gradient.progress.step >= step:
            gradient.progress.max_micro_batch = most
        return run(gradient, attempt, is_retry=is_retry)

    Gradient.run = limited  # type: ignore[method-assign]  # of this process alone
