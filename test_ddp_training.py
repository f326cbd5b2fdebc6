#!/usr/bin/env python3
"""The contract with the user: the commands as they are typed, and the faults that they survive.

    python test_ddp_training.py [--all | --soak] [pytest's own arguments]     see tests/stages.py

Commands run as real torchrun and python where those are the point, and on forked ranks
(tests/harness/ranks.py) where only the script is. Everything is written under pytest's temporary
folder.
"""

import json
import re
import shlex
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.harness.processes import ROOT, kill
from tests.harness.ranks import (
    Finished,
    held_port,
    run_command,
    run_program,
    start_command,
    start_program,
    start_training,
    train,
)
from tests.marks import slow_after
from tests.run_folder import find_checkpoints, last_tensors, only_run, read_summary, step_of
from tests.stages import run_stage

LEARNED = 0.97  # test accuracy on digits after 5 epochs with the defaults
# 90 steps on 2 ranks, two seconds: a fault finds its place between many checkpoints.
STEADY: list[str | Path] = ["--cpu_only", "--batch_size", "16", "--epochs", "2"]
STEADY += ["--model", "tests.plugins:paced"]
STEADY += ["--num_workers", "0", "--checkpoint_every_steps", "5"]
Undisturbed = Callable[..., dict[str, str]]
"""Gives the final tensors of the run that nothing happens to, by ranks and flags."""

# What the README tells to type, and the accuracy that must come of it: a real command, and those
# that differ from it in launcher and flags, which are forked.
TYPED = "torchrun --nproc_per_node=2 ddp_training.py --batch_size 16 --epochs 5"
TYPED_WITH_OTHER_FLAGS = {
    "python ddp_training.py --single_gpu --batch_size 32 --epochs 5": LEARNED,
    "torchrun --standalone --nproc_per_node=4 ddp_training.py": 0.9,
    "torchrun --nnodes=1 --node_rank=0 --nproc_per_node=2 --master_addr=localhost"
    " --master_port=12355 ddp_training.py": LEARNED,
    "python ddp_training.py --cpu_only --batch_size 8 --epochs 2": 0.9,
    # of the tutorial
    "torchrun --nproc_per_node=2 ddp_training.py --batch_size 16 --epochs 5"
    " --no_shared_memory": LEARNED,
    "torchrun --standalone --nproc_per_node=2 ddp_training.py --run_name counted --epochs 2"
    " --ledger --no_shared_memory": 0.75,
}


def test_a_command_as_typed_trains_and_leaves_a_whole_run_folder(tmp_path: Path) -> None:
    completed = run_command([*TYPED.split(), "--output_dir", tmp_path], timeout_s=120).ok()
    _check(completed, TYPED, LEARNED, only_run(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "accuracy"), TYPED_WITH_OTHER_FLAGS.items())
def test_other_flags_as_typed_train_and_leave_a_whole_run_folder(
    command: str, accuracy: float, tmp_path: Path
) -> None:
    command = command.replace("12355", str(held_port()))
    finished = run_program([*command.split(), "--output_dir", tmp_path], timeout_s=120).ok()
    _check(finished, command, accuracy, only_run(tmp_path))


def test_an_unknown_flag_is_named_with_the_nearest_one_and_nothing_is_made(tmp_path: Path) -> None:
    output = tmp_path / "runs"
    argv = ["python", "ddp_training.py", "--batchsize", "32", "--output_dir", str(output)]
    completed = run_command(argv, timeout_s=20)
    assert completed.status == 2
    assert "--batchsize" in completed.stderr
    assert "--batch_size" in completed.stderr
    assert not output.exists()
    assert completed.stderr.count("error") == 1
    assert "Traceback" not in completed.output
    assert completed.stdout == ""


@pytest.mark.parametrize(
    ("word", "said"), [("--help", "--batch_size"), ("--version", r"hardened-ddp 0\.1.*\ntorch 2\.")]
)
def test_help_and_version_are_told_without_importing_what_is_slow(word: str, said: str) -> None:
    argv = ["python", "-X", "importtime", "ddp_training.py", word]
    completed = run_command(argv, timeout_s=20).ok()
    assert re.search(said, completed.stdout)
    slow = r"\|\s+(torch|numpy|yaml|difflib|argparse)$"
    assert not re.search(slow, completed.stderr, re.MULTILINE)


# Through shared memory, and by DDP's hooks over gloo, where from 3 ranks on the order of additions
# depends on DDP's buckets.
@pytest.mark.parametrize("case", slow_after(1, [(2,), (3, "--no_shared_memory")]), ids=str)
def test_a_run_killed_in_mid_epoch_resumes_to_the_same_weights(
    case: tuple[int, *tuple[str, ...]], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    world_size, *flags = case
    run = _kill_in_mid_run(tmp_path, world_size, *flags)
    saved_step = step_of(find_checkpoints(tmp_path)[-1])
    argv = [*STEADY, *flags, "--output_dir", tmp_path, "--resume", run]
    finished = train(argv, world_size).ok()
    assert f"from step {saved_step}\n" in finished.outputs[0]
    assert "Traceback" not in finished.output
    assert read_summary(run)["status"] == "finished"
    assert last_tensors(tmp_path) == undisturbed(world_size, *flags)


@pytest.mark.slow
def test_a_corrupt_checkpoint_is_passed_over_with_its_reason(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    run = _kill_in_mid_run(tmp_path, 2)
    older, newest = find_checkpoints(tmp_path)[-2:]
    state = newest / "state.safetensors"
    raw = bytearray(state.read_bytes())
    raw[-1] ^= 1
    state.write_bytes(raw)
    finished = train([*STEADY, "--output_dir", tmp_path, "--resume", run], 2).ok()
    [reason] = [line for line in finished.outputs[0].splitlines() if "passed over" in line]
    assert newest.name in reason
    assert "sha256" in reason
    assert f"from step {step_of(older)}\n" in finished.outputs[0]
    assert "passed over" in (run / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert last_tensors(tmp_path) == undisturbed(2)


@pytest.mark.parametrize("case", slow_after(1, [(2, signal.SIGTERM), (1, signal.SIGINT)]), ids=str)
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint_to_go_on_from(
    case: tuple[int, signal.Signals], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    world_size, number = case
    argv = [*STEADY, "--output_dir", tmp_path]
    with start_training(argv, world_size) as running:
        running.wait_for(lambda: find_checkpoints(tmp_path), timeout_s=60, what="a checkpoint")
        running.kill(world_size - 1, number)
        finished = running.wait(60).ok()
    run = only_run(tmp_path)
    summary = read_summary(run)
    assert summary["status"] == "stopped"
    assert step_of(find_checkpoints(tmp_path)[-1]) == summary["step"]
    assert number.name in finished.outputs[0]
    assert "Traceback" not in finished.output
    resumed = train([*argv, "--resume", run], world_size).ok()
    assert f"from step {summary['step']}\n" in resumed.outputs[0]
    assert last_tensors(tmp_path) == undisturbed(world_size)


@pytest.mark.slow
def test_a_request_to_save_that_comes_while_torch_is_imported_is_kept(tmp_path: Path) -> None:
    # As Slurm's --signal, on a machine where a start takes long.
    argv = ["python", "ddp_training.py", *STEADY, "--run_name", "run", "--output_dir", tmp_path]
    with start_command(argv) as command:
        command.wait_for(
            lambda: _blocks(command.pid, signal.SIGUSR1), timeout_s=20, what="a kept signal"
        )
        command.kill(0, signal.SIGUSR1)
        completed = command.wait(timeout_s=60).ok()
    assert "SIGUSR1: stopping at step 0" in completed.output
    assert read_summary(tmp_path / "run")["status"] == "stopped"
    short = [*argv[2:], "--max_steps", "3"]
    assert "from step 0\n" in train(short, launcher="none").ok().output
    assert read_summary(tmp_path / "run")["step"] == 3


def test_torchrun_restarts_after_a_killed_worker_to_the_same_weights(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    argv = ["torchrun", "--nproc_per_node=2", "--max_restarts=2", "ddp_training.py"]
    with start_program([*argv, *STEADY, "--output_dir", tmp_path]) as command:
        command.wait_for(lambda: find_checkpoints(tmp_path), timeout_s=60, what="a checkpoint")
        pid = command.pid_of_rank(1)
        assert pid is not None
        kill(pid)
        completed = command.wait(timeout_s=100).ok()
    assert re.search(r"resuming .* from step \d+", completed.output)
    assert read_summary(only_run(tmp_path))["status"] == "finished"
    assert last_tensors(tmp_path) == undisturbed(2)


@pytest.mark.parametrize("number", slow_after(1, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_to_torchrun_saves_a_checkpoint_and_leaves_no_worker(
    number: signal.Signals, tmp_path: Path
) -> None:
    argv = ["torchrun", "--nproc_per_node=2", "ddp_training.py", "--epochs", "1000"]
    argv += ["--checkpoint_every_steps", "10"]
    with start_program([*argv, "--output_dir", tmp_path]) as command:
        command.wait_for(lambda: find_checkpoints(tmp_path), timeout_s=60, what="a checkpoint")
        command.kill(0, number)
        command.wait(timeout_s=40)  # its status is torchrun's own: always 1 after a signal
    summary = read_summary(only_run(tmp_path))
    assert summary["status"] == "stopped"
    assert step_of(find_checkpoints(tmp_path)[-1]) == summary["step"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Give the final tensors of the STEADY run that nothing happens to, by ranks and flags."""

    @cache
    def final_tensors(world_size: int, *flags: str) -> dict[str, str]:
        output = tmp_path_factory.mktemp("undisturbed")
        train([*STEADY, *flags, "--output_dir", output], world_size).ok()
        return last_tensors(output)

    return final_tensors


def _blocks(pid: int, number: signal.Signals) -> bool:
    """Say whether a process keeps this signal for later."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    [mask] = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:")]
    return bool(mask >> (number - 1) & 1)


def _check(finished: Finished, command: str, accuracy: float, run: Path) -> None:
    """Check what a command printed, and its run folder."""
    assert "Traceback" not in finished.output
    for words in ("ddp_training.py --resume", "ddp_training.py export"):
        assert ROOT / _printed_command(finished.output, words)[-1] == run
    assert ROOT / _printed_command(finished.output, "--logdir")[-1] == run / "tensorboard"
    num_ranks = int(_typed_value(command, "nproc_per_node", "1"))
    summary = read_summary(run)
    assert summary["status"] == "finished"
    assert summary["test_accuracy"] >= accuracy
    assert summary["epoch"] == int(_typed_value(command, "epochs", "5"))
    assert summary["world_size"] == num_ranks
    assert step_of(find_checkpoints(run.parent)[-1]) == summary["step"]
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        assert isinstance(json.loads(line), dict)
    assert list((run / "tensorboard").glob("events*"))
    logs = sorted(path.name for path in (run / "logs").glob("rank-*.log"))
    assert logs == [f"rank-{rank}.log" for rank in range(num_ranks)]
    settings = (run / "config.yaml").read_text(encoding="utf-8")
    batch_size = _typed_value(command, "batch_size", "32")
    assert re.search(rf"^batch_size: {batch_size}\b", settings, re.MULTILINE)


def _typed_value(command: str, name: str, default: str) -> str:
    found = re.search(rf"--{name}[ =](\S+)", command)
    return found[1] if found else default


def _printed_command(output: str, words: str) -> list[str]:
    """Return the one command with these words that a run printed, as a shell would split it."""
    [line] = [line for line in output.splitlines() if words in line]
    command = re.search(r"(python3?|torchrun|tensorboard) .*", line)
    assert command, line
    return shlex.split(command[0])


def _kill_in_mid_run(output_dir: Path, world_size: int, *flags: str) -> Path:
    """Kill all ranks of a STEADY run that has two checkpoints or more; return its folder."""
    with start_training([*STEADY, *flags, "--output_dir", output_dir], world_size) as running:
        running.wait_for(
            lambda: len(find_checkpoints(output_dir)) > 1, timeout_s=60, what="two checkpoints"
        )
        for rank in range(world_size):
            running.kill(rank)
        assert running.wait(20).statuses == (-signal.SIGKILL,) * world_size
    return only_run(output_dir)


if __name__ == "__main__":
    sys.exit(run_stage(sys.argv[1:]))
