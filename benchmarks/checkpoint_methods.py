"""Ways to write a checkpoint in the middle of training, behind one shape.

Owns the calls, each as its documentation shows. torch.save is the usual plain one: no fsync, no
hash. The three others bring the files to the disk; ours also hashes them while writing.
"""

import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from hardened_ddp.checkpoint.store import CheckpointStore, CheckpointWriter


class Method(Protocol):
    """How a checkpoint gets from the live state to the disk."""

    def save(self, step: int) -> None:
        """Save the state of this step, or start to. Collective: all ranks."""

    def before_update(self) -> None:
        """The weights are about to change. Rank-local."""

    def is_busy(self) -> bool:
        """Something is still being written. Rank-local."""

    def finish(self) -> None:
        """Wait until it is written, and raise what went wrong. Rank-local."""


class TorchSave:
    """torch.save on rank 0, while the others wait at a barrier."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.network, self.optimizer, self.folder = network, optimizer, folder

    def save(self, step: int) -> None:
        if dist.get_rank() == 0:
            partial = self.folder / "partial.pt"
            torch.save(_state(self.network, self.optimizer), partial)
            partial.replace(self.folder / "checkpoint.pt")
        dist.barrier()  # collective

    def before_update(self) -> None:
        pass

    def is_busy(self) -> bool:
        return False

    def finish(self) -> None:
        pass


class DcpSave:
    """torch.distributed.checkpoint, each rank a part, all wait."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.network, self.optimizer, self.folder = network, optimizer, folder

    def save(self, step: int) -> None:
        state = _state(self.network, self.optimizer)
        dcp.save(state, checkpoint_id=_fresh(self.folder, step))  # collective

    def before_update(self) -> None:
        pass

    def is_busy(self) -> bool:
        return False

    def finish(self) -> None:
        pass


class DcpAsyncSave:
    """torch.distributed.checkpoint.async_save: copies, then a thread writes."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.network, self.optimizer, self.folder = network, optimizer, folder
        # WHY its own: its thread has collectives that must not mix with those of the training.
        self.group = dist.new_group(backend="gloo")  # collective
        self.written: Future[Any] | None = None  # Any: what it resolves to is not used

    def save(self, step: int) -> None:
        response = dcp.async_save(
            _state(self.network, self.optimizer),
            checkpoint_id=_fresh(self.folder, step),
            process_group=self.group,
        )
        self.written = response if isinstance(response, Future) else response.upload_completion

    def before_update(self) -> None:
        pass

    def is_busy(self) -> bool:
        return self.written is not None and not self.written.done()

    def finish(self) -> None:
        if self.written is not None:
            self.written.result(timeout=300)


class Ours:
    """CheckpointWriter on rank 0, as ddp_training.py uses it."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.network, self.optimizer = network, optimizer
        store = CheckpointStore(folder / "checkpoints", keep_last=1)
        self.writer = CheckpointWriter(store) if dist.get_rank() == 0 else None
        if self.writer is not None:
            size_bytes = 3 * sum(p.nbytes for p in network.parameters())  # with AdamW's state
            self.writer._reserve(size_bytes, pinned=False)

    def save(self, step: int) -> None:
        if self.writer is not None:
            tensors = _flat_state(self.network, self.optimizer)
            self.writer.submit(step, tensors=tensors, meta={"step": step})

    def before_update(self) -> None:
        if self.writer is not None:
            self.writer.before_update()

    def is_busy(self) -> bool:
        return self.writer is not None and self.writer.is_busy

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()
            if (error := self.writer.poll()) is not None:
                raise error


METHODS: Mapping[str, type[TorchSave | DcpSave | DcpAsyncSave | Ours]] = {
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save": DcpAsyncSave,
    "ours": Ours,
}


def _state(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": network.state_dict(), "optimizer": optimizer.state_dict()}


def _flat_state(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in network.state_dict().items()}
    for name, parameter in network.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _fresh(folder: Path, step: int) -> Path:
    """Name this step's folder, and remove those before, as one that keeps only the last would."""
    if dist.get_rank() == 0:
        for old in folder.glob("dcp-*"):
            shutil.rmtree(old)
    dist.barrier()  # collective
    return folder / f"dcp-{step}"
