"""Memory: of this process, the machine, the GPU and /dev/shm, and how it grows."""

import logging
import os

import torch

log = logging.getLogger(__name__)

_MIB = 2**20
_SYSTEM_LIMIT_PERCENT = 95.0
_SHM_LIMIT_PERCENT = 90.0


class ResourceMonitor:
    """Reads memory figures; warns once when they get dangerous. Never raises."""

    def __init__(self, device: torch.device) -> None:
        # WHY here: the import is for runs only, not for --help.
        import psutil

        self._psutil = psutil
        self._process = psutil.Process()
        self._device = device
        self._first_rss: float | None = None
        self._warned: set[str] = set()

    def sample(self) -> dict[str, float]:
        """Give the figures by name, memory/... in MiB or percent. Takes about 0.1 ms."""
        try:
            return self._sample()
        except (OSError, self._psutil.Error) as error:
            log.debug("memory can't be read: %s", error)
            return {}

    def _sample(self) -> dict[str, float]:
        rss = self._process.memory_info().rss / _MIB
        self._first_rss = rss if self._first_rss is None else self._first_rss
        system = self._psutil.virtual_memory().percent
        found = {
            "memory/rss_mib": rss,
            "memory/rss_growth_mib": rss - self._first_rss,
            "memory/system_used_percent": system,
        }
        self._warn_above("system memory", system, _SYSTEM_LIMIT_PERCENT)
        if os.path.isdir("/dev/shm"):
            shm = self._psutil.disk_usage("/dev/shm")
            found["memory/shm_used_mib"] = shm.used / _MIB
            self._warn_above("/dev/shm", shm.percent, _SHM_LIMIT_PERCENT)
        if self._device.type == "cuda":
            found["memory/gpu_allocated_mib"] = torch.cuda.memory_allocated(self._device) / _MIB
            found["memory/gpu_reserved_mib"] = torch.cuda.memory_reserved(self._device) / _MIB
            found["memory/gpu_peak_mib"] = torch.cuda.max_memory_allocated(self._device) / _MIB
        return found

    def _warn_above(self, what: str, percent: float, limit: float) -> None:
        if percent > limit and what not in self._warned:
            self._warned.add(what)
            log.warning("%s is %.0f %% full: the next step may be killed for memory", what, percent)
