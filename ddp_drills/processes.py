"""The ranks of a drill: real processes, started as by a launcher, with a check for leftovers.

Every process that a drill starts has a mark in its environment, and its own session: so its child
processes are found too, and Ctrl-C reaches only the drill, which then ends all of them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hardened_ddp.ranks.launchers_env import OF_LAUNCHERS
from hardened_ddp.ranks.process import stat_fields

SCRIPT = Path(__file__).resolve().parents[1] / "ddp_training.py"
HOST = "127.0.0.1"
MARK = "HARDENED_DDP_DRILL"
SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.02
_LOOK_EVERY_S = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One start of the script."""

    flags: Sequence[str]
    log: Path  # where the ranks write their output to
    num_ranks: int
    port: int
    outside: str  # the fault from outside, see outside.py
    missing: int = 0  # so many of the last ranks are not started
    host: str = HOST  # of rank 0


class Ranks:
    """The ranks of one start: one process for each, or torchrun with them below it."""

    def __init__(
        self,
        commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
        log: Path,
        *,
        is_torchrun: bool = False,
    ) -> None:
        """Start commands, each in its environment."""
        mark = uuid.uuid4().hex
        self._mark = f"{MARK}={mark}".encode()
        self._is_torchrun, self._log = is_torchrun, log
        self._seen: set[int] = set()
        self._look_at = 0.0
        self._old_files = set(_shared_files())  # WHY: process ids are used again
        with log.open("ab") as file:
            self._started = [
                subprocess.Popen(
                    command,
                    env={**env, MARK: mark},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command, env in commands
            ]

    @property
    def statuses(self) -> list[int | None]:
        """Exit status of each process, in rank order; -N: signal N; None: it still runs."""
        if time.monotonic() > self._look_at:
            self._seen.update(self._marked())
            self._look_at = time.monotonic() + _LOOK_EVERY_S
        return [process.poll() for process in self._started]

    def pid_of(self, rank: int) -> int | None:
        """Return the pid of a rank, or with -1 that of torchrun; None if there is none."""
        if not self._is_torchrun:
            return self._started[rank].pid if self._started[rank].poll() is None else None
        agent = self._started[0].pid
        if rank < 0:
            return agent
        wanted = f"RANK={rank}".encode()
        for pid in self._marked():
            # WHY the parent: a rank's child processes have the same environment.
            if wanted in _environment_of(pid) and stat_fields(pid)[1:2] == [str(agent)]:
                return pid
        return None

    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def end(self) -> list[str]:
        """Kill what still runs; return the leftovers if every rank had ended."""
        still_running = [] if None in self.statuses else await_end(self._marked)
        left = [f"process {pid} was left" for pid in still_running]
        limit = time.monotonic() + 10
        while (pids := self._marked()) and time.monotonic() < limit:
            for pid in pids:
                send(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        for process in self._started:
            process.wait()
        files = [n for n in _shared_files() if n not in self._old_files and _is_of(n, self._seen)]
        return left + [f"/dev/shm/{name} was left" for name in files]

    def _marked(self) -> list[int]:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if self._mark in _environment_of(pid) and _is_alive(pid)]


def start_ranks(env: Mapping[str, str], start: Start) -> Ranks:
    script = [str(SCRIPT), *start.flags]
    own = {name: value for name, value in env.items() if not name.startswith(OF_LAUNCHERS)}
    own["OMP_NUM_THREADS"] = "1"
    if start.outside == "full disk":  # WHY: Python would keep a .pyc that the limit cuts
        own["PYTHONDONTWRITEBYTECODE"] = "1"
    if start.outside.startswith("torchrun"):
        words = ["--standalone", f"--nproc_per_node={start.num_ranks}", "--max_restarts=3"]
        command = [sys.executable, "-m", "torch.distributed.run", *words, *script]
        # WHY TMPDIR: torchrun leaves folders of logs behind.
        own["TMPDIR"] = str(start.log.parent)
        return Ranks([(command, own)], start.log, is_torchrun=True)
    # What torchrun sets for a rank.
    own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(start.num_ranks))
    own |= {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": start.host, "MASTER_PORT": str(start.port)}
    ranks = [str(rank) for rank in range(start.num_ranks - start.missing)]
    environments = [own | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks]
    return Ranks([([sys.executable, *script], env) for env in environments], start.log)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def await_end(find: Callable[[], list[int]]) -> list[int]:
    """Wait until find returns no process; return what still runs. A loader worker takes seconds."""
    end = time.monotonic() + 15
    while (pids := find()) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return pids


def _shared_files() -> list[str]:
    return os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []


def _is_of(name: str, pids: Collection[int]) -> bool:
    """Return whether it is a file of torch's shared memory that one of these processes made."""
    parts = name.split("_")  # torch_PID_RANDOM_NUMBER
    return parts[0] == "torch" and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) in pids


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended while we looked, or belongs to somebody else
        return []


def _is_alive(pid: int) -> bool:
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in ("Z", "X")
