"""Memory use of this process, the machine or its container, the GPU and /dev/shm.

Imports neither torch nor psutil by itself: doctor asks for a container's memory without them.
"""

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

CGROUP = Path("/sys/fs/cgroup")
_MIB = 2**20
_SYSTEM_LIMIT_PERCENT = 95.0
_SHM_LIMIT_PERCENT = 90.0
_SHARED_MEMORY = "/dev/shm"
# The files of the limit, what is in use, and the statistics; the file cache in the last one.
_CGROUP_V2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")
_CGROUP_V1 = (
    *("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    "total_inactive_file",
)


class ResourceMonitor:
    """Reads memory figures; warns once when memory is nearly full. Never raises."""

    def __init__(self, device: "torch.device", *, cgroup: Path = CGROUP) -> None:
        self._device = device
        self._cgroup = cgroup
        self._warned: set[str] = set()

    def sample(self) -> dict[str, float]:
        """Return memory/... in MiB or percent; unavailable figures are left out."""
        import psutil

        found: dict[str, float] = {}
        # WHY broad, each time: psutil has errors of its own
        with contextlib.suppress(Exception):
            found["memory/rss_mib"] = psutil.Process().memory_info().rss / _MIB
            found["memory/system_used_percent"] = percent = psutil.virtual_memory().percent
            self._warn_above("system memory", percent, _SYSTEM_LIMIT_PERCENT)
        with contextlib.suppress(Exception):
            if (memory := read_container_memory(self._cgroup)) is not None:
                limit_bytes, used_bytes = memory
                found["memory/container_used_percent"] = percent = 100 * used_bytes / limit_bytes
                self._warn_above("this container's memory", percent, _SYSTEM_LIMIT_PERCENT)
        with contextlib.suppress(Exception):
            shm = psutil.disk_usage(_SHARED_MEMORY)
            found["memory/shm_used_mib"] = shm.used / _MIB
            self._warn_above(_SHARED_MEMORY, shm.percent, _SHM_LIMIT_PERCENT)
        with contextlib.suppress(Exception):
            if self._device.type == "cuda":
                import torch

                found["memory/gpu_allocated_mib"] = torch.cuda.memory_allocated(self._device) / _MIB
                reserved, peak = read_gpu_mib(self._device)
                found |= {"memory/gpu_reserved_mib": reserved, "memory/gpu_peak_mib": peak}
        return found

    def _warn_above(self, what: str, percent: float, limit: float) -> None:
        if percent > limit and what not in self._warned:
            self._warned.add(what)
            remedy = "lower batch_size, num_workers or prefetch_factor"
            text = "%s is more than %.0f %% full: this process may soon be killed; %s"
            log.warning(text, what, limit, remedy)


def read_rss_mib() -> float:
    """Read the memory of this process; 0 if it can't be read. Any thread."""
    import psutil

    try:
        return float(psutil.Process().memory_info().rss) / _MIB
    except (OSError, psutil.Error):
        return 0.0


def read_gpu_mib(device: "torch.device") -> tuple[float, float]:
    """Return what torch has of a GPU, and had at most; 0 on the CPU. Main thread."""
    if device.type != "cuda":
        return 0.0, 0.0
    import torch

    reserved, peak = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
    return reserved / _MIB, peak / _MIB


def read_container_memory(cgroup: Path) -> tuple[int, int] | None:
    """Return limit and use of this container (cgroup v2 or v1), in bytes; None without a limit."""
    for limit_name, used_name, stat_name, cache_name in (_CGROUP_V2, _CGROUP_V1):
        try:
            limit = (cgroup / limit_name).read_text("ascii").strip()
        except OSError:
            continue
        if limit == "max" or int(limit) >= 2**60:  # v1 says "no limit" with a huge number
            return None
        # WHY subtract the cache: the kernel reclaims it before it kills a process.
        stat = (cgroup / stat_name).read_text("ascii").split()
        cache = int(stat[stat.index(cache_name) + 1])
        used = int((cgroup / used_name).read_text("ascii"))
        return int(limit), max(0, used - cache)
    return None
