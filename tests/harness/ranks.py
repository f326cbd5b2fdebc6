"""Ranks and programs for tests: real processes, most of them forked from one that has torch.

    results = run_ranks(target, 2, "argument")             a function on each of 2 ranks
    finished = train(["--epochs", "1"], 2).ok()            ddp_training.py on 2 ranks
    with start_training([...], 2) as running: ...          the same, to be signalled and killed
    completed = run_program(["torchrun", ...], timeout_s=60)   a forked python or torchrun
    completed = run_command(["bash", ...], timeout_s=60)       any command, as a user starts it
    with start_program([...]) as program: ...              both of these: to be signalled and killed

Does not own: the fork server (fork_server.py), what a test leaves behind (leftovers.py).
What goes wrong here: a rank hangs. Then all are asked for their stacks, killed, and shown.
"""

import atexit
import contextlib
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from hardened_ddp.ranks.launchers_env import hold_port
from tests.harness import fork_server, processes
from tests.harness.fork_server import ERRORS_NAME, MAX_MESSAGE_BYTES, PIDS_NAME
from tests.harness.processes import ROOT, T, clean_environment, descendants_of, is_alive, kill
from tests.launcher_environments import by_torchrun

POLL_S = 0.01
END_LIMIT_S = 10.0  # of processes that are told to end
ANSWER_LIMIT_S = 120.0  # imports of torch and the package, on a machine that does other things too


class RankFailure(AssertionError):
    """Ranks or a program failed, hung or were killed; finished says how each of them ended."""

    def __init__(self, reason: str, finished: "Finished") -> None:
        super().__init__(f"{reason}\n{finished.describe()}")
        self.finished = finished


class Finished(NamedTuple):
    """How the ranks ended, in rank order; a program is one rank."""

    statuses: tuple[int, ...]  # -N where signal N ended the rank
    outputs: tuple[str, ...]  # stdout of each, and stderr if it is no program; then its stacks
    stderr: str  # of a program
    values: tuple[Any, ...]  # Any: what a test's function returned; None where it did not

    @property
    def status(self) -> int:
        return self.statuses[0]

    @property
    def stdout(self) -> str:
        return self.outputs[0]

    @property
    def output(self) -> str:
        return "".join(self.outputs) + self.stderr

    def ok(self) -> Self:
        """Return this, or raise RankFailure if a rank's status is not 0."""
        if any(self.statuses):
            bad = [str(rank) for rank, status in enumerate(self.statuses) if status]
            raise RankFailure(f"rank {', '.join(bad)} failed", self)
        return self

    def describe(self) -> str:
        """Tell of each rank that failed, with the end of its output; of all if none did."""
        texts = []
        ranks = [rank for rank, status in enumerate(self.statuses) if status]
        for rank in ranks or range(len(self.statuses)):
            status = self.statuses[rank]
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            output = (self.outputs[rank] + self.stderr)[-12_000:]
            texts.append(f"--- rank {rank} ended with {how}\n{output}")
        return "\n".join(texts)


class Running:
    """Ranks or a program under way. Use it in a with statement: leaving that kills what is left."""

    def __init__(
        self, children: "Sequence[ForkedChild | subprocess.Popen[bytes]]", folder: Path
    ) -> None:
        """folder: of their output, until the test ends."""
        self.pids = tuple(child.pid for child in children)
        self._children = children
        self._folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_all()

    @property
    def pid(self) -> int:
        return self.pids[0]

    @property
    def stdout(self) -> str:
        """What a program has written up to now."""
        return _text_of(self._folder / "output-0.txt")

    @property
    def stderr(self) -> str:
        return _text_of(self._folder / ERRORS_NAME)

    def living(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [rank for rank, status in enumerate(self.statuses()) if status is None]

    def statuses(self) -> list[int | None]:
        """Return how each rank ended; None: it has not."""
        return [child.poll() for child in self._children]

    def output(self, rank: int) -> str:
        """Return what a rank has written up to now; of a program, stderr comes last."""
        return _text_of(self._folder / f"output-{rank}.txt") + self.stderr

    def kill(self, rank: int = 0, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank, or to the program, unless that has ended."""
        if rank in self.living():
            kill(self.pids[rank], number)

    def kill_all(self) -> None:
        """Kill all that live, with what they have started; wait until they are gone."""
        living = [self.pids[rank] for rank in self.living()]
        for pid in descendants_of(*living) + living:
            kill(pid)
        while self.living():
            time.sleep(POLL_S)

    def wait_for(self, condition: Callable[[], T | None], *, timeout_s: float, what: str) -> T:
        """Poll until condition gives something true, and return that.

        Raises RankFailure if all ranks end before, or after timeout_s.
        """
        end = processes.deadline(timeout_s)
        while True:
            has_ended = not self.living()
            if found := condition():
                return found
            if has_ended:
                raise RankFailure(f"all ranks ended before {what}", self._finished())
            if time.monotonic() > end:
                self._abort()
                reason = f"{processes.limit_of(timeout_s):g} s went by without {what}"
                raise RankFailure(reason, self._finished())
            time.sleep(POLL_S)

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the end of all ranks. Raises RankFailure with their stacks after timeout_s."""
        self.wait_for(lambda: not self.living(), timeout_s=timeout_s, what="the end of all ranks")
        return self._finished()

    def pid_of_rank(self, rank: int) -> int | None:
        """Return the process id of a rank of this torchrun; None if it doesn't live."""
        for number, pid in self._ranks_of_torchrun():
            if number == rank and is_alive(pid) and processes.ask(pid, "ppid") == self.pid:
                return pid
        return None

    def living_ranks(self) -> list[int]:
        """List the process ids of torchrun's ranks that live, also of those that it has left."""
        return [pid for _, pid in self._ranks_of_torchrun() if is_alive(pid)]

    def _ranks_of_torchrun(self) -> list[tuple[int, int]]:
        """List rank and process id of all that it has started, the newest first."""
        lines = _text_of(self._folder / PIDS_NAME).splitlines()
        if lines:  # forked ones show no environment of their own
            return [(int(rank), int(pid)) for rank, pid in map(str.split, reversed(lines))]
        found = [(processes.ask(pid, "environ") or {}, pid) for pid in descendants_of(self.pid)]
        return [(int(env["RANK"]), pid) for env, pid in found if "RANK" in env]

    def _abort(self) -> None:
        """End all that live by a signal at which a forked rank writes its stacks, or kill them."""
        for rank in self.living():
            self.kill(rank, signal.SIGABRT)
        end = time.monotonic() + END_LIMIT_S
        while self.living() and time.monotonic() < end:
            time.sleep(POLL_S)
        self.kill_all()

    def _finished(self) -> Finished:
        ranks = range(len(self.pids))
        results = [self._folder / f"result-{rank}.pickle" for rank in ranks]
        return Finished(
            tuple(status for status in self.statuses() if status is not None),
            tuple(_text_of(self._folder / f"output-{rank}.txt") for rank in ranks),
            self.stderr,
            tuple(pickle.loads(path.read_bytes()) if path.exists() else None for path in results),
        )


class ForkServer:
    """The process that ranks are forked from. Other processes of pytest find it by its address."""

    def __init__(self, module: str = "tests.harness.fork_server") -> None:
        folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
        self.log = folder / "log.txt"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # the kernel finds a name, which is no file
            listener.listen(64)
            self.address: bytes = listener.getsockname()
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(listener.fileno()), str(folder)],
                    stdin=subprocess.PIPE,  # WHY: it closes at our end, however that comes
                    stdout=log,
                    stderr=log,
                    env=clean_environment({"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
                    cwd=ROOT,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,  # WHY: Ctrl-C is for pytest, which then ends this
                )
        SERVER_PIDS.add(self._process.pid)

    def close(self) -> None:
        """End the server, which removes its log."""
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.log.parent, ignore_errors=True)


class ForkedChild:
    """A rank, as its keeper in the fork server tells of it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._channel = _connect()
        self._channel.send(json.dumps({"folder": str(folder), "rank": rank}).encode())
        if not select.select([self._channel], [], [], ANSWER_LIMIT_S)[0]:
            raise RuntimeError(f"the fork server did not answer in {ANSWER_LIMIT_S:g} s")
        told = self._receive()
        self.pid, self.keeper = int(told["pid"]), int(told["keeper"])
        self._status: int | None = None
        CHILDREN.append(self)

    def poll(self) -> int | None:
        """Return the exit status; None: it has not ended."""
        if self._status is None and select.select([self._channel], [], [], 0.0)[0]:
            self._status = int(self._receive()["status"])
        return self._status

    def close(self) -> None:
        """Have the keeper kill what is left, and end."""
        self._channel.close()

    def _receive(self) -> dict[str, Any]:
        raw = self._channel.recv(MAX_MESSAGE_BYTES)
        if not raw:
            raise RuntimeError(f"the keeper of a rank ended\n{_text_of(share_server()[1])}")
        return json.loads(raw)


SERVERS: list[tuple[bytes, str]] = []  # address and log; the last one, perhaps of another process
SERVER_PIDS: set[int] = set()  # of the fork servers that this process started
CHILDREN: list[ForkedChild] = []  # of the test that runs
_folders: list[Path] = []
_holders: list[socket.socket] = []


def run_ranks(
    target: Callable[..., Any],  # Any: a test's own function
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call target(*args) on each rank, and return what they returned, in rank order.

    Raises RankFailure if a rank raises, leaves with another status than 0, or hangs.
    """
    with start_ranks(target, world_size, *args, env=env) as running:
        return list(running.wait(timeout_s).ok().values)


def start_ranks(
    target: Callable[..., Any],  # Any: a test's own function
    world_size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
) -> Running:
    """Start target(*args) on each rank, with torchrun's variables in os.environ.

    target is a function at the top level of a test module.
    """
    # WHY loopback: gloo would look for the address of the host's name, and may find none
    env = {"GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    return _start_by_torchrun(_job(target, *args), world_size, env, Path.cwd())


def start_training(
    argv: Sequence[str | Path],
    world_size: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    launcher: Literal["torchrun", "none"] = "torchrun",
    missing: int = 0,
) -> Running:
    """Start ddp_training.py with these arguments on each rank, as the given launcher would.

    missing: so many of the last ranks never come.
    """
    job = _job(fork_server.run_script, [str(word) for word in argv])
    if launcher == "none":
        return _start([{**job, "env": clean_environment(env), "cwd": str(cwd or ROOT)}])
    return _start_by_torchrun(job, world_size, env or {}, cwd or ROOT, missing)


def train(
    argv: Sequence[str | Path], world_size: int = 1, *, timeout_s: float = 120.0, **how: Any
) -> Finished:
    """Run ddp_training.py to its end; how: see start_training. Does not raise if a rank fails."""
    with start_training(argv, world_size, **how) as running:
        return running.wait(timeout_s)


def start_program(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    host: Mapping[str, Any] | None = None,
) -> Running:
    """Start a command line of python or torchrun in a forked process. host: of TwoHosts."""
    folder = _new_folder()
    job = _job(fork_server.run_program, [str(word) for word in argv], folder)
    job |= {"host": host, "env": _environment_of_program(folder, env), "cwd": str(cwd or ROOT)}
    return _start([{**job, "errors": ERRORS_NAME}], folder)


def run_program(argv: Sequence[str | Path], *, timeout_s: float, **how: Any) -> Finished:
    """Run such a command line to its end. Raises RankFailure, with its output, after timeout_s."""
    with start_program(argv, **how) as program:
        return program.wait(timeout_s=timeout_s)


def start_command(
    argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Running:
    """Start any command, by default in the repository root; python and torchrun are our own."""
    folder = _new_folder()
    # WHY files: a pipe would stay open as long as any process that inherited it lives
    with (folder / "output-0.txt").open("wb") as stdout, (folder / ERRORS_NAME).open("wb") as err:
        process = subprocess.Popen(
            # WHY through env: Popen looks for the program on our own PATH, not on the new one
            ["/usr/bin/env", *map(str, argv)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=err,
            env=_environment_of_program(folder, env),
            cwd=cwd or ROOT,
            start_new_session=True,
        )
    return Running([process], folder)


def run_command(argv: Sequence[str | Path], *, timeout_s: float, **how: Any) -> Finished:
    """Run a command to its end. Raises RankFailure, with its output, after timeout_s."""
    with start_command(argv, **how) as command:
        return command.wait(timeout_s=timeout_s)


def held_port() -> int:
    """Return a TCP port that stays free for who is told it, until the test ends."""
    _holders.append(hold_port())
    return _holders[-1].getsockname()[1]


def release_ports() -> None:
    """Give back the ports of a test."""
    while _holders:
        _holders.pop().close()


def kill_running() -> list[int]:
    """Kill the ranks that a test left running. Returns their process ids."""
    left = [child for child in CHILDREN if child.poll() is None]
    Running(left, Path()).kill_all()
    return [child.pid for child in left]


def forget_ranks() -> None:
    """End the keepers of this test's ranks, with what is left of these."""
    while CHILDREN:
        CHILDREN.pop().close()
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def import_in_server(name: str) -> None:
    """Import a module once for the ranks to come, and not in each of them.

    For what is large and only some tests need: the more modules the dearer each fork.
    """
    with _connect() as channel:
        channel.send(json.dumps({"import": name}).encode())


def share_server() -> tuple[bytes, str]:
    """Give address and log of the fork server, for SERVERS; start one if there is none."""
    if not SERVERS:
        started = ForkServer()
        atexit.register(started.close)
        SERVERS.append((started.address, str(started.log)))
    return SERVERS[-1]


@contextlib.contextmanager
def another_server(module: str) -> Iterator[None]:
    """Have ranks forked from a server of one's own meanwhile: python -m module."""
    server = ForkServer(module)
    SERVERS.append((server.address, str(server.log)))
    try:
        yield
    finally:
        SERVERS.pop()
        server.close()


def _connect() -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.connect(share_server()[0])
    except ConnectionRefusedError as error:
        raise RuntimeError(f"the fork server ended\n{_text_of(share_server()[1])}") from error
    return channel


def _start_by_torchrun(
    job: Mapping[str, Any], world_size: int, env: Mapping[str, str], cwd: Path, missing: int = 0
) -> Running:
    port = held_port()
    envs = [{**by_torchrun(rank, world_size, port), **env} for rank in range(world_size - missing)]
    return _start([{**job, "env": clean_environment(each), "cwd": str(cwd)} for each in envs])


def _job(target: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    # WHY pickled by itself: a rank first goes to the place where its modules are
    return {"call": pickle.dumps((target, arguments))}


def _start(jobs: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Running:
    """Fork a rank for each job. folder: of their jobs and their output."""
    folder = folder or _new_folder()
    for rank, job in enumerate(jobs):
        job = {"sys_path": [str(ROOT), *sys.path], **job}
        (folder / f"job-{rank}.pickle").write_bytes(pickle.dumps(job))
    return Running([ForkedChild(folder, rank) for rank in range(len(jobs))], folder)


def _new_folder() -> Path:
    _folders.append(Path(tempfile.mkdtemp(prefix="ranks-")))
    return _folders[-1]


def _text_of(path: Path | str) -> str:
    """Return what is in a file; nothing if it is not there."""
    with contextlib.suppress(FileNotFoundError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def _environment_of_program(folder: Path, extra: Mapping[str, str] | None) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # WHY TMPDIR: torchrun leaves folders of logs behind
    return clean_environment({"PATH": path, "TMPDIR": str(folder), **(extra or {})})
