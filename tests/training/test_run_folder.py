"""The folder of a run: its name, whether it can be used, and that no link leads out of it."""

import errno
import json
import multiprocessing
import os
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hardened_ddp.checkpoint.disk import Disk, RunLock, refuse_links
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import RunFolderError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.reporting.events import Events
from hardened_ddp.reporting.goodput import Goodput
from hardened_ddp.reporting.resources import read_gpu_mib
from hardened_ddp.reporting.sinks import FileSink, write_text
from hardened_ddp.reporting.status_writer import StatusWriter, Work
from hardened_ddp.training import run_report
from hardened_ddp.training.run_folder import RunFolder, create_run_folder, find_place
from tests.checkpoint_states import write_step
from tests.forks import give_up_privileges, run_forked
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
