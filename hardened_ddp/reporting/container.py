"""The memory limit of this container. Does not import torch: the doctor uses it too."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerMemory:
    """A container's memory: its limit, and what is in use."""

    limit_bytes: int
    used_bytes: int


def read_container_memory(cgroup: Path) -> ContainerMemory | None:
    """Read the limit of this process's container (cgroup v2 or v1); None without a limit."""
    for limit_name, used_name, stat_name, cache_name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
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
        return ContainerMemory(limit_bytes=int(limit), used_bytes=max(0, used - cache))
    return None
