"""What fits into memory: the optimizer's state, and the samples of one backward.

Both are tried before the first step of a new run, where running out of memory costs nothing.
Running out of it later is handled by retry.py; both keep the gradient of the step.
"""

import logging
from contextlib import nullcontext

import torch

from hardened_ddp.data.batches.batch import Batch, take
from hardened_ddp.errors import OutOfMemoryError
from hardened_ddp.model.effects import untouched
from hardened_ddp.model.optimizer import allocate_state
from hardened_ddp.step.parts import Parts

log = logging.getLogger(__name__)

_TEXTS = [
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
]
"""Texts of out-of-memory errors of other classes: host allocator, driver, libraries, NCCL."""

_FINENESS = 8
"""The search ends when the answer is known to 1 / _FINENESS of itself."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the GPU or the host ran out of memory."""
    is_of_class = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_of_class or any(text in str(error) for text in _TEXTS)


def fit_into_memory(parts: Parts) -> int:
    """Allocate the optimizer's state; with batch_size auto, find how many samples fit. Collective.

    Returns the maximum samples of a micro-batch, the same on all ranks; 0: no limit was reached.
    Raises OutOfMemoryError if the state or a single sample does not fit.
    """
    rank = parts.group.launch.rank
    try:
        allocate_state(parts.optimizer)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"rank {rank} has no memory for the state of {parts.config.optimizer.optimizer}",
            fix="--optimizer sgd --momentum 0 needs none, adamw twice the model",
        ) from error
    if parts.config.data.batch_size is not None:
        return 0
    parts.group.tracker.begin("trying how many samples fit into memory")
    share = parts.sampler.batch_size
    found = min(parts.group.gather_json(_max_that_fit(parts, share)))  # collective
    if not found:
        raise OutOfMemoryError(
            "batch_size auto: on some rank not even one sample fits",
            fix="a smaller model, --gradient_checkpointing, or --amp bf16",
        )
    log.info(
        "batch_size auto: %d samples fit at once on every rank: %d micro-batches for the "
        "%d of a step",
        found,
        -(-share // found),
        parts.global_batch,
    )
    return found if found < share else 0


def _max_that_fit(parts: Parts, share: int) -> int:
    """Search the largest number of samples, up to share, that fit at once. Rank-local."""
    sample = parts.train_loader.sample_batches(parts.device)[0]
    if _fits(parts, sample, share):
        return share
    fits, too_many = 0, share
    while too_many - fits > max(1, fits // _FINENESS):
        middle = (fits + too_many) // 2
        if _fits(parts, sample, middle):
            fits = middle
        else:
            too_many = middle
    return fits


def _fits(parts: Parts, sample: Batch, num_samples: int) -> bool:
    """Try forward and backward of num_samples, without other ranks; discard the gradients."""
    is_compiled = parts.config.model.compile
    try:
        batch = take(sample, [i % sample.num_samples for i in range(num_samples)])
        batch = parts.replica.inputs.send(batch, parts.device)
        with (
            untouched(parts.replica.module),
            parts.gradients.around(is_last=False),
            # WHY: each size that is tried would be compiled
            torch.compiler.set_stance("force_eager") if is_compiled else nullcontext(),
        ):
            with parts.precision.autocast():
                score = parts.task.score(parts.task.forward(parts.replica.module, batch), batch)
            score.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        parts.optimizer.zero_grad(set_to_none=True)
        if parts.device.type == "cuda":
            torch.cuda.empty_cache()  # else its cached blocks fragment the memory
    return True
