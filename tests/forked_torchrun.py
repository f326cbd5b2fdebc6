"""torchrun itself, forked from the server, and its ranks, forked from it: no import of torch.

    with start_torchrun(["torchrun", "--nproc_per_node=2", "ddp_training.py", ...]) as launched: ...

Its agent is torch's own, with its rendezvous, its restarts and its signals, and each rank is its
child process in a session of its own, as under a torchrun that is typed. Only the exec of a new
interpreter is left out: that costs each process several seconds of CPU time.
Owns: both ends, start_torchrun for tests, run_agent for the process that the server has forked.
What goes wrong here: torch starts the ranks otherwise. Then the first test that uses this fails.
"""

import faulthandler
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.commands import Completed
from tests.processes import kill, read_process
from tests.rank_server import STACK_SIGNAL, end_process, run_script
from tests.running import Running

T = TypeVar("T")
PIDS_NAME = "pids.txt"
_POLL_S = 0.02
_STARTS_WITHIN_S = 10.0
_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Torchrun:
    """A torchrun or python under way. Use it in a with statement: leaving that kills the rest."""

    def __init__(self, argv: Sequence[str], running: Running, folder: Path) -> None:
        self._argv = tuple(argv)
        self._running = running
        self._pids = folder / PIDS_NAME
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._running.living():
            self._running.kill_all()
            for _, pid in self._started():
                kill(pid)

    @property
    def pid(self) -> int:
        return self._running.pids[0]

    @property
    def stdout(self) -> str:
        return self._running.output(0)

    def pid_of_rank(self, rank: int) -> int | None:
        """Return the process id of a rank; None if it doesn't live."""
        for number, pid in reversed(self._started()):
            process = read_process(pid)
            if number == rank and process and process.is_alive and process.parent == self.pid:
                return pid
        return None

    def living_ranks(self) -> list[int]:
        """List the process ids of the ranks that live, also of those that torchrun has left."""
        found = (read_process(pid) for _, pid in self._started())
        return [process.pid for process in found if process and process.is_alive]

    def status(self) -> int | None:
        """Return how torchrun ended; None: it has not."""
        return self._running.statuses()[0]

    def kill(self) -> None:
        """Kill torchrun if it still runs."""
        self._running.kill_all()

    def signal(self, number: int) -> None:
        """Send a signal to torchrun itself."""
        self._running.kill(0, number)

    def wait_for(self, condition: Callable[[], T | None], *, timeout_s: float, what: str) -> T:
        """Poll until condition gives something true, and return that. See Running."""
        return self._running.wait_for(condition, timeout_s=timeout_s, what=what)

    def wait(self, *, timeout_s: float) -> Completed:
        """Wait for the end of torchrun. Raises RankFailure after timeout_s."""
        [status] = self._running.wait(timeout_s).statuses
        return Completed(self._argv, status, self.stdout, "", time.monotonic() - self._started_at)

    def _started(self) -> list[tuple[int, int]]:
        """List rank and process id of all that it has started, oldest first."""
        lines = self._pids.read_text(encoding="utf-8").splitlines() if self._pids.exists() else []
        return [(int(rank), int(pid)) for rank, pid in map(str.split, lines)]


def run_agent(argv: Sequence[str], folder: Path) -> int:
    """Do what the command torchrun does; return its exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> ForkedRank:
        if handler._stdout or handler._stderr:
            raise NotImplementedError("the output of a forked rank goes where torchrun's goes")
        rank = ForkedRank(args, env)
        with (folder / PIDS_NAME).open("a", encoding="utf-8") as file:
            file.write(f"{env['RANK']} {rank.pid}\n")
        return rank

    subprocess_handler.SubprocessHandler._popen = start  # type: ignore[assignment]
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)  # torchrun leaves folders of logs behind
    sys.argv = ["torchrun", *argv]
    return status_of(lambda: run.main(list(argv)))


class ForkedRank:
    """As much of a Popen as torch's agent needs."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        self.args = args
        self._env = env
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        while not self._fork():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _fork(self) -> bool:
        """Start the rank; return whether it got going."""
        is_ready, ready = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            # WHY: where a thread of the agent was resolving a name, its lock stays taken here
            socket.getaddrinfo("localhost", 0)
            os.write(ready, b"x")
            _become_rank(self.args, self._env)
        os.close(ready)
        # WHY wait: before that the agent can't signal it as a group
        has_started = bool(select.select([is_ready], [], [], _STARTS_WITHIN_S)[0])
        os.close(is_ready)
        return has_started

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_S)
        return self.returncode or 0


def _become_rank(args: Sequence[str], env: Mapping[str, str]) -> None:
    """Run the script of torchrun's arguments (python, -u, script, ...) as a new process would."""
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.unregister(STACK_SIGNAL)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the agent's store listens on one of them
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    sys.modules["numpy"].random.seed()
    end_process(run_python(args[2:]))


def run_python(argv: Sequence[str]) -> int:
    """Do what python does with a script, -m or -c and their arguments; return the exit status."""
    first, *words = argv
    if Path(first).name == "ddp_training.py":
        return run_script(words)
    names = {"run_name": "__main__"}
    match first:
        case "-c":
            sys.argv = [first, *words[1:]]
            run = partial(exec, words[0], {"__name__": "__main__"})
        case "-m":
            sys.argv = list(words)
            run = partial(runpy.run_module, words[0], **names, alter_sys=True)
        case _:
            sys.argv = list(argv)
            sys.path.insert(0, str(Path(first).resolve().parent))
            run = partial(runpy.run_path, first, **names)
    # WHY kept: without the script's globals, DDP's destructor would hold the GIL and wait for a
    # thread of gloo that may need it, which in a process of its own happens while that ends.
    kept: list[object] = []
    return status_of(lambda: kept.append(run()))


def status_of(work: Callable[[], object]) -> int:
    """Do work; return the exit status of a process that does only that."""
    try:
        work()
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # WHY broad: as at the top of an interpreter
        traceback.print_exc()
        return 1
    return 0
