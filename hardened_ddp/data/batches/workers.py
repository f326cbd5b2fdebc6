"""The number of loader workers and how they start, decided from the machine's real limits.

WHY not os.cpu_count(): in a container it counts the host's CPUs; and every rank has workers.

Owns how a dataset gets to them, too: its tensors through shared memory, as torch's own DataLoader
sends them, so that all workers of a rank have one copy. They are copied into each worker where
/dev/shm is small, as in containers, or where there are too many: each shared one is an open file.
A trial that writes nothing counts them.
"""

import contextlib
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hardened_ddp.data.batches.batch import BatchSource
from hardened_ddp.settings.config import DataConfig
from hardened_ddp.settings.wording import counted

log = logging.getLogger(__name__)

MOST_WORKERS = 8
SHARED_MEMORY = Path("/dev/shm")
_CGROUPS = Path("/sys/fs/cgroup")
# Prefetched batches are in shared memory; the margin is for other users of it.
_SHM_MARGIN = 1.5
_DATASET_SHM_MARGIN = 2.0  # batches need room there, too
MOST_PRIVATE_BYTES = 100 * 2**20
"""Of the dataset in one worker. More of it is worth a warning."""

_OBJECT_FACTOR = 3  # small Python objects take so many bytes of memory for one of their pickle
_MOST_SHARED_TENSORS = 200
"""multiprocessing sends a new process at most 256 open files, its own among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """How loading is done on this rank."""

    num_workers: int
    prefetch_factor: int
    start_method: str
    shares_memory: bool = True
    """Batches come back through shared memory. False: through a pipe, slower but without limits."""

    copies_data: bool = False
    """Each worker gets its own copy of the dataset's tensors; else they share them."""

    local_world_size: int = 1
    """Ranks of this machine, each with workers of its own."""

    reasons: tuple[str, ...] = ()
    """Where this differs from the settings, and why."""

    def __str__(self) -> str:
        workers = counted(self.num_workers, "worker") if self.num_workers else "no workers"
        return workers if self.shares_memory or not self.num_workers else f"{workers} through pipes"


def plan_workers(
    config: DataConfig,
    *,
    in_memory: bool,
    local_world_size: int,
    uses_gpu: bool,
    batch_bytes: int,
) -> WorkerPlan:
    """Decide workers, prefetching and start method for this rank. Reads the machine's limits."""
    budget = max(1, cpu_budget() // local_world_size)
    reasons: list[str] = []
    if config.num_workers is None:
        # A GPU leaves the rank's CPU free for loading; on the CPU one core trains.
        spare = budget if uses_gpu else budget - 1
        workers = 0 if in_memory else min(MOST_WORKERS, spare)
    else:
        workers = config.num_workers
        if workers > budget:
            reasons.append(
                f"num_workers {workers} as requested, but each of {local_world_size} ranks has "
                f"{counted(budget, 'CPU')}: expect it to be slower than {counted(budget, 'worker')}"
            )
    workers, prefetch = _fit_shared_memory(
        workers, config.prefetch_factor, batch_bytes * local_world_size, reasons
    )
    return WorkerPlan(
        num_workers=workers,
        prefetch_factor=prefetch,
        # WHY not fork: with gloo's or CUDA's threads, a forked child can deadlock on a lock whose
        # owner thread does not exist in it; seen once in 500 forks.
        start_method=config.multiprocessing_context.replace("auto", "forkserver"),
        local_world_size=local_world_size,
        reasons=tuple(reasons),
    )


def cpu_budget() -> int:
    """Count the CPUs that this process may use: affinity, limited by the container's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = read_cpu_quota(_CGROUPS)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def read_cpu_quota(root: Path) -> float | None:
    """Read the CPU quota of this process's container; None: unlimited or unknown.

    root: where cgroups are mounted, of v2 or v1. In a container that is our own group.
    """
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            text = " ".join((root / name).read_text(encoding="ascii") for name in names)
            quota, period = map(int, text.replace("max", "-1").split())
            return quota / period if quota >= 0 else None
    return None


def free_shared_memory() -> int | None:
    """Return the bytes that are free in /dev/shm; None: unknown."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None


def _fit_shared_memory(
    workers: int, prefetch: int, bytes_per_batch: int, reasons: list[str]
) -> tuple[int, int]:
    """Reduce prefetching, then workers, until the batches in flight fit into /dev/shm."""
    free_bytes = free_shared_memory()
    if workers == 0 or free_bytes is None:
        return workers, prefetch
    room = int(free_bytes / (_SHM_MARGIN * max(1, bytes_per_batch)))
    if workers * prefetch <= room:
        return workers, prefetch
    fitted_prefetch = max(1, min(prefetch, room // workers))
    fitted_workers = min(workers, room // fitted_prefetch)
    reasons.append(
        f"num_workers {workers} with prefetch_factor {prefetch} would need more shared memory than "
        f"{SHARED_MEMORY} has free; running {fitted_workers} with {fitted_prefetch}"
    )
    return fitted_workers, fitted_prefetch


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
    needed_bytes = tensor_bytes * plan.local_world_size * _DATASET_SHM_MARGIN
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
        self.tensors: dict[int, int] = {}
        """Bytes of each storage, by its address."""

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
