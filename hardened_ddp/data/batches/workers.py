"""The number of loader workers and how they start, decided from the machine's real limits.

WHY not os.cpu_count(): in a container it counts the host's CPUs; and every rank has workers.
WHY no torch: the doctor asks the same limits, also where torch is broken.
"""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hardened_ddp.settings.config import DataConfig
from hardened_ddp.settings.wording import counted

MOST_WORKERS = 8
SHARED_MEMORY = Path("/dev/shm")
_CGROUPS = Path("/sys/fs/cgroup")
# Prefetched batches are in shared memory; the margin is for other users of it.
_SHM_MARGIN = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """How loading is done on this rank."""

    num_workers: int
    prefetch_factor: int
    start_method: str
    # Batches come back through shared memory. False: through a pipe, slower but without limits.
    shares_memory: bool = True

    # Each worker gets its own copy of the dataset's tensors; else they share them.
    copies_data: bool = False
    local_world_size: int = 1  # ranks of this machine, each with workers of its own
    reason: str = ""  # why this differs from the settings

    def __str__(self) -> str:
        workers = counted(self.num_workers, "worker") if self.num_workers else "no workers"
        return workers if self.shares_memory or not self.num_workers else f"{workers} through pipes"


def plan_workers(
    config: DataConfig, *, in_memory: bool, local_world_size: int, uses_gpu: bool, batch_bytes: int
) -> WorkerPlan:
    """Decide workers, prefetching and start method for this rank. Reads the machine's limits."""
    budget = max(1, cpu_budget() // local_world_size)
    reason = ""
    if config.num_workers is None:
        # A GPU leaves the rank's CPU free for loading; on the CPU one core trains.
        spare = budget if uses_gpu else budget - 1
        workers = 0 if in_memory else min(MOST_WORKERS, spare)
    else:
        workers = config.num_workers
    prefetch, free_bytes = config.prefetch_factor, free_shared_memory()
    if workers and free_bytes is not None:
        # Reduce prefetching, then workers, until the batches in flight fit into /dev/shm.
        room = int(free_bytes / (_SHM_MARGIN * max(1, batch_bytes * local_world_size)))
        asked = workers, prefetch
        prefetch = max(1, min(prefetch, room // workers))
        workers = min(workers, room // prefetch)
        if (workers, prefetch) != asked:
            reason = f"num_workers {asked[0]} with prefetch_factor {asked[1]} would need more "
            reason += f"shared memory than {SHARED_MEMORY} has free; running {workers} with "
            reason += f"{prefetch}"
    return WorkerPlan(
        num_workers=workers,
        prefetch_factor=prefetch,
        # WHY not fork: with gloo's or CUDA's threads, a forked child can deadlock on a lock whose
        # owner thread does not exist in it; seen once in 500 forks.
        start_method=config.multiprocessing_context.replace("auto", "forkserver"),
        local_world_size=local_world_size,
        reason=reason,
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
