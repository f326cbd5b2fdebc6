"""What a test leaves behind: found, named, cleared away, and counted as a failure of that test.

Owns: the snapshot before a test and the comparison after it, for processes, /dev/shm,
threads, the environment, the working folder, signal handlers, the process group and
files in the checkout. Something that is just ending gets GRACE_S; a test that is clean costs a
few milliseconds and never waits.
What goes wrong here: other programs start processes and segments at the same time. Ours are the
descendants of pytest and of the keepers of the test's ranks, as both adopt orphans.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness import ranks
from tests.harness.processes import PATIENCE, ROOT, adopt_orphans, ask, descendants_of, kill

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


class Snapshot(NamedTuple):
    """What a test must leave as it was."""

    state: dict[str, object]
    environment: dict[str, str]
    folder: str
    pids: frozenset[int]
    threads: frozenset[int]
    files: frozenset[Path]


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
    pids = frozenset(descendants_of(os.getpid(), without=ranks.SERVER_PIDS))
    threads, files = frozenset(map(id, threading.enumerate())), frozenset(_list_files())
    return Snapshot(_read_state(), dict(os.environ), os.getcwd(), pids, threads, files)


def find_leftovers(before: Snapshot, *, grace_s: float = GRACE_S) -> list[str]:
    """Say what is there that was not there before; what is ending has grace_s for that."""
    end = time.monotonic() + PATIENCE * grace_s
    now = _read_state()
    lasting = [
        f"{name}: was {before.state.get(name)!r}, is {now.get(name)!r}"
        for name in sorted(now.keys() | before.state.keys())
        if now.get(name) != before.state.get(name)
    ]
    while ending := [
        *(
            f"process {p} (parent {ask(p, 'ppid')}): {_command_of(p)[:300]}"
            for p in _our_new_pids(before)
        ),
        *(f"file {path}" for path in _our_new_files(before)),
        *_new_threads(before),
    ]:
        if time.monotonic() > end:
            break
        time.sleep(POLL_S)
    return lasting + ending


def clear_away(before: Snapshot) -> None:
    """Undo what can be undone, so that the next test starts clean."""
    end = time.monotonic() + PATIENCE * GRACE_S
    while (pids := _our_new_pids(before)) and time.monotonic() < end:
        for pid in pids:
            kill(pid)
        time.sleep(POLL_S)  # WHY: a killed process takes a moment to go
    for path in _our_new_files(before):
        if path.parent == SHM:
            path.unlink(missing_ok=True)
    os.environ.clear()
    os.environ.update(before.environment)
    os.chdir(before.folder)
    for number in _SIGNALS:
        signal.signal(number, before.state[number.name])  # type: ignore[arg-type]  # of getsignal
    if _has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()


def _read_state() -> dict[str, object]:
    """Give what only an act changes, each thing by its name."""
    variables = {
        f"environment variable {name}": value
        for name, value in os.environ.items()
        if not name.startswith(_OWN_VARIABLES)
    }
    handlers = {number.name: signal.getsignal(number) for number in _SIGNALS}
    places = {"working folder": os.getcwd(), "process group in pytest": _has_process_group()}
    return {**variables, **handlers, **places}


def _our_new_pids(before: Snapshot) -> list[int]:
    """List the new descendants of pytest and of the keepers of this test's ranks."""
    keepers = [child.keeper for child in ranks.CHILDREN]
    found = descendants_of(os.getpid(), *keepers, without=ranks.SERVER_PIDS)
    new = set(found) - before.pids
    return sorted(pid for pid in new if not any(t in _command_of(pid) for t in _OWN_TOOLS))


def _command_of(pid: int) -> str:
    return " ".join(ask(pid, "cmdline") or ())


def _our_new_files(before: Snapshot) -> list[Path]:
    """List new files in the checkout, and new segments of torch by a process of ours.

    torch names a segment by the process that made it; those of other test sessions come and go.
    """
    new = {path for path in _list_files() if path not in before.files}
    if not new:  # WHY first: looking for processes takes time
        return []
    pids_of_ranks = [child.pid for child in ranks.CHILDREN]  # also of those that ended
    keepers = [child.keeper for child in ranks.CHILDREN]
    pids = {os.getpid(), *pids_of_ranks, *descendants_of(os.getpid(), *keepers)}
    ours = tuple(f"torch_{pid}_" for pid in pids)
    return sorted(path for path in new if path.parent != SHM or path.name.startswith(ours))


def _list_files() -> Iterator[Path]:
    """List the files of the folders that are watched, and torch's segments of shared memory."""
    yield from SHM.glob("torch_*")
    for folder in filter(Path.is_dir, _WATCHED_FOLDERS):
        for name in os.listdir(folder):
            # WHY but these: they are caches of tools
            if not name.startswith((".", "__pycache__")) and folder / name not in _MADE_BY_SETUP:
                yield folder / name


def _new_threads(before: Snapshot) -> list[str]:
    return [
        f"thread {thread.name!r} of pytest"
        for thread in threading.enumerate()
        if id(thread) not in before.threads and type(thread).__name__ not in _OWN_THREADS
    ]


def _has_process_group() -> bool:
    # WHY sys.modules: most tests have no torch in pytest, and this must not import it
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())
