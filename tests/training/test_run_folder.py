"""The folder of a run: its name, whether it can be used, its links; and one writer per run.

Who gets the lock of a run, and from whom it is taken over.
"""

import errno
import json
import multiprocessing
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hardened_ddp.checkpoint.disk import LOCK_NAME, Disk, RunLock, check_held, refuse_links
from hardened_ddp.checkpoint.folder import list_steps
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError, RunFolderError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.ranks.process import LockHeartbeat, this_process, with_count
from hardened_ddp.reporting.events import Events
from hardened_ddp.reporting.goodput import Goodput
from hardened_ddp.reporting.resources import read_gpu_mib
from hardened_ddp.reporting.sinks import FileSink, write_text
from hardened_ddp.reporting.status_writer import StatusWriter, Work
from hardened_ddp.training import run_report
from hardened_ddp.training.run_folder import RunFolder, create_run_folder, find_place
from tests.checkpoint_states import write_step
from tests.forks import give_up_privileges, run_forked
from tests.harness.processes import deadline
from tests.harness.ranks import start_training, train
from tests.run_folder import only_run
from tests.settings.given import make_run, problems_of, settings_of

NOW = datetime(2031, 2, 3, 4, 5, 6)


def create(output: Path, run_name: str = "", *, model: str = "simple_cnn") -> Path:
    config: Any = SimpleNamespace(
        run=SimpleNamespace(output_dir=str(output), run_name=run_name),
        model=SimpleNamespace(model=model),
        data=SimpleNamespace(dataset="digits"),
    )
    return create_run_folder(config, now=NOW)


def test_a_generated_name_says_when_and_what_and_is_never_taken_twice(tmp_path: Path) -> None:
    names = [create(tmp_path / "deep" / "runs").name for _ in range(3)]
    first = "20310203-040506-simple_cnn-digits"
    assert names == [first, f"{first}-2", f"{first}-3"]
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
    "name", ["../out", "/etc/x", "a/b", "..", ".", ".hidden", "-rf", "a\nb", "a b", "x" * 129, "\0"]
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    [problem] = problems_of(f"--run_name={shlex.quote(name)}")
    assert problem.startswith("--run_name: found")


def test_processes_that_start_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "runs"
    begin = multiprocessing.get_context("fork").Barrier(4)

    def start() -> None:
        begin.wait(60)
        create(output, "x")

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(run_forked, [start] * 4)] == [0, 0, 0, 0]
    assert sorted(os.listdir(output)) == ["x", "x-2", "x-3", "x-4"]


def assert_resumes(flags: str, run: Path) -> None:
    settings = settings_of(flags)
    folder, choose = find_place(settings, None)
    assert folder == settings.run_folder == run
    assert choose() is not None


@pytest.mark.parametrize("name", ["step-5", "step-000000005.partial", "state.pt"])
def test_settings_and_checkpoint_come_from_the_newest_run_wherever_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, other = make_run("run", step=None), make_run("other", step=None)
    write_step(CheckpointStore(run / "checkpoints", keep_last=1), 1)
    (other / "checkpoints" / name).mkdir()  # no checkpoint
    (tmp_path / "runs" / "third").mkdir()
    (tmp_path / "runs" / "third" / "checkpoints").touch()
    os.utime(run / "checkpoints", (1, 1))
    assert_resumes("--resume newest", run)
    monkeypatch.chdir(run / "checkpoints")
    assert_resumes("--resume step-000000001", tmp_path / run)
    monkeypatch.chdir(tmp_path)
    Path("runs").rename("checkpoints")
    assert_resumes("--output_dir checkpoints --resume checkpoints/run", Path("checkpoints/run"))


def test_a_folder_that_cannot_be_used_is_known_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="Not a directory"):
        create(tmp_path / "file" / "run")
    with pytest.raises(RunFolderError, match="can't be used"):
        RunLock.acquire(Path("/proc/sys"))
    (tmp_path / "linked").symlink_to(tmp_path)
    with pytest.raises(RunFolderError, match="symbolic link"):
        refuse_links(tmp_path / "linked")
    with pytest.raises(RunFolderError, match="can't be used"):
        create(Path("/proc/here"))


@pytest.mark.parametrize("mode", [0o555, 0o000])
@pytest.mark.parametrize("name", ["locked", "locked/runs"])
def test_a_folder_nobody_may_write_to_is_refused(name: str, mode: int, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(mode)

    def use_without_rights() -> None:
        give_up_privileges()
        for use in (create, RunLock.acquire) if name == "locked" else (create,):
            with pytest.raises(RunFolderError, match="Permission denied"):
                use(tmp_path / name)

    assert run_forked(use_without_rights) == 0
    (tmp_path / "locked").chmod(0o755)


def on_a_gpu(num_classes: int) -> torch.nn.Module:
    """Build a model, in a process that reads figures of a GPU."""
    run_report.read_gpu_mib = lambda device: (3.0, 1.0)  # type: ignore[assignment]
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))


def test_a_run_tells_its_gpus_memory_and_a_refusal_leaves_its_settings(tmp_path: Path) -> None:
    argv: list[str | Path] = ["--cpu_only", "--max_steps", "2", "--no_tensorboard"]
    argv += ["--model", "tests.training.test_run_folder:on_a_gpu"]
    argv += ["--run_name", "run", "--output_dir", tmp_path]
    train(argv).ok()
    status = json.loads((tmp_path / "run" / "status" / "rank-0.json").read_text())
    assert (status["gpu_mib"], status["gpu_peak_mib"]) == (3.0, 1.0)  # of its last report
    settings = (tmp_path / "run" / "config.yaml").read_text()
    refused = train([*argv, "--model", "mlp"])
    assert "[DDP-K02] the checkpoint of step 2 belongs to another run" in refused.output
    assert (tmp_path / "run" / "config.yaml").read_text() == settings
    train(["--resume", tmp_path / "run", "--max_steps", "3"]).ok()


def test_a_full_disk_keeps_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    (tmp_path / "config.yaml").write_text("epochs: 7")
    lock = RunLock.acquire(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    with RunFolder(tmp_path, store, None, lock, None, Events()) as folder:
        monkeypatch.setattr(Disk, "write", mock.Mock(side_effect=full))
        with pytest.raises(RunFolderError, match="No space left"):
            folder.write_settings(settings_of("train"))
    assert (tmp_path / "config.yaml").read_text() == "epochs: 7"


ARGV = ["--cpu_only", "--max_steps", "2", "--eval_every", "0", "--ledger", "--num_workers", "0"]


def plant(run: Path, name: str, target: Path) -> Path:
    """Put a link to target in the place of a file or folder of the run."""
    link = run / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    return link


@pytest.mark.parametrize("name", ["run.lock", "status", "ledger/0002-rank-0.bin", "checkpoints"])
def test_a_link_in_a_run_folder_is_named(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    refuse_links(run)
    link = plant(run, name, tmp_path / "victim")
    with pytest.raises(RunFolderError, match=r"is a symbolic link to .*victim") as caught:
        refuse_links(run)
    assert str(link) in str(caught.value)


def test_a_run_with_a_link_in_its_folder_does_not_start_nor_wait_for_ranks(tmp_path: Path) -> None:
    train([*ARGV, "--output_dir", tmp_path / "runs"]).ok()
    trained, victim = only_run(tmp_path / "runs"), tmp_path / "victim"
    victim.write_text("years of work")
    link = plant(trained, "metrics.jsonl", victim)
    for missing in (0, 1):
        with start_training([*ARGV, "--resume", trained], 2, missing=missing) as running:
            finished = running.wait(40)
        assert all(finished.statuses)
        assert finished.output.count(f"{link} is a symbolic link to {victim}") == 1
        assert "Traceback" not in finished.output
        assert "DDP-K03" in finished.outputs[0]
    assert victim.read_text() == "years of work"


def test_a_link_above_the_run_folder_and_those_of_other_programs_are_fine(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "scratch")
    run = create(tmp_path / "home" / "runs", "run")
    assert run == tmp_path / "scratch" / "runs" / "run"
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to("run-1")
    for path in (run, tmp_path / "home" / "runs" / "run"):
        refuse_links(path)
        RunLock.acquire(path).close()
        write_step(CheckpointStore(path / "checkpoints", keep_last=1), 1)


def test_a_link_that_is_put_there_during_the_run_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    for name in ("a", "attempts.jsonl", "status/rank-0.json"):
        plant(tmp_path, name, victim)
    sink = FileSink(tmp_path / "a", keep_bytes=100)
    sink.add(b"mine")
    assert not sink.flush()
    for mode in ("w", "a"):
        with pytest.raises(OSError, match="symbolic link"):
            write_text(tmp_path / "a", "mine", mode=mode)
    Goodput(tmp_path, Tracker(), Launch(), step=0).note(0, is_last=True)
    with StatusWriter(tmp_path, Group(Launch(), torch.device("cpu"))):
        pass
    assert victim.read_text() == "years of work"


def test_only_the_main_thread_asks_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch keeps the GIL for it, and may wait for what a stuck main thread holds in the driver.
    group = Group(Launch(), torch.device("cpu"))
    status = StatusWriter(tmp_path, group)
    group.tracker.start_at(0)
    group.tracker.enter(Phase.FORWARD)
    group.device = torch.device("cuda", 0)
    main, asked = threading.current_thread(), []
    for name, figure in (("memory_reserved", 3 * 2**20), ("max_memory_allocated", 2**20)):
        ask = lambda _, n=figure: asked.append(threading.current_thread()) or n  # noqa: E731
        monkeypatch.setattr(torch.cuda, name, ask)
    found = read_gpu_mib(group.device)
    assert found == (3.0, 1.0)
    status.attach(Work(gpu_mib=lambda: found))
    with status:
        pass
    written = json.loads((tmp_path / "status" / "rank-0.json").read_text())
    assert (written["gpu_mib"], written["gpu_peak_mib"]) == (3.0, 1.0)
    assert set(asked) == {main}


def test_speed_is_that_since_the_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(Launch(), torch.device("cpu"))
    status, wall_s = StatusWriter(tmp_path, group), [0.0] * len(Phase)
    monkeypatch.setattr(group.tracker, "wall_s", lambda: wall_s)
    status.attach(Work(global_batch=4))
    speeds = []
    for step in (100, 110, 120, 20, 30, 40):
        wall_s[Phase.FORWARD] += 2
        group.tracker.start_at(step)
        speeds.append(status.read().samples_per_s)
    assert speeds == [0, 20, 20, 0, 20, 20]


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


def leave_lock(folder: Path, *, jobs: Sequence[str] = (), beats: int = 7, **mark: Any) -> None:
    """Leave the lock of a process like this one, but for what is given."""
    body = {"mark": asdict(this_process()) | mark, "token": "theirs"}
    body |= {"jobs": list(jobs), "restart": 0, "beats": beats}
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
        with closing(RunLock.acquire(tmp_path, silent_after_s=0.3, **asks)):
            body = json.loads((tmp_path / LOCK_NAME).read_text())
            assert body["mark"]["pid"] == os.getpid()
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
