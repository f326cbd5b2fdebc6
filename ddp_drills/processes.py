"""The ranks of a drill: real processes, started as by a launcher, with a check for leftovers.

Owns: the commands, the environment, signals to ranks, and finding what still runs. Every process
that a drill starts has a mark in its environment, and its own session: so its child processes are
found too, and Ctrl-C reaches only the drill, which then ends all of them.
Does not own: faults (outside.py).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hardened_ddp.ranks.process import stat_fields

SCRIPT = Path(__file__).resolve().parents[1] / "ddp_training.py"
HOST = "127.0.0.1"
MARK = "HARDENED_DDP_DRILL"
SHARED_MEMORY = Path("/dev/shm")
_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "GROUP_", "ROLE_", "MASTER_", "OMPI_", "PMI", "MPI_")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HARDENED_DDP_LAUNCHER")
_POLL_S = 0.02
_LOOK_EVERY_S = 0.25


class Ranks(Protocol):
    """The ranks of one start."""

    @property
    def statuses(self) -> list[int | None]:
        """Exit status of each process, in rank order; -N: signal N; None: it still runs."""

    def pid_of(self, rank: int) -> int | None:
        """Return the pid of a rank, or with -1 that of torchrun; None if there is none."""

    def cut(self) -> None:
        """Cut the network of their host."""

    def output(self) -> str:
        """Return everything that they wrote."""

    def end(self) -> list[str]:
        """Kill what still runs; return the leftovers if every rank had ended."""


class Starter(Protocol):
    """Starts ranks. missing: that many of the last ones are not started. host: of rank 0."""

    def __call__(
        self,
        flags: Sequence[str],
        *,
        num_ranks: int,
        port: int,
        missing: int = 0,
        host: str = HOST,
    ) -> Ranks: ...


class Processes:
    """One process for each rank, or torchrun with them below it."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        log: Path,
        *,
        mark: str,
        is_torchrun: bool,
    ) -> None:
        self._is_torchrun = is_torchrun
        self._mark = f"{MARK}={mark}".encode()
        self._log = log
        self._seen: set[int] = set()
        self._look_at = 0.0
        self._old_files = set(_shared_files())  # WHY: process ids are used again
        with log.open("ab") as file:
            self._started = [
                subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command, env in zip(commands, environments, strict=True)
            ]

    @property
    def statuses(self) -> list[int | None]:
        if time.monotonic() > self._look_at:
            self._seen.update(self._marked())
            self._look_at = time.monotonic() + _LOOK_EVERY_S
        return [process.poll() for process in self._started]

    def pid_of(self, rank: int) -> int | None:
        if not self._is_torchrun:
            return self._started[rank].pid if self._started[rank].poll() is None else None
        agent = self._started[0].pid
        if rank < 0:
            return agent
        wanted = f"RANK={rank}".encode()
        for pid in self._marked():
            # WHY the parent: a rank's child processes have the same environment.
            if wanted in _environment_of(pid) and _parent_of(pid) == agent:
                return pid
        return None

    def cut(self) -> None:
        """They share this machine with all others."""

    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def end(self) -> list[str]:
        have_ended = None not in self.statuses
        left: list[str] = []
        if have_ended:
            left = [f"process {pid} was left" for pid in await_end(self._marked)]
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
        return [pid for pid in _pids() if self._mark in _environment_of(pid) and _is_alive(pid)]


class Launcher:
    """Starts ranks of the script with this machine's Python. See Starter."""

    def __init__(self, env: Mapping[str, str], log: Path, *, by_torchrun: bool = False) -> None:
        self._env, self._log, self._by_torchrun = env, log, by_torchrun

    def __call__(
        self,
        flags: Sequence[str],
        *,
        num_ranks: int,
        port: int,
        missing: int = 0,
        host: str = HOST,
    ) -> Processes:
        mark = uuid.uuid4().hex
        script = [str(SCRIPT), *flags]
        own = clean(self._env) | {MARK: mark, "OMP_NUM_THREADS": "1"}
        if self._by_torchrun:
            words = ["--standalone", f"--nproc_per_node={num_ranks}", "--max_restarts=3"]
            command = [sys.executable, "-m", "torch.distributed.run", *words, *script]
            # WHY TMPDIR: torchrun leaves folders of logs behind.
            own["TMPDIR"] = str(self._log.parent)
            return Processes([command], [own], self._log, mark=mark, is_torchrun=True)
        ranks = range(num_ranks - missing)
        return Processes(
            [[sys.executable, *script] for _ in ranks],
            [own | variables(rank, num_ranks, port, host=host) for rank in ranks],
            self._log,
            mark=mark,
            is_torchrun=False,
        )


def variables(rank: int, num_ranks: int, port: int, *, host: str = HOST) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def clean(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of another launcher."""
    return {
        name: value
        for name, value in env.items()
        if name not in _NAMES and not name.startswith(_LAUNCHERS)
    }


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def await_end(find: Callable[[], list[int]], *, limit_s: float = 15.0) -> list[int]:
    """Wait until find returns no process; return those that still run at the limit.

    WHY so long: a DataLoader worker checks every few seconds whether its rank still runs.
    """
    end = time.monotonic() + limit_s
    while (pids := find()) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return pids


def _shared_files() -> list[str]:
    return os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []


def _is_of(name: str, pids: Collection[int]) -> bool:
    """Return whether it is a file of torch's shared memory that one of these processes made."""
    parts = name.split("_")  # torch_PID_RANDOM_NUMBER
    return parts[0] == "torch" and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) in pids


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment_of(pid: int) -> list[bytes]:
    return _read(pid, "environ").split(b"\0")


def _parent_of(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[1]) if len(fields) > 1 else -1


def _is_alive(pid: int) -> bool:
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it ended while we looked, or belongs to somebody else
        return b""
