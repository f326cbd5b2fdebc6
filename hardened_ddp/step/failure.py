"""What an exception in a step means: which rank raised it, where, and what to do.

It becomes one of our errors, or what ranks report to each other: with rank, step, phase, samples.
"""

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Literal

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.foreign_code import describe, line_of_user
from hardened_ddp.errors import (
    ConfigError,
    HardenedError,
    NonFiniteError,
    OutOfMemoryError,
    PeerLostError,
    SampleError,
    StepError,
    UnusedParameterError,
)
from hardened_ddp.ranks.group import Group, lost_peer
from hardened_ddp.ranks.launch import log_failure
from hardened_ddp.ranks.store import DEFER_S, do_once
from hardened_ddp.settings.typed_command import own_command

log = logging.getLogger(__name__)

NUM_SHOWN = 8  # samples or parameters that a message names
BAD_SUM = "the gradient over all ranks is not finite, or its square is not, though every loss is"

# Texts of out-of-memory errors of other classes.
_NO_MEMORY = [
    "can't allocate memory",  # the host's allocator
    "error: out of memory",  # CUDA and its driver
    "Triton Error [CUDA]: out of memory",
    "_STATUS_ALLOC_FAILED",  # cuBLAS and cuDNN
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate",
    "_ALLOCATION_FAILED",  # cuDNN, on the device or the host
    "'out of memory'",  # NCCL
]

Kind = Literal["error", "out of memory", "not finite", "sample", "unused"]

# The error to raise for each kind, and its fix.
_ERRORS: Mapping[Kind, tuple[Callable[..., HardenedError], str]] = {
    "error": (StepError, "the traceback is in that rank's log file"),
    "out of memory": (
        OutOfMemoryError,
        "a smaller --batch_size with more --accumulation_steps; one sample alone did not fit",
    ),
    "not finite": (
        partial(NonFiniteError, reached_weights=False),
        "lower --learning_rate, set --clip_grad_norm 1, or --amp off; then --resume the run. "
        "--continue_on_error leaves such steps out",
    ),
    "sample": (SampleError, "fix it, or leave such samples out with --continue_on_error"),
    "unused": (
        UnusedParameterError,
        "--find_unused_parameters, or use them in every forward, or freeze them",
    ),
}


class LossNotFinite(ArithmeticError):
    """A forward gave a loss that is NaN or inf, of these samples. Its backward was not run."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed in a step."""

    kind: Kind
    text: str
    num_samples: int = 0  # of its largest micro-batch


def error_of(kind: Kind, text: str) -> HardenedError:
    """Return the error to raise for a failure of this kind when no retry helps."""
    error, fix = _ERRORS[kind]
    return error(text, fix=fix)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the GPU or the host ran out of memory."""
    is_of_class = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_of_class or any(text in str(error) for text in _NO_MEMORY)


def format_samples(batches: Sequence[Batch]) -> str:
    """Name the first samples of batches."""
    samples = [int(index) for batch in batches for index in batch.indices]
    return f"{list(samples[:NUM_SHOWN])}{' ...' if len(samples) > NUM_SHOWN else ''}"


def explain_failure(
    error: BaseException, group: Group, where: str, *, memory_fix: str
) -> HardenedError:
    """Return our error for an exception, with the rank: PeerLostError, OutOfMemoryError, StepError.

    memory_fix: what to change if memory ran out.
    """
    if (lost := lost_peer(error, group)) is not None:
        return lost
    log.debug("%s", where, exc_info=error)
    text = f"rank {group.launch.rank}, {where}: {in_full(error)}"
    if is_out_of_memory(error):
        return OutOfMemoryError(text, fix=memory_fix)
    return StepError(text, fix="the traceback is in this rank's log file")


@contextmanager
def errors_told(group: Group) -> Iterator[None]:
    """Log why this rank ends by an error inside, and tell the other ranks. Rank-local.

    Of several ranks with the same error one logs it. An error that belongs to no step is raised as
    one of ours if it is known.
    """
    try:
        try:
            yield
        except SystemExit as ended:  # nothing of ours leaves so: where no one expected it
            raise StepError(
                f"rank {group.launch.rank}, {group.tracker.phase.label}: the code that is trained "
                f"ends the program, by SystemExit({ended.code}){line_of_user(ended)}",
                fix="raise an exception that says what is wrong there; the traceback is in this "
                "rank's log",
            ) from ended
    except HardenedError as error:
        group.publish_failure(error.message)
        _tell(error, group)
        raise
    except KeyboardInterrupt as error:  # by Ctrl-C, or by the user's code
        group.publish_failure(f"KeyboardInterrupt{line_of_user(error)}")
        raise
    except Exception as error:
        fix = "take a smaller model, or a dataset that reads samples only when needed; what else "
        fix += f"uses that memory is seen by: {own_command('doctor')}"
        known = explain_failure(error, group, "outside of the steps", memory_fix=fix)
        if not isinstance(known, PeerLostError):
            group.publish_failure(f"{type(error).__name__}: {error}")
        if isinstance(known, StepError):  # any other error
            _tell(error, group)
            raise
        known.__cause__ = error
        _tell(known, group)
        raise known from error


def _tell(error: Exception, group: Group) -> None:
    if isinstance(error, PeerLostError):  # each has lost it in its own way
        log_failure(error)
        return
    # WHY by the status: a user's mistake is on all ranks, and found before anything trains
    is_users = isinstance(error, HardenedError) and error.exit_status == ConfigError.exit_status
    key = f"told/{sha256(f'{type(error).__name__}: {error}'.encode()).hexdigest()}"
    store, rank, defer_s = group.store, group.launch.rank, DEFER_S if is_users else 0.0
    tell, ranks = partial(log_failure, error), group.world_size
    if not do_once(store, key, tell, rank=rank, world_size=ranks, head_start_s=defer_s):
        log.debug("another rank tells why this one ends: %s", error)
    store.note_heard(rank)


def in_full(error: BaseException) -> str:
    """Return type and text of an exception, and the file and line where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{describe(error, most=None)} ({frame.filename}:{frame.lineno})"


def join_causes(causes: Mapping[int, Failure]) -> str:
    return "; ".join(dict.fromkeys(cause.text for cause in causes.values()))
