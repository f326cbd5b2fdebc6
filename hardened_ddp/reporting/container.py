"""The memory that this container may have. Without torch: the doctor asks, too."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerMemory:
    """What a container may have of memory, and what it has of it."""

    limit_bytes: int
    used_bytes: int


def read_container_memory(cgroup: Path) -> ContainerMemory | None:
    """Read the limit of this process's container (cgroup v2 or v1); None where there is none."""
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
        # WHY less the cache: the kernel takes that back before it kills anybody.
        stat = (cgroup / stat_name).read_text("ascii").split()
        cache = int(stat[stat.index(cache_name) + 1])
        used = int((cgroup / used_name).read_text("ascii"))
        return ContainerMemory(limit_bytes=int(limit), used_bytes=max(0, used - cache))
    return None
