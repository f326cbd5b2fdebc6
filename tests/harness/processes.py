"""What /proc tells about processes, how to end them, and work in a fork.

What goes wrong here: a process ends while it is read. Then it reads as empty, and never raises.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER_PREFIXES = ("MASTER_", "TORCHELASTIC", "GROUP_", "ROLE_", "SLURM_", "OMPI_", "PMI")
_LAUNCHER_PREFIXES += ("MPI_LOCAL", "HARDENED_DDP_LAUNCHER")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTEST_CURRENT_TEST")
_KILL_LIMIT_S = 10.0
RAISED = 99
_CAPABILITIES_OF_64_BITS = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of <linux/capability.h>
_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
PATIENCE = 3
"""The limits in the tests are for an idle machine of 2 cores. So many times as long on any other:
a limit is there to end what hangs, and a slow machine is no fault."""

HOUR_S = 3600.0
"""A limit that no test reaches, for what must end by something else."""

LEAST_S = 90.0
"""The shortest limit: where 20 processes are busy, a second becomes a minute."""


class Process(NamedTuple):
    """One line of /proc/PID/stat, as far as it is of use here."""

    pid: int
    state: str
    parent: int
    group: int

    @property
    def is_alive(self) -> bool:
        return self.state not in ("Z", "X")


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
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    return {**env, "OMP_NUM_THREADS": "1", **(extra or {})}


def list_pids() -> frozenset[int]:
    """List the ids of all processes."""
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())


def read_process(pid: int) -> Process | None:
    """Read what the kernel says of a process; None if it is gone."""
    # WHY after the last bracket: the name before it may hold blanks and brackets itself
    fields = _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    if len(fields) < 3:
        return None
    return Process(pid=pid, state=fields[0], parent=int(fields[1]), group=int(fields[2]))


def is_alive(pid: int) -> bool:
    """Say whether a process has not ended: one that only waits to be buried has."""
    process = read_process(pid)
    return process is not None and process.is_alive


def read_environment(pid: int) -> dict[str, str]:
    """Read the environment that a process was started with."""
    entries = _read(pid, "environ").decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def read_command_line(pid: int) -> str:
    """Read the command line of a process, with blanks between the words."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


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
    return [pid for pid in found if (process := read_process(pid)) and process.is_alive]


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


def run_forked(work: Callable[[], object]) -> int:
    """Run work in a fork of pytest, to kill it, limit it or take its rights away.

    Gives 0, RAISED, or what os._exit was called with. It must use no tensor code with threads.
    """
    pid = os.fork()
    if pid == 0:
        try:
            if (torch := sys.modules.get("torch")) is not None:
                # WHY: the threads of a parallel operation of the parent are not in this child,
                # which would wait for them for ever
                torch.set_num_threads(1)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(RAISED)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def give_up_privileges() -> None:
    """Have this process obey the rights of files, even as root.

    WHY not as another user: nobody else may get to where pytest's temporary folders are.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_OF_64_BITS, 0)
    nothing = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


def _children_of(pid: int) -> list[int]:
    """List what the threads of a process have forked, and what it has adopted."""
    # WHY not by the parents of all processes: each test asks, and there may be hundreds
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return []
    return [int(child) for task in threads for child in _read(pid, f"task/{task}/children").split()]


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
