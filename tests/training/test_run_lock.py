"""One writer per run: who gets the lock, and from whom it is taken over."""

import json
import multiprocessing
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.checkpoint.disk import LOCK_NAME, RunLock, check_held
from hardened_ddp.checkpoint.folder import list_steps
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError, RunFolderError
from hardened_ddp.ranks.process import LockHeartbeat, this_process, with_count
from tests.forks import run_forked
from tests.harness.processes import deadline


def test_a_second_writer_is_refused_with_host_and_pid_of_the_first(tmp_path: Path) -> None:
    with closing(RunLock.acquire(tmp_path)):
        wanted = f"in use by process {os.getpid()} on host {socket.gethostname()}"

        def second() -> None:
            with pytest.raises(RunFolderError, match=wanted) as caught:
                RunLock.acquire(tmp_path)
            assert f"rm {shlex.quote(str(tmp_path / LOCK_NAME))}" in caught.value.fix

        # a loader worker that ends before its rank must not drop the lock
        assert run_forked(lambda: None) == 0
        assert run_forked(second) == 0
        second()  # nor may this process have it twice
    assert os.listdir(tmp_path) == []
    RunLock.acquire(tmp_path).close()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    def lock_and_die() -> None:
        RunLock.acquire(tmp_path)
        os._exit(0)

    assert run_forked(lock_and_die) == 0
    assert os.listdir(tmp_path) == [LOCK_NAME]
    lock = RunLock.acquire(tmp_path)
    assert json.loads((tmp_path / LOCK_NAME).read_text())["mark"]["pid"] == os.getpid()
    assert os.listdir(tmp_path) == [LOCK_NAME]
    lock.close()


def leave_lock(
    folder: Path, *, jobs: Sequence[str] = (), restart: int = 0, beats: int = 7, **mark: Any
) -> None:
    """Leave the lock of a process like this one, but for what is given."""
    body = {"mark": asdict(this_process()) | mark, "token": "theirs"}
    body |= {"jobs": list(jobs), "restart": restart, "beats": beats}
    (folder / LOCK_NAME).write_text(json.dumps(body))


@contextmanager
def beating(folder: Path) -> Iterator[None]:
    """Count up in the lock of a folder, as its holder does on another host."""
    body = json.loads((folder / LOCK_NAME).read_text())
    del body["beats"]
    (folder / LOCK_NAME).write_bytes(with_count(json.dumps(body).encode()))
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR)
    heartbeat = LockHeartbeat(descriptor, every_s=0.01)
    try:
        yield
    finally:
        heartbeat.stop()
        os.close(descriptor)


REFUSED = 7  # an exit status
DEAD_PID = 2**22 + 1  # above the highest that the kernel gives


OF_JOB = {"jobs": ["42", "agent", "agent2"], "host": "node7", "boot": "another"}
OF_JOB |= {"machine": "another"}


@pytest.mark.parametrize(
    ("mark", "asks", "is_taken"),
    [
        ({"pid": DEAD_PID}, {}, True),
        ({"started": "1"}, {}, True),  # the pid was used again
        ({"boot": "another"}, {}, True),  # this host was started again: no heartbeat since
        ({"boot": "another", "beats": 0}, {}, False),  # its holder could not count
        ({"boot": "another", "machine": "another"}, {}, False),  # a host of the same name
        ({}, {}, False),
        ({"boot": "another", "host": "node7"}, {}, False),  # can't be seen from here
        ({"boot": "another", "host": "node7", "pid": DEAD_PID}, {}, False),
        ({"namespace": "pid:[1]", "pid": 1, "started": "1"}, {}, True),  # a container that ended
        # A job that was started again elsewhere. Of an elastic one, counts of nodes differ.
        (OF_JOB, {"jobs": ["42", "agent"]}, True),
        (OF_JOB, {"jobs": ["agent"], "restart": 1}, True),
        (OF_JOB, {"jobs": ["43"], "restart": 1}, False),
        (OF_JOB, {"restart": 1}, False),
        # No heartbeat there: then the count of starts decides.
        ({**OF_JOB, "beats": 0}, {"jobs": ["42"], "restart": 1}, True),
        ({**OF_JOB, "beats": 0}, {"jobs": ["42"]}, False),
    ],
)
def test_a_lock_is_taken_over_from_the_dead_or_the_same_job(
    tmp_path: Path, mark: dict[str, Any], asks: dict[str, Any], is_taken: bool
) -> None:
    leave_lock(tmp_path, **mark)
    if is_taken:
        RunLock.acquire(tmp_path, silent_after_s=0.3, **asks).close()
        assert os.listdir(tmp_path) == []
    else:
        host = mark.get("host", socket.gethostname())
        with pytest.raises(RunFolderError, match=rf"in use by process \d+ on host {host}"):
            RunLock.acquire(tmp_path, silent_after_s=0.3, **asks)
        assert os.listdir(tmp_path) == [LOCK_NAME]


def test_a_live_process_in_another_container_keeps_its_lock(tmp_path: Path) -> None:
    with closing(RunLock.acquire(tmp_path)) as lock:
        body = json.loads(lock.path.read_text())
        body["mark"] |= {"namespace": "pid:[1]", "pid": DEAD_PID}
        del body["beats"]
        lock.path.write_bytes(with_count(json.dumps(body).encode(), 1))

        def second() -> None:
            with pytest.raises(RunFolderError, match="in use by process"):
                RunLock.acquire(tmp_path)

        assert run_forked(second) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mark", [{"host": "node7", "machine": "another"}, {}])
def test_a_heartbeat_keeps_a_lock_against_all_else(tmp_path: Path, mark: dict[str, Any]) -> None:
    leave_lock(tmp_path, jobs=["42"], boot="another", **mark)
    with beating(tmp_path), pytest.raises(RunFolderError, match=r"in use by process|is locking"):
        RunLock.acquire(tmp_path, jobs=["42"], restart=1, silent_after_s=1.5)


def test_a_holder_counts_up_and_its_lock_stays_readable(tmp_path: Path) -> None:
    leave_lock(tmp_path)
    seen: set[int] = set()
    with beating(tmp_path):
        end = deadline(20)
        while len(seen) < 5 and time.monotonic() < end:
            body = json.loads((tmp_path / LOCK_NAME).read_bytes())
            assert body["token"] == "theirs"
            seen.add(body["beats"])
    assert len(seen) == 5
    assert 0 not in seen


def test_a_process_that_lost_its_lock_when_stopped_commits_no_checkpoint(tmp_path: Path) -> None:
    with closing(RunLock.acquire(tmp_path)) as lock:
        store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
        store.before_commit.append(lambda: check_held(tmp_path, lock.token))
        store.write(1, tensors={"weight": torch.ones(2)}, meta={})
        leave_lock(tmp_path)
        with pytest.raises(CheckpointError, match="another attempt took over"):
            store.write(2, tensors={"weight": torch.ones(2)}, meta={})
        assert list_steps(store.root) == [1]
        # A surviving rank may save when the rank that held the lock has left and released it.
        (tmp_path / LOCK_NAME).unlink()
        store.write(2, tensors={"weight": torch.ones(2)}, meta={})
        assert list_steps(store.root) == [2, 1]


def test_a_lock_that_cannot_be_read_is_nobodys_to_break(tmp_path: Path) -> None:
    for content in ("", "{", "[]", '{"mark": {"pid": 1}}', "null", "[" * 100_000):
        (tmp_path / LOCK_NAME).write_text(content)
        with pytest.raises(RunFolderError, match="can't be read as a lock") as caught:
            RunLock.acquire(tmp_path)
        assert "rm " in caught.value.fix


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / LOCK_NAME).symlink_to("precious")
    with pytest.raises(RunFolderError):
        RunLock.acquire(tmp_path)
    assert (tmp_path / "precious").read_text() == "x"


def test_a_lock_that_somebody_else_took_is_not_removed_by_closing(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    (tmp_path / LOCK_NAME).write_text("theirs")
    lock.close()
    lock.close()
    assert (tmp_path / LOCK_NAME).read_text() == "theirs"


def test_of_many_that_find_a_dead_lock_one_gets_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        leave_lock(tmp_path, pid=DEAD_PID)
        begin, end = context.Barrier(4), context.Barrier(4)

        def take(begin: Any = begin, end: Any = end) -> None:
            begin.wait(60)
            try:
                RunLock.acquire(tmp_path)
            except RunFolderError:
                end.wait(60)
                os._exit(REFUSED)
            end.wait(60)  # WHY: the winner lives until all have tried

        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(run_forked, [take] * 4)) == [0, *[REFUSED] * 3]
        (tmp_path / LOCK_NAME).unlink(missing_ok=True)
