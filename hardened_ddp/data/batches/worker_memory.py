"""How a dataset gets to the loader workers, and what it costs each of them.

Its tensors go through shared memory, as torch's own DataLoader sends them, so that all workers of a
rank have one copy. They are copied into each worker where /dev/shm is small, as in containers, or
where there are too many: each shared one is an open file. So is all else that a dataset holds. A
trial that writes nothing counts it.
"""

import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hardened_ddp.data.batches.batch import BatchSource
from hardened_ddp.data.batches.workers import WorkerPlan, free_shared_memory

log = logging.getLogger(__name__)

_SHM_MARGIN = 2.0  # batches need room there, too
MOST_PRIVATE_BYTES = 100 * 2**20  # Of the dataset in one worker. More of it is worth a warning.
_OBJECT_FACTOR = 3  # small Python objects take so many bytes of memory for one of their pickle
# multiprocessing sends a new process at most 256 open files, its own among them.
_MOST_SHARED_TENSORS = 200


def plan_sending(fetcher: BatchSource, plan: WorkerPlan) -> WorkerPlan:
    """Decide how workers get the dataset of fetcher: tensors shared or copied.

    No workers, with a warning, if the dataset can't be sent. Warns of memory that each one takes.
    """
    if plan.start_method == "fork":
        return plan
    trial = SendingTrial()
    try:
        trial.dump(fetcher)
        trial.clear_memo()  # WHY: it keeps all that was pickled, and is in a cycle with its file
    except Exception as error:  # WHY broad: pickling runs the user's own code
        why = f"the dataset or its collate can't be sent to a worker ({error})"
        log.warning("num_workers %d requested, using 0: %s", plan.num_workers, why)
        return replace(plan, num_workers=0)
    tensor_bytes = sum(trial.tensors.values())
    needed_bytes = tensor_bytes * plan.local_world_size * _SHM_MARGIN
    is_many = len(trial.tensors) > _MOST_SHARED_TENSORS
    copies_data = is_many or needed_bytes > (free_shared_memory() or 0)
    private_bytes = trial.private_bytes + tensor_bytes * copies_data
    if private_bytes > MOST_PRIVATE_BYTES:
        log.warning(
            "each of %d workers takes about %.0f MiB of memory for the dataset, in copies. Hold "
            "large data in a few torch tensors, which workers share, or in files that are mapped "
            "(np.load(..., mmap_mode='r')); or take fewer workers (--num_workers)",
            plan.num_workers,
            private_bytes / 2**20,
        )
    return replace(plan, copies_data=copies_data)


class Copied:
    """Stands in a pickle for a value, so that its tensors are copied, and not shared."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        # WHY: multiprocessing's own pickle would put the tensors into shared memory
        return pickle.loads, (pickle.dumps(self.value),)


class SendingTrial(pickle.Pickler):
    """Counts what one worker gets: pickles all but the tensors, into a file that keeps nothing."""

    def __init__(self) -> None:
        self.private_bytes = 0
        self.tensors: dict[int, int] = {}  # bytes of each storage, by its address
        super().__init__(self, protocol=5, buffer_callback=self._count_buffer)

    def write(self, data: Any) -> None:
        """Count a part of the pickle: it is itself the file that it writes to."""
        self.private_bytes += _OBJECT_FACTOR * memoryview(data).nbytes

    def _count_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.private_bytes += buffer.raw().nbytes

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not obj.is_cpu or obj.layout != torch.strided:
            return None
        storage = obj.untyped_storage()
        self.tensors[storage.data_ptr()] = storage.nbytes()
        return "tensor"
