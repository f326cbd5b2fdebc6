"""No step is lost while one rank lives: the others save, and a restart goes on at the next step."""

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hardened_ddp import errors
from hardened_ddp.errors import CrashLoopError, HangError, PeerLostError, StepError
from hardened_ddp.guard import stop as stop_module
from hardened_ddp.guard.stop import LastResort, seconds_of
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.step.progress import Progress
from hardened_ddp.step.step import Live
from hardened_ddp.training import run as run_module
from hardened_ddp.training import survivor_save
from hardened_ddp.training.run import hang_subject
from hardened_ddp.training.state import Saver
from hardened_ddp.training.survivor_save import read_failures, refuse_crash_loop, save_as_survivor
from tests.harness.processes import is_alive, kill, wait_until
from tests.harness.ranks import Finished, run_program, start_program, start_training, train
from tests.marks import Undisturbed
from tests.run_folder import is_past, last_step, last_tensors, only_run, read_summary, saved_step

# No checkpoint before the end: what there is after a fault was saved because of it.
BARE: list[str | Path] = ["--cpu_only", "--batch_size", "16", "--epochs", "2", "--eval_every", "0"]
BARE += ["--model", "tests.plugins:paced"]
BARE += ["--num_workers", "0", "--checkpoint_every_steps", "0", "--log_interval", "1"]
POINTS: list[str | Path] = ["--dataset", "tests.plugins:points", "--cpu_only", "--batch_size", "2"]
POINTS += ["--log_interval", "1", "--checkpoint_every_steps", "0", "--eval_every", "0"]
POINTS += ["--model", "tests.plugins:Faulty", "--model_args", "{kind: raise, rank: 0, first: 3}"]
RETRY = PeerLostError.exit_status
"""The exit status of a rank that lost another one."""


def run(output: Path, world_size: int, *flags: str) -> Finished:
    return train([*BARE, *flags, "--output_dir", output], world_size)


@pytest.mark.parametrize(
    ("world_size", "victim", "flags"),
    [(2, 1, ()), pytest.param(3, 0, ("--no_shared_memory",), marks=pytest.mark.slow)],
    ids=str,
)
def test_the_ranks_that_are_left_save_the_step_before_a_kill(
    world_size: int, victim: int, flags: tuple[str, ...], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    argv = [*BARE, *flags, "--output_dir", tmp_path]
    with start_training(argv, world_size) as running:
        running.wait_for(lambda: is_past(tmp_path, 20), timeout_s=60, what="20 steps")
        running.kill(victim)
        finished = running.wait(40)
    assert finished.statuses[victim] == -signal.SIGKILL
    assert {s for rank, s in enumerate(finished.statuses) if rank != victim} == {RETRY}
    saved = saved_step(tmp_path)
    assert f"the state after step {saved} is saved" in finished.output
    if victim != 0:  # rank 0 writes the metrics: it knows the last step that was done
        assert saved >= last_step(tmp_path)
    assert [failure["step"] for failure in read_failures(only_run(tmp_path))] == [saved]
    resumed = run(tmp_path, world_size, *flags, "--resume", "newest").ok()
    assert f"from step {saved}\n" in resumed.outputs[0]
    assert last_tensors(tmp_path) == undisturbed(world_size, *flags)


@pytest.mark.slow
def test_three_failures_at_one_step_end_the_restarts_and_name_the_samples(tmp_path: Path) -> None:
    argv = ["torchrun", "--standalone", "--nproc_per_node=2", "--max_restarts=6"]
    argv += ["ddp_training.py", *map(str, POINTS)]
    completed = run_program([*argv, "--output_dir", tmp_path], timeout_s=120)
    assert completed.status != 0
    # The fourth attempt refuses, and ends torchrun itself: three restarts of six are not used up.
    assert len(read_failures(only_run(tmp_path))) == 3
    assert completed.output.count("resuming") <= 3
    assert "DDP-S04" in completed.output
    assert "Its samples: [" in completed.output


def test_ranks_of_a_killed_torchrun_save_and_leave(tmp_path: Path) -> None:
    argv = ["torchrun", "--standalone", "--nproc_per_node=2", "ddp_training.py", *map(str, BARE)]
    argv += ["--epochs", "1000", "--output_dir", str(tmp_path)]
    with start_program(argv) as command:
        command.wait_for(lambda: is_past(tmp_path, 5), timeout_s=60, what="5 steps")
        ranks = [pid for rank in (0, 1) if (pid := command.pid_of_rank(rank)) is not None]
        assert len(ranks) == 2
        kill(command.pid)
        wait_until(lambda: not any(map(is_alive, ranks)), 30, f"the end of {ranks}")
    summary = read_summary(only_run(tmp_path))
    assert summary["status"] == "stopped"
    assert saved_step(tmp_path) == summary["step"]


@pytest.mark.slow
def test_the_time_limit_stops_a_run_that_can_go_on(tmp_path: Path) -> None:
    argv = ["python", "ddp_training.py", *map(str, BARE), "--epochs", "100000"]
    argv += ["--time_limit", "4s", "--output_dir", str(tmp_path)]
    completed = run_program(argv, timeout_s=60).ok()
    assert "time_limit: stopping at step" in completed.output
    summary = read_summary(only_run(tmp_path))
    assert summary["status"] == "stopped"
    assert saved_step(tmp_path) == summary["step"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("3h55m", 14100), ("1d12h", 129600), ("1.5h", 5400)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def fake_stepper(
    *, is_at_boundary: bool = True, is_finite: bool = True, step: int = 5, attempt: int = 0
) -> Any:
    """Make a stepper at a step boundary or within an update, whose losses were numbers or not."""
    live = Live(is_at_boundary=is_at_boundary)
    group = Group(Launch(attempt=attempt), torch.device("cpu"))
    found = mock.Mock(parts=SimpleNamespace(group=group), live=live, progress=Progress(step=step))
    found.configure_mock(device=None, is_finite=lambda: is_finite)
    found.gradient.lost.return_value = []
    return found


def save_after(error: Exception, folder: Path, stepper: Any = None, saver: Any = None) -> Any:
    saver = saver or mock.Mock()
    save_as_survivor(error, stepper or fake_stepper(), saver, folder)
    return saver.save_in_need


@pytest.mark.parametrize(
    ("error", "stepper"),
    [
        (errors.NonFiniteError("nan"), fake_stepper()),
        (errors.CheckpointError("disk"), fake_stepper()),
        (CrashLoopError("again"), fake_stepper()),
        (StepError("torn"), fake_stepper(is_at_boundary=False)),
        (PeerLostError("after a nan"), fake_stepper(is_finite=False)),
        (StepError("nothing was done"), fake_stepper(step=0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_torn_or_empty_is_saved(error: Exception, stepper: Any, tmp_path: Path) -> None:
    assert not save_after(error, tmp_path, stepper).called
    assert save_after(StepError("no"), tmp_path).called


def test_a_save_that_fails_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = mock.Mock(**{"save_in_need.side_effect": OSError("no disk")})
    save_after(StepError("first"), tmp_path, saver=saver)
    assert "could not be saved" in caplog.text
    assert read_failures(tmp_path)[0]["error"] == "first"


def test_two_threads_of_a_rank_that_save_the_same_step_write_it_once() -> None:
    """The main thread, which lost another rank, and the last resort, after a signal."""
    written: list[int] = []
    begun, may_end = threading.Event(), threading.Event()

    def write(step: int, **state: object) -> None:
        begun.set()
        assert may_end.wait(30)
        written.append(step)

    config: Any = SimpleNamespace(checkpoint_every_steps=1, checkpoint_every_epochs=0)
    group: Any = SimpleNamespace(tracker=None, launch=SimpleNamespace(is_main=False))
    contents, store = mock.Mock(), mock.Mock(write=write)
    saver = Saver(contents, store, group=group, config=config)
    progress = Progress(step=7)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(saver.save_in_need, progress, tensors={})
        assert begun.wait(30)
        second = pool.submit(saver.save_in_need, progress, tensors={})
        with pytest.raises(TimeoutError):  # it ends its process afterwards, so it waits
            second.result(0.2)
        may_end.set()
        first.result(30)
        second.result(30)
    assert written == [7]


def test_only_failures_at_the_same_step_are_a_crash_loop(tmp_path: Path) -> None:
    # Attempt 2 has two: the store was gone with rank 0, and each survivor noted its own.
    for attempt, step in enumerate((4, 5, 5)):
        for _ in range(1 + (attempt == 2)):
            save_after(StepError("no"), tmp_path, fake_stepper(step=step, attempt=attempt))
    group = Group(Launch(attempt=3), torch.device("cpu"))
    refuse_crash_loop(group, 5, tmp_path)
    save_after(StepError("no"), tmp_path, fake_stepper(attempt=3))
    with (tmp_path / "failures.jsonl").open("ab") as file:
        file.write(b'[5]\n{"step": 5}\n\0\xff\n{"step": 5, "err')  # cut off by a crash
    refuse_crash_loop(group, 6, tmp_path)
    with pytest.raises(CrashLoopError, match=r"3 attempts failed at step 5.*\[1, 2\]"):
        refuse_crash_loop(group, 5, tmp_path, next_samples=lambda: [1, 2])


@pytest.mark.filterwarnings("ignore:Exception in thread last-resort")
def test_the_last_resort_waits_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch saves because a rank hangs; then that rank's exit sends a signal to this one."""
    begun, may_end, left = threading.Event(), threading.Event(), threading.Event()

    def write(progress: Progress, **tensors: object) -> None:
        begun.set()
        assert may_end.wait(60)

    def leave(status: int) -> None:
        left.set()
        raise SystemExit  # ends the thread

    monkeypatch.setattr(survivor_save, "LOCK_LIMIT_S", 0.2)
    monkeypatch.setattr(stop_module, "leave_at_once", leave)
    monkeypatch.setattr(run_module, "_least_s", lambda parts: {})
    stepper, ending = fake_stepper(), threading.Lock()
    run = mock.MagicMock(stepper=stepper, folder=tmp_path)
    run.saver.save_in_need = write
    with mock.patch("threading.Lock", return_value=ending):
        subject = hang_subject(run)
    watch = threading.Thread(target=subject.save, args=(HangError("rank 1"),), daemon=True)
    watch.start()
    assert begun.wait(30)
    resort = LastResort(subject.save, grace_s=0.0)
    os.write(resort.writer.fileno(), bytes([signal.SIGTERM]))
    left_early = left.wait(1.5)
    may_end.set()
    watch.join(30)
    if not left_early:
        ending.release()  # as the end of the process would
    assert left.wait(30)
    resort.relieve()
    assert not left_early, "the process ended amid the save"


def test_a_failure_after_which_the_device_answers_nothing_is_noted_too(tmp_path: Path) -> None:
    # As on a GPU after this error: each call that needs it raises it again.
    gone = RuntimeError("CUDA error: device-side assert triggered")
    for attempt in range(3):
        stepper = fake_stepper(step=7, attempt=attempt)
        stepper.device = SimpleNamespace(find=mock.Mock(side_effect=gone))
        assert not save_after(StepError("rank 0, step 7"), tmp_path, stepper).called
    assert [failure["step"] for failure in read_failures(tmp_path)] == [7, 7, 7]
    group = Group(Launch(attempt=3), torch.device("cpu"))
    # Nothing was saved, so each restart begins at the last checkpoint before that step.
    with pytest.raises(CrashLoopError, match=r"3 attempts failed at step 7, .*rank 0, step 7"):
        refuse_crash_loop(group, 4, tmp_path)
    refuse_crash_loop(group, 8, tmp_path)


def test_a_process_that_holds_the_descriptors_of_the_last_resort_delays_no_stop() -> None:
    # As a forked loader worker does: where the thread waited for the end of its connection, Ctrl-C
    # took 20 s, and the end of a run whose dataset had forked a process never came.
    resort = LastResort(lambda: None, grace_s=3600)
    holds = [resort.writer.fileno()]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=holds) as holder:
        resort.relieve()  # the time limit of the test ends it if this waits
        assert holder.poll() is None
