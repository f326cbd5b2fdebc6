"""A background writer on a disk that a test opens and closes.

bench = Bench(tmp_path)     bench.writer.submit(...)     bench.disk.allow()
"""

import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.checkpoint.folder import find_newest, load_checkpoint
from hardened_ddp.checkpoint.store import CheckpointStore, CheckpointWriter

LIMIT_S = 90


class GatedDisk:
    """A disk that lets only as many writes through as the test allows."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self._is_open = False
        self._arrived = threading.Semaphore(0)
        self.error: OSError | None = None

    def write(self, descriptor: int, data: memoryview) -> int:
        self._arrived.release()
        if not self._is_open:
            assert self._allowed.acquire(timeout=LIMIT_S)
        if self.error is not None:
            raise self.error
        return Disk().write(descriptor, data)

    def wait_for_write(self) -> None:
        """Return when the writer stands at the gate."""
        assert self._arrived.acquire(timeout=LIMIT_S)

    def allow(self) -> None:
        """Let one write through."""
        self._allowed.release()

    def open(self) -> None:
        """Let all writes through."""
        self._is_open = True
        self._allowed.release(1000)

    def __getattr__(self, name: str) -> Any:
        return getattr(Disk(), name)


class Bench:
    """A writer on a gated disk."""

    def __init__(self, root: Path) -> None:
        self.disk = GatedDisk()
        disk: Any = self.disk
        self.store = CheckpointStore(root, keep_last=5, disk=disk)
        self.writer = CheckpointWriter(self.store)

    def loaded(self, step: int) -> dict[str, Tensor]:
        found, rejected = find_newest(self.store.root)
        assert found is not None
        assert rejected == []
        assert found.step == step
        return load_checkpoint(found)[0]
