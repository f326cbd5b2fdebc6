"""What an exception in a step means: whose it is, where it rose, and what to do.

Owns turning it into one of our errors, with rank, step, phase and samples; and the form in which
ranks tell each other of one.
"""

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hardened_ddp.data.fetch import Batch, describe
from hardened_ddp.errors import (
    HardenedError,
    NonFiniteError,
    OutOfMemoryError,
    SampleError,
    StepError,
    UnusedParameterError,
)
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.lost import lost_peer
from hardened_ddp.step.memory import is_out_of_memory

log = logging.getLogger(__name__)

NUM_SHOWN = 8
"""Samples or parameters that a message names."""

BAD_SUM = "the gradient over all ranks is not finite, though every loss is"

_FIXES = {
    "error": "the traceback is in that rank's log file",
    "out of memory": "a smaller --batch_size with more --accumulation_steps; one sample alone did "
    "not fit",
    "not finite": "lower --learning_rate, set --clip_grad_norm 1, or --amp off; then --resume the "
    "run. --continue_on_error leaves such windows out",
    "sample": "mend it, or leave such samples out with --continue_on_error",
    "unused": "--find_unused_parameters, or use them in every forward, or freeze them",
}
_CLASSES: dict[str, Callable[..., HardenedError]] = {
    "error": StepError,
    "out of memory": OutOfMemoryError,
    "not finite": partial(NonFiniteError, reached_weights=False),
    "sample": SampleError,
    "unused": UnusedParameterError,
}


class LossNotFinite(ArithmeticError):
    """A forward gave a loss that is NaN or inf. Its backward was not run."""

    def __init__(self, problem: str, *, found: str = "") -> None:
        """found: which samples and which module gave it first, if that was looked for."""
        super().__init__(problem)
        self.found = found


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed in a window."""

    kind: str
    text: str
    num_samples: int = 0
    """Of its largest micro-batch."""


def error_of(kind: str, text: str) -> HardenedError:
    """Give the error that a failure of this kind ends in, if nothing helps."""
    return _CLASSES[kind](text, fix=_FIXES[kind])


def shown(batches: Sequence[Batch]) -> str:
    """Name the samples of batches, the first of them."""
    samples = [int(index) for batch in batches for index in batch.indices]
    return f"{samples[:NUM_SHOWN]}{' ...' if len(samples) > NUM_SHOWN else ''}"


def explain_failure(
    error: Exception, group: Group, *, step: int, phase: str, samples: Sequence[int]
) -> HardenedError:
    """Say which rank, step, phase and samples an exception belongs to."""
    if (lost := lost_peer(error, group)) is not None:
        return lost
    text = (
        f"rank {group.launch.rank}, step {step}, {phase}, samples "
        f"{list(samples[:NUM_SHOWN])}{' ...' if len(samples) > NUM_SHOWN else ''}: "
        f"{type(error).__name__}: {error} "
        f"({where_of(error)})"
    )
    log.debug("the step failed", exc_info=error)
    if is_out_of_memory(error):
        return OutOfMemoryError(
            text, fix="halve --batch_size and double --accumulation_steps: the same gradient"
        )
    return StepError(text, fix="the traceback is in this rank's log file")


def explain_outside(error: Exception, group: Group) -> HardenedError | None:
    """Say which rank an exception outside of all steps belongs to; None: it is not known here."""
    if (lost := lost_peer(error, group)) is not None:
        return lost
    if not is_out_of_memory(error):
        return None
    log.debug("out of memory", exc_info=error)
    return OutOfMemoryError(
        f"rank {group.launch.rank} ran out of memory outside of the steps: "
        f"{describe(error)} ({where_of(error)})",
        fix="look at what else needs that memory: python ddp_training.py doctor; else take a "
        "smaller model, or data that is read as it is needed",
    )


def explain_evaluation(error: Exception, group: Group) -> HardenedError:
    """Say which rank an exception in an evaluation belongs to."""
    if (lost := lost_peer(error, group)) is not None:
        return lost
    log.debug("the evaluation failed", exc_info=error)
    text = f"rank {group.launch.rank}, evaluation failed: {describe(error)} ({where_of(error)})"
    if is_out_of_memory(error):
        return OutOfMemoryError(text, fix="lower --eval_batch_size, then --resume the run")
    return StepError(text, fix="the traceback is in this rank's log file")


def where_of(error: BaseException) -> str:
    """Give file and line where an exception was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def told(causes: Mapping[int, Failure]) -> str:
    """Tell the failures of several ranks; what several say stands there once."""
    return "; ".join(dict.fromkeys(cause.text for cause in causes.values()))
