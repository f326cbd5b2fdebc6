"""The machine that is measured on: what it is, and whether somebody else uses it.

Owns reading /proc (Linux). What goes wrong here: on a shared machine figures are of the others'
work, so a measurement waits until it is quiet, and is told afterwards how quiet it stayed.
"""

import os
import platform
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A measurement with more of a core than this used by others is noisy. Quiet enough to start is
# less: the shell and the kernel alone use about a hundredth.
NOISY_SHARE = 0.08
_QUIET_SHARE = 0.06


@dataclass(frozen=True, slots=True)
class CpuClock:
    """CPU seconds that others have used so far: all but ours, and what the host took away."""

    at: float
    others_s: float

    @classmethod
    def read(cls) -> "CpuClock":
        """Read it now. A child counts as ours once it was waited for, with its own children."""
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        user, nice, system, _, _, irq, softirq, steal = (int(x) for x in line.split()[1:9])
        busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        ours_s = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            ours_s += usage.ru_utime + usage.ru_stime
        return cls(time.monotonic(), busy_s - ours_s)

    def share_since(self, earlier: "CpuClock") -> float:
        """Others' CPU seconds per second since earlier: 1.0 is one core."""
        return max(0.0, self.others_s - earlier.others_s) / max(1e-9, self.at - earlier.at)


def wait_until_idle(*, limit_s: float = 60) -> bool:
    """Wait until others leave the machine alone for a second; False if they never did."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = CpuClock.read()
        time.sleep(1)
        if CpuClock.read().share_since(before) < _QUIET_SHARE:
            return True
    return False


def describe() -> dict[str, str]:
    """Say what a reader must know to judge the figures."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "cpu": f"{len(models) or os.cpu_count()} x {models[0] if models else platform.machine()}",
        "memory": f"{memory_gib:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    """Give the commit of this tree; + if something in it was changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
