"""What is known of processes, and how to end them.

What goes wrong here: a process ends while it is asked for. Then it is gone, and nothing raises.
"""

import contextlib
import ctypes
import glob
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
_OF_LAUNCHERS = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ GROUP_ ROLE_ TORCHELASTIC"
_OF_LAUNCHERS += " SLURM_ OMPI_ PMI MPI_LOCAL HARDENED_DDP_LAUNCHER PYTEST_CURRENT_TEST"
_KILL_LIMIT_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
PATIENCE = 3
"""The limits in the tests are for an idle machine of 2 cores. So many times as long on any other:
a limit is there to end what hangs, and a slow machine is no fault."""

HOUR_S = 3600.0
"""A limit that no test reaches, for what must end by something else."""

LEAST_S = 90.0
"""The shortest limit: where 20 processes are busy, a second becomes a minute."""


def limit_of(timeout_s: float) -> float:
    """Say how many seconds to wait for what takes timeout_s at most on an idle machine."""
    return max(LEAST_S, PATIENCE * timeout_s)


def deadline(timeout_s: float) -> float:
    """Say until when, by time.monotonic(), to wait for what takes timeout_s at most."""
    return time.monotonic() + limit_of(timeout_s)


def wait_until(condition: Callable[[], T | None], timeout_s: float, what: str) -> T:
    """Poll until condition gives something true, and return that. Raises AssertionError."""
    end = deadline(timeout_s)
    while not (found := condition()):
        assert time.monotonic() < end, f"{limit_of(timeout_s):g} s went by without {what}"
        time.sleep(0.01)
    return found


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give os.environ without what a launcher or pytest left in it, with extra."""
    left_out = tuple(_OF_LAUNCHERS.split())
    env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**env, "OMP_NUM_THREADS": "1", **(extra or {})}


def ask(pid: int, what: str) -> Any:
    """Ask psutil for the status, ppid, environ or cmdline of a process; None if it is gone."""
    with contextlib.suppress(psutil.Error, OSError):
        return getattr(psutil.Process(pid), what)()
    return None


def is_alive(pid: int) -> bool:
    """Say whether a process has not ended: one that only waits to be buried has."""
    return ask(pid, "status") not in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def adopt_orphans() -> None:
    """Be the parent of all descendants whose own parent ends: so none of them is lost sight of."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants_of(*roots: int, without: Collection[int] = ()) -> list[int]:
    """List the living processes that these have started, and so on. without: and their own."""
    found: list[int] = []
    waiting = list(roots)
    while waiting:
        own = [pid for pid in _children_of(waiting.pop()) if pid not in without]
        found += own
        waiting += own
    return [pid for pid in found if is_alive(pid)]


def kill_descendants(root: int) -> None:
    """Kill all that a process has started, and what these start meanwhile."""
    end = time.monotonic() + _KILL_LIMIT_S
    while (pids := descendants_of(root)) and time.monotonic() < end:
        for pid in pids:
            kill(pid)
        time.sleep(0.01)  # WHY: a killed process takes a moment to go; the loop looks again


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children_of(pid: int) -> list[int]:
    """List what the threads of a process have forked, and what it has adopted."""
    # WHY not by the parents of all processes: each test asks, and there may be hundreds
    found: list[int] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(path) as file:
            found += map(int, file.read().split())
    return found
