"""What a test leaves behind: found, named, cleared away, and counted as a failure of that test.

Owns: the snapshot before a test and the comparison after it, for processes, /dev/shm,
threads, the environment, the working folder, signal handlers, the process group and
files in the checkout. Something that is just ending gets GRACE_S; a test that is clean costs a
few milliseconds and never waits.
What goes wrong here: other programs start processes and segments at the same time. Ours are the
descendants of pytest and of the keepers of the test's ranks, as both adopt orphans.
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
    adopt_orphans,
    descendants_of,
    kill,
    list_pids,
    read_command_line,
    read_process,
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
_OWN_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TF_CPP_")
_OWN_VARIABLES += ("CUDA_MODULE_LOADING",)  # some versions of torch, at the first use of a GPU
_OWN_THREADS = ("_DummyThread", "TMonitor")  # C++ threads that ran Python; tqdm's one per process


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of everything that a test must leave as it was."""

    pids: frozenset[int]
    segments: frozenset[str]
    threads: frozenset[int]
    files: frozenset[Path]
    environment: dict[str, str]
    folder: str
    handlers: tuple[object, ...]


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves something behind, and clear that away for the next one."""
    adopt_orphans()
    before = take_snapshot()
    yield
    ranks.release_ports()
    still_running = [f"rank still running: process {pid}" for pid in ranks.kill_running()]
    leftovers = still_running + find_leftovers(before)
    if leftovers:
        clear_away(before)
    ranks.forget_ranks()
    if leftovers:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leftovers), pytrace=False)


def take_snapshot() -> Snapshot:
    """Note what is there now."""
    return Snapshot(
        pids=frozenset(descendants_of(os.getpid(), without=ranks.server_pids())),
        segments=_list_segments(),
        threads=frozenset(id(thread) for thread in threading.enumerate()),
        files=_list_files(),
        environment=dict(os.environ),
        folder=os.getcwd(),
        handlers=tuple(map(signal.getsignal, _SIGNALS)),
    )


def find_leftovers(before: Snapshot, *, grace_s: float = GRACE_S) -> list[str]:
    """Say what is there that was not there before; what is ending has grace_s for that."""
    end = time.monotonic() + PATIENCE * grace_s
    new_files = sorted(_list_files() - before.files)
    lasting = [*_changed_state(before), *(f"file in the checkout: {path}" for path in new_files)]
    while ending := [
        *map(_describe_process, _our_new_pids(before)),
        *(f"shared memory {SHM / name}" for name in _unused_new_segments(before)),
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


def _our_new_pids(before: Snapshot) -> list[int]:
    """List the new descendants of pytest and of the keepers of this test's ranks."""
    found = descendants_of(os.getpid(), *ranks.keepers(), without=ranks.server_pids())
    new = set(found) - before.pids
    return sorted(pid for pid in new if not any(t in read_command_line(pid) for t in _OWN_TOOLS))


def _describe_process(pid: int) -> str:
    process = read_process(pid)
    parent = process.parent if process else "gone"
    return f"process {pid} (parent {parent}): {read_command_line(pid)[:300]}"


def _list_segments() -> frozenset[str]:
    return frozenset(os.listdir(SHM)) if SHM.is_dir() else frozenset()


def _unused_new_segments(before: Snapshot) -> list[str]:
    """List new segments of torch by a process of ours, which no other process works with.

    torch names a segment by the process that made it; those of other test sessions come and go.
    """
    new = {name for name in _list_segments() - before.segments if name.startswith("torch_")}
    if not new:  # WHY first: looking into all processes is slow
        return []
    ours = {os.getpid(), *ranks.rank_pids(), *descendants_of(os.getpid(), *ranks.keepers())}
    new = {name for name in new if any(name.startswith(f"torch_{pid}_") for pid in ours)}
    others = list_pids() - {os.getpid()}
    for pid in others:
        with contextlib.suppress(OSError):  # the process is gone by now, or another user's
            used = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            new = {name for name in new if f"{SHM / name}" not in used}
    return sorted(new)


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
