"""The folder of a run: its name, the trial of it, and the lock in it."""

import json
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.checkpoint.files import CheckpointStore
from hardened_ddp.checkpoint.folder import create_run_folder, newest_run, probe_folder
from hardened_ddp.checkpoint.lock import LOCK_NAME, RunLock
from hardened_ddp.checkpoint.process import is_gone, is_pid_gone, this_process
from hardened_ddp.errors import RunFolderError
from tests.forks import run_forked

NOW = datetime(2031, 2, 3, 4, 5, 6)
REFUSED = 7


def create(output: Path, run_name: str = "", *, model: str = "simple_cnn") -> Path:
    return create_run_folder(output, model=model, dataset="digits", run_name=run_name, now=NOW)


def test_a_generated_name_says_when_and_what_and_is_never_taken_twice(tmp_path: Path) -> None:
    names = [create(tmp_path / "deep" / "runs").name for _ in range(3)]
    first = "20310203-040506-simple_cnn-digits"
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_an_import_path_becomes_a_part_of_a_name(tmp_path: Path) -> None:
    name = create(tmp_path, model="../my.package:Model v2/../..").name
    assert name == "20310203-040506-my.package-Model-v2-digits"


def test_a_given_name_is_taken_or_numbered(tmp_path: Path) -> None:
    assert create(tmp_path, "mine").name == "mine"
    assert create(tmp_path, "mine").name == "mine-2"
    (tmp_path / "linked").symlink_to(tmp_path / "mine")
    (tmp_path / "file").write_text("x")
    assert create(tmp_path, "linked").name == "linked-2"
    assert create(tmp_path, "file").name == "file-2"


@pytest.mark.parametrize(
    "name", ["../out", "/etc/x", "a/b", "..", ".", ".hidden", "-rf", "a\nb", "a b", "x" * 101, "\0"]
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    output = tmp_path / "runs"
    with pytest.raises(RunFolderError, match="run_name"):
        create(output, name)
    assert not output.exists()


def test_an_output_folder_may_be_a_link_to_a_bigger_disk(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    assert create(tmp_path / "runs", "mine") == (tmp_path / "scratch" / "mine").resolve()


def test_processes_that_start_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "runs"
    go, start = os.pipe()
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            os.close(start)
            os.read(go, 1)  # all start when the parent closes the pipe
            create(output, "x")
            os._exit(0)
        pids.append(pid)
    os.close(start)
    os.close(go)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0, 0]
    assert sorted(os.listdir(output)) == ["x", "x-2", "x-3", "x-4"]


def test_the_newest_run_is_the_one_whose_checkpoints_changed_last(tmp_path: Path) -> None:
    assert newest_run(tmp_path / "nowhere") is None
    runs = {name: create(tmp_path, name) for name in ("a", "b", "empty", "z")}
    assert newest_run(tmp_path) is None
    for index, name in enumerate(("b", "a", "z")):
        store = CheckpointStore(runs[name] / "checkpoints", keep_last=1)
        store.write(1, tensors={"model.w": torch.zeros(1)}, meta={})
        os.utime(store.root, (index, index))
    (tmp_path / "linked").symlink_to(runs["b"])
    assert newest_run(tmp_path) == runs["z"]
    os.utime(runs["a"] / "checkpoints", (100, 100))
    assert newest_run(tmp_path) == runs["a"]


def test_a_folder_that_can_be_used_is_left_as_it_was(tmp_path: Path) -> None:
    probe_folder(tmp_path / "new" / "run")
    probe_folder(tmp_path / "new" / "run")
    assert os.listdir(tmp_path / "new" / "run") == []


def test_a_folder_that_cannot_be_used_is_known_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="Not a directory"):
        probe_folder(tmp_path / "file" / "run")
    with pytest.raises(RunFolderError, match="can't be used"):
        probe_folder(Path("/proc/here"))
    (tmp_path / "linked").symlink_to(tmp_path)
    with pytest.raises(RunFolderError, match="symbolic link"):
        probe_folder(tmp_path / "linked")
    with pytest.raises(RunFolderError, match="can't be used"):
        create(Path("/proc/here"))


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes somebody else for this")
def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o755)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(parent.stat().st_mode | 0o055)

    def probe_as_nobody() -> None:
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(RunFolderError, match="Permission denied"):
            probe_folder(folder)

    assert run_forked(probe_as_nobody) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    with pytest.raises(RunFolderError, match="belongs to user 65534"):
        probe_folder(folder)
    assert os.listdir(folder) == []


# --- the lock ------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_with_host_and_pid_of_the_first(tmp_path: Path) -> None:
    with RunLock.acquire(tmp_path):
        wanted = f"in use by process {os.getpid()} on host {socket.gethostname()}"

        def second() -> None:
            with pytest.raises(RunFolderError, match=wanted) as caught:
                RunLock.acquire(tmp_path)
            assert f"rm {tmp_path / LOCK_NAME}" in caught.value.fix

        assert run_forked(second) == 0
        second()  # nor may this process have it twice
    assert os.listdir(tmp_path) == []
    RunLock.acquire(tmp_path).release()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    def lock_and_die() -> None:
        RunLock.acquire(tmp_path)
        os._exit(0)

    assert run_forked(lock_and_die) == 0
    assert os.listdir(tmp_path) == [LOCK_NAME]
    lock = RunLock.acquire(tmp_path)
    assert json.loads((tmp_path / LOCK_NAME).read_text())["mark"]["pid"] == os.getpid()
    assert os.listdir(tmp_path) == [LOCK_NAME]
    lock.release()


def test_a_lock_lives_as_long_as_its_process_even_if_that_was_forked(tmp_path: Path) -> None:
    """A loader worker that outlives its rank must not keep the lock, nor drop it by ending."""
    with RunLock.acquire(tmp_path) as lock:
        assert run_forked(lambda: None) == 0

        def second() -> None:
            with pytest.raises(RunFolderError):
                RunLock.acquire(tmp_path)

        assert run_forked(second) == 0
        assert lock.path.exists()


def leave_lock(folder: Path, *, job: str = "", restart: int = 0, **mark: Any) -> None:
    """Leave the lock of a process like this one, but for what is given."""
    RunLock.acquire(folder, job=job, restart=restart).path.unlink()
    here = this_process()
    fields = {name: getattr(here, name) for name in ("host", "pid", "started", "boot", "namespace")}
    body = {"mark": fields | mark, "job": job, "restart": restart}
    (folder / LOCK_NAME).write_text(json.dumps(body))


DEAD_PID = 2**22 + 1  # above the highest that the kernel gives


@pytest.mark.parametrize(
    ("mark", "is_taken"),
    [
        ({"pid": DEAD_PID}, True),
        ({"started": "1"}, True),  # the pid was used again
        ({"boot": "another"}, True),  # this host was started again
        ({}, False),
        ({"boot": "another", "host": "node7"}, False),  # can't be seen from here
        ({"boot": "another", "host": "node7", "pid": DEAD_PID}, False),
        ({"namespace": "pid:[1]", "pid": 1, "started": "1"}, True),  # a container that ended
    ],
)
def test_a_lock_is_taken_over_only_from_a_process_known_to_be_dead(
    tmp_path: Path, mark: dict[str, Any], is_taken: bool
) -> None:
    leave_lock(tmp_path, **mark)
    if is_taken:
        RunLock.acquire(tmp_path).release()
        assert os.listdir(tmp_path) == []
    else:
        with pytest.raises(RunFolderError, match="in use by process"):
            RunLock.acquire(tmp_path)
        assert os.listdir(tmp_path) == [LOCK_NAME]


def test_a_live_process_in_another_container_keeps_its_lock(tmp_path: Path) -> None:
    with RunLock.acquire(tmp_path) as lock:
        body = json.loads(lock.path.read_text())
        body["mark"] |= {"namespace": "pid:[1]", "pid": DEAD_PID}
        lock.path.write_text(json.dumps(body))

        def second() -> None:
            with pytest.raises(RunFolderError, match="in use by process"):
                RunLock.acquire(tmp_path)

        assert run_forked(second) == 0


@pytest.mark.parametrize(
    ("job", "restart", "is_taken"),
    [("42", 1, True), ("42", 0, False), ("43", 1, False), ("", 1, False)],
)
def test_a_job_that_was_started_again_elsewhere_gets_its_lock_back(
    tmp_path: Path, job: str, restart: int, is_taken: bool
) -> None:
    leave_lock(tmp_path, job="42", restart=0, host="node7", boot="another")
    if is_taken:
        RunLock.acquire(tmp_path, job=job, restart=restart).release()
    else:
        with pytest.raises(RunFolderError, match="node7"):
            RunLock.acquire(tmp_path, job=job, restart=restart)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"mark": {"pid": 1}}', "null"])
def test_a_lock_that_cannot_be_read_is_nobodys_to_break(tmp_path: Path, content: str) -> None:
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


def test_a_lock_that_somebody_else_took_is_not_removed_by_release(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    (tmp_path / LOCK_NAME).write_text("theirs")
    lock.release()
    lock.release()
    assert (tmp_path / LOCK_NAME).read_text() == "theirs"


def test_of_many_that_find_a_dead_lock_one_gets_it(tmp_path: Path) -> None:
    for _ in range(5):
        leave_lock(tmp_path, pid=DEAD_PID)
        go, start = os.pipe()
        done, stay = os.pipe()
        pids = []
        for _ in range(4):
            pid = os.fork()
            if pid == 0:
                os.close(start)
                os.close(stay)
                os.read(go, 1)  # all start when the parent closes the pipe
                try:
                    RunLock.acquire(tmp_path)
                except RunFolderError:
                    os._exit(REFUSED)
                os.read(done, 1)  # WHY: the winner lives until all have tried
                os._exit(0)
            pids.append(pid)
        for end in (start, go, done):
            os.close(end)
        losers = [os.waitpid(-1, 0) for _ in range(3)]
        os.close(stay)
        winner = os.waitpid(-1, 0)
        statuses = [os.waitstatus_to_exitcode(status) for _, status in (*losers, winner)]
        assert sorted(pid for pid, _ in (*losers, winner)) == sorted(pids)
        assert statuses == [REFUSED, REFUSED, REFUSED, 0]
        (tmp_path / LOCK_NAME).unlink()


def test_a_zombie_counts_as_gone_and_a_stranger_as_unknown() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet collected
    assert is_pid_gone(pid, started="0")
    os.waitpid(pid, 0)
    here = this_process()
    assert is_gone(here) is False
    assert here.started.isdigit()
    assert here.boot
