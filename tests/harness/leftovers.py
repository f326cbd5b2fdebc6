"""What a test leaves behind: found, named, cleared away, and counted as a failure of that test.

Owns: the snapshot before a test and the comparison after it, for processes, listening ports,
/dev/shm, threads, the environment, the working folder, signal handlers, the process group and
files in the checkout. Something that is just ending gets GRACE_S; a test that is clean costs a
few milliseconds and never waits.
What goes wrong here: other programs start processes and segments at the same time. Only what
carries the session's mark, or was forked from pytest, is ours.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import ranks
from tests.harness.processes import (
    PATIENCE,
    ROOT,
    SESSION_MARK,
    is_fork_of,
    kill,
    list_pids,
    read_command_line,
    read_environment,
    read_process,
    session_mark,
)

GRACE_S = 6.0  # WHY: a DataLoader worker looks every 5 s whether its parent still lives
POLL_S = 0.02
SHM = Path("/dev/shm")
_WATCHED_FOLDERS = (ROOT, ROOT / "runs", ROOT / "data", ROOT / "exports", ROOT / "models")
# By setup.sh, perhaps for the tests that run beside these: what is in them counts.
_MADE_BY_SETUP = [ROOT / name for name in ("data", "models", "runs")]
_OWN_TOOLS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Set for good by libraries when they are first imported, or by pytest itself.
_OWN_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TF_CPP_", SESSION_MARK)
_OWN_VARIABLES += ("CUDA_MODULE_LOADING",)  # some versions of torch, at the first use of a GPU
_OWN_THREADS = ("_DummyThread", "TMonitor")  # C++ threads that ran Python; tqdm's one per process


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of everything that a test must leave as it was."""

    pids: frozenset[int]
    segments: frozenset[str]
    sockets: frozenset[str]
    threads: frozenset[int]
    files: frozenset[Path]
    environment: dict[str, str]
    folder: str
    handlers: tuple[object, ...]


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves something behind, and clear that away for the next one."""
    os.environ[SESSION_MARK] = session_mark()
    before = take_snapshot()
    yield
    ranks.release_ports()
    still_running = [f"rank still running: process {pid}" for pid in ranks.kill_running()]
    leftovers = still_running + find_leftovers(before)
    if leftovers:
        clear_away(before)
        pytest.fail("the test left behind:\n  " + "\n  ".join(leftovers), pytrace=False)


def take_snapshot() -> Snapshot:
    """Note what is there now."""
    return Snapshot(
        pids=list_pids(),
        segments=_list_segments(),
        sockets=_sockets_of(os.getpid()),
        threads=frozenset(id(thread) for thread in threading.enumerate()),
        files=_list_files(),
        environment=dict(os.environ),
        folder=os.getcwd(),
        handlers=tuple(map(signal.getsignal, _SIGNALS)),
    )


def find_leftovers(before: Snapshot, *, grace_s: float = GRACE_S) -> list[str]:
    """Say what is there that was not there before; what is ending has grace_s for that."""
    end = time.monotonic() + PATIENCE * grace_s
    lasting = [*_changed_state(before), *_new_files(before)]
    while ending := [
        *_new_processes(before),
        *_new_segments(before),
        *_new_sockets(before),
        *_new_threads(before),
    ]:
        if time.monotonic() > end:
            break
        time.sleep(POLL_S)
    return lasting + ending


def clear_away(before: Snapshot) -> None:
    """Undo what can be undone, so that the next test starts clean."""
    for pid in _our_new_pids(before):
        kill(pid)
    for name in _unused_new_segments(before):
        (SHM / name).unlink(missing_ok=True)
    os.environ.clear()
    os.environ.update(before.environment)
    os.chdir(before.folder)
    for number, handler in zip(_SIGNALS, before.handlers, strict=True):
        signal.signal(number, handler)  # type: ignore[arg-type]  # it came from getsignal
    if _has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()


def _new_processes(before: Snapshot) -> list[str]:
    return [_describe_process(pid) for pid in _our_new_pids(before)]


def _our_new_pids(before: Snapshot) -> list[int]:
    """List new processes with the session's mark, and forks of pytest, which show no mark."""
    own_pid, mark = os.getpid(), session_mark()
    # WHY not those of our parent: pytest-xdist starts a worker again that has died, and that one
    # shows what we show
    foreign_parents = (os.getppid(),) if os.getppid() > 1 else ()
    found = []
    for pid in list_pids() - before.pids - ranks.server_pids():
        process = read_process(pid)
        if process is None or not process.is_alive:
            continue
        is_ours = (
            process.parent == own_pid
            or read_environment(pid).get(SESSION_MARK) == mark
            or (
                process.group == os.getpgrp()
                and process.parent not in foreign_parents
                and is_fork_of(pid, own_pid)
            )
        )
        is_tool = process.parent == own_pid and any(
            tool in read_command_line(pid) for tool in _OWN_TOOLS
        )
        if is_ours and not is_tool:
            found.append(pid)
    return found


def _describe_process(pid: int) -> str:
    process = read_process(pid)
    ports = _listening_ports(pid, _sockets_of(pid))
    return (
        f"process {pid} (parent {process.parent if process else 'gone'})"
        + (f", listening on port {', '.join(map(str, ports))}" if ports else "")
        + f": {read_command_line(pid)[:300]}"
    )


def _list_segments() -> frozenset[str]:
    return frozenset(os.listdir(SHM)) if SHM.is_dir() else frozenset()


def _new_segments(before: Snapshot) -> list[str]:
    return [f"shared memory {SHM / name}" for name in _unused_new_segments(before)]


def _unused_new_segments(before: Snapshot) -> list[str]:
    """List new segments, but not those that a program of somebody else works with."""
    new = {name for name in _list_segments() - before.segments if not name.startswith("__KMP_")}
    if not new:  # WHY first: looking into all processes is slow
        return []
    own = session_mark()
    marks = {pid: read_environment(pid).get(SESSION_MARK, "") for pid in list_pids()}
    strangers = [pid for pid, mark in marks.items() if mark != own and pid != os.getpid()]
    used = "".join(_text_of(Path(f"/proc/{pid}/maps")) for pid in strangers)
    if any(mark not in ("", own) for mark in marks.values()):
        # Another test session runs: what its processes left can't be told from ours by a name
        # without the process id of one of ours.
        ours = [str(pid) for pid, mark in marks.items() if mark == own] + [str(os.getpid())]
        new = {name for name in new if any(f"_{pid}_" in name for pid in ours)}
    return sorted(name for name in new if f"{SHM / name}" not in used)


def _new_sockets(before: Snapshot) -> list[str]:
    new = _sockets_of(os.getpid()) - before.sockets
    ports = _listening_ports(os.getpid(), new) if new else []  # WHY: see there
    return [f"pytest itself still listens on port {port}" for port in ports]


def _sockets_of(pid: int) -> frozenset[str]:
    """Return the sockets that a process holds, as /proc names them."""
    held = set()
    with contextlib.suppress(OSError):  # the process is gone by now
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # the one that listdir itself had open
                held.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return frozenset(name for name in held if name.startswith("socket:"))


def _listening_ports(pid: int, sockets: frozenset[str]) -> list[int]:
    """Return the TCP ports that accept connections on these sockets; it takes 10 ms to look."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in _text_of(Path(f"/proc/{pid}/net/{table}")).splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # 0A is LISTEN
                found.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(found)


def _new_threads(before: Snapshot) -> list[str]:
    return [
        f"thread {thread.name!r} of pytest"
        for thread in threading.enumerate()
        if id(thread) not in before.threads and type(thread).__name__ not in _OWN_THREADS
    ]


def _list_files() -> frozenset[Path]:
    return frozenset(
        folder / name
        for folder in _WATCHED_FOLDERS
        if folder.is_dir()
        for name in os.listdir(folder)
        if not name.startswith((".", "__pycache__"))  # caches of tools
        and folder / name not in _MADE_BY_SETUP
    )


def _new_files(before: Snapshot) -> list[str]:
    return [f"file in the checkout: {path}" for path in sorted(_list_files() - before.files)]


def _changed_state(before: Snapshot) -> list[str]:
    found = []
    names = before.environment.keys() | os.environ.keys()
    for name in sorted(name for name in names if not name.startswith(_OWN_VARIABLES)):
        old, new = before.environment.get(name), os.environ.get(name)
        if old != new:
            found.append(f"environment variable {name}: was {old!r}, is {new!r}")
    if os.getcwd() != before.folder:
        found.append(f"working folder: was {before.folder}, is {os.getcwd()}")
    for number, handler in zip(_SIGNALS, before.handlers, strict=True):
        if signal.getsignal(number) != handler:
            found.append(f"handler of {number.name}: was {handler}")
    if _has_process_group():
        found.append("an initialised process group in pytest")
    return found


def _has_process_group() -> bool:
    # WHY sys.modules: most tests have no torch in pytest, and this must not import it
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
