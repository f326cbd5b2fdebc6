"""How a dataset gets to the loader workers: whether they share its tensors.

Tensors go through shared memory, as torch's own DataLoader sends them, so that all workers of a
rank have one copy. They are copied into each worker where /dev/shm is small, as in containers, or
where there are too many: each shared one is an open file. A trial that writes nothing counts them.
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

_MOST_SHARED_TENSORS = 200
"""multiprocessing sends a new process at most 256 open files, its own among them."""

_SHM_MARGIN = 2.0  # batches need room there, too


def plan_sending(fetcher: BatchSource, plan: WorkerPlan) -> WorkerPlan:
    """Decide how workers get the dataset of fetcher: tensors shared or copied.

    No workers, with a warning, if the dataset can't be sent.
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
    needed_bytes = sum(trial.tensors.values()) * plan.local_world_size * _SHM_MARGIN
    is_many = len(trial.tensors) > _MOST_SHARED_TENSORS
    return replace(plan, copies_data=is_many or needed_bytes > (free_shared_memory() or 0))


class Copied:
    """Stands in a pickle for a value, so that its tensors are copied, and not shared."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        # WHY: multiprocessing's own pickle would put the tensors into shared memory
        return pickle.loads, (pickle.dumps(self.value),)


class SendingTrial(pickle.Pickler):
    """Counts the tensors that a worker gets: pickles the rest into a file that keeps nothing."""

    def __init__(self) -> None:
        self.tensors: dict[int, int] = {}
        """Bytes of each storage, by its address."""

        super().__init__(self, protocol=5, buffer_callback=lambda buffer: None)

    def write(self, data: Any) -> None:
        """Drop a part of the pickle: it is itself the file that it writes to."""

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not obj.is_cpu or obj.layout != torch.strided:
            return None
        storage = obj.untyped_storage()
        self.tensors[storage.data_ptr()] = storage.nbytes()
        return "tensor"
