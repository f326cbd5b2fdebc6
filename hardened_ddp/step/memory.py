"""Running out of memory: the errors that mean it, and the optimizer's state, allocated ahead.

That is done before the first step of a new run, where running out of memory costs nothing. In a
step it is answered by smaller micro-batches: retry.py.
"""

import torch

from hardened_ddp.errors import OutOfMemoryError
from hardened_ddp.model.optimizer import allocate_state
from hardened_ddp.step.parts import Parts

# Texts of out-of-memory errors of other classes: host allocator, driver, libraries, NCCL.
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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the GPU or the host ran out of memory."""
    is_of_class = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_of_class or any(text in str(error) for text in _TEXTS)


def allocate_ahead(parts: Parts) -> None:
    """Allocate the optimizer's state. Rank-local. Raises OutOfMemoryError."""
    try:
        allocate_state(parts.optimizer)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"rank {parts.group.launch.rank} has no memory for the state of "
            f"{parts.config.optimizer.optimizer}",
            fix="--optimizer sgd --momentum 0 needs none, adamw twice the model",
        ) from error
