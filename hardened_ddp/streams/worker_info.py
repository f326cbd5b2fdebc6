"""What a stream's own code sees of DataLoader workers: none, or its shard as one.

User code that saw the workers would split its samples over them once more.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.data

from hardened_ddp.streams.stream_types import Stream

_NOTHING_TO_HIDE = contextlib.nullcontext()


def seen_by_user(stream: Stream, shard: int) -> AbstractContextManager[None]:
    """Let the stream's code see no DataLoader worker; or, if it splits by worker, see its shard.

    Where this version of torch has no such variable, nothing is changed.
    """
    splits = bool(getattr(stream, "splits_by_worker", False))
    if not splits and torch.utils.data.get_worker_info() is None:
        return _NOTHING_TO_HIDE
    return _shown(stream, shard, splits=splits)


@contextlib.contextmanager
def _shown(stream: Stream, shard: int, *, splits: bool) -> Iterator[None]:
    worker: Any = getattr(getattr(torch.utils.data, "_utils", None), "worker", None)
    if not hasattr(worker, "_worker_info"):
        yield
        return
    before = worker._worker_info
    shown = None
    if splits and hasattr(worker, "WorkerInfo"):
        shown = worker.WorkerInfo(id=shard, num_workers=stream.num_shards, seed=0, dataset=None)
    worker._worker_info = shown
    try:
        yield
    finally:
        worker._worker_info = before
