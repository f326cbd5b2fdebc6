"""The form in which a batch comes back from a worker: bytes.

Does not own: what is in them, and who sends them (worker_pool.py).
"""

import pickle
from typing import Any

import torch

from hardened_ddp.data.batches.nesting import map_tensors


class Payload:
    """The pickled parts of a batch: bytes that name shared memory, or contain the data.

    WHY not the parts themselves: torch would pickle and unpickle them in its own threads. A failure
    there (not picklable, too many open files) ends the thread, and the rank waits forever.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content

    def open(self) -> Any:  # Any: inputs as the dataset nests them, and the other parts
        return pickle.loads(self.content)

    def pin_memory(self) -> Any:  # Any: as above
        """Unpickle and pin the tensors. torch calls this in its pinning thread."""
        return map_tensors(self.open(), torch.Tensor.pin_memory)


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Move to shared memory. WHY here: running out of it then raises in the worker's own thread."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()  # WHY: of a view, torch would send the whole tensor behind it
    tensor.share_memory_()  # type: ignore[no-untyped-call]  # torch left it untyped
    return tensor
