"""What a dataset costs each loader worker that it is sent to.

Tensors go through shared memory, as torch's own DataLoader sends them, so that all workers of a
rank have one copy; what else a dataset holds (numpy arrays, lists) is copied into each worker. So
are tensors where /dev/shm is small, as in containers, or where there are too many: each shared one
is an open file. A trial that writes nothing measures it.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hardened_ddp.data.batches.workers import SHARED_MEMORY, free_shared_memory

MOST_PRIVATE_BYTES = 100 * 2**20
"""Of one worker. More of it is worth a warning."""

_MOST_SHARED_TENSORS = 200
"""multiprocessing sends a new process at most 256 open files, its own among them."""

_SHM_MARGIN = 2.0  # batches need room there, too
# Of small Python objects: what they take in memory for each byte of their pickle.
_OBJECT_FACTOR = 3


@dataclass(frozen=True, slots=True)
class SendingCost:
    """What one worker gets."""

    tensor_bytes: int
    num_tensors: int
    private_bytes: int

    def fits(self, *, local_world_size: int) -> bool:
        """Return whether the tensors of all ranks here can be in shared memory."""
        needed_bytes = self.tensor_bytes * local_world_size * _SHM_MARGIN
        is_few = self.num_tensors <= _MOST_SHARED_TENSORS
        return is_few and needed_bytes <= (free_shared_memory() or 0)

    def warning(self, *, num_workers: int, shares: bool) -> str:
        """Return what to do about memory that each worker copies; empty: it is not much."""
        private_bytes = self.private_bytes + (0 if shares else self.tensor_bytes)
        if private_bytes <= MOST_PRIVATE_BYTES:
            return ""
        is_many = self.num_tensors > _MOST_SHARED_TENSORS
        why = f"it holds {self.num_tensors} tensors" if is_many else f"{SHARED_MEMORY} is too small"
        what = "its arrays and lists are copied" if shares else f"it is copied ({why})"
        return (
            f"each of {num_workers} workers takes about {private_bytes / 2**20:.0f} MiB of memory "
            f"for the dataset, because {what}. Hold large data in a few torch tensors, which "
            "workers share, or in files that are mapped (np.load(..., mmap_mode='r')); or take "
            "fewer workers (--num_workers)"
        )


class Copied:
    """Stands in a pickle for a value, so that its tensors are copied, and not shared."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        # WHY: multiprocessing's own pickle would put the tensors into shared memory
        return pickle.loads, (pickle.dumps(self.value),)


def measure_sending(fetcher: Any) -> SendingCost:
    """Pickle what a worker is sent, without its tensors, and throw the result away.

    Raises whatever the dataset's own pickling raises.
    """
    trial = _Trial()
    trial.dump(fetcher)
    return SendingCost(
        sum(trial.tensors.values()),
        len(trial.tensors),
        trial.buffer_bytes + _OBJECT_FACTOR * trial.sink.num_bytes,
    )


class _Sink:
    """A file that only counts."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size


class _Trial(pickle.Pickler):
    """Pickles everything but tensors, whose storages it counts."""

    def __init__(self) -> None:
        self.sink = _Sink()
        self.buffer_bytes = 0
        self.tensors: dict[int, int] = {}
        super().__init__(self.sink, protocol=5, buffer_callback=self._count_buffer)

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not obj.is_cpu or obj.layout != torch.strided:
            return None
        storage = obj.untyped_storage()
        self.tensors[storage.data_ptr()] = storage.nbytes()
        return "tensor"

    def _count_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.buffer_bytes += buffer.raw().nbytes
