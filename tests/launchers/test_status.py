"""The status of a run that really runs under hardened-ddp; of launchers: test_next_commands.py."""

import json
import os
import signal
from pathlib import Path

import pytest

from hardened_ddp.reporting.ending import MOST_STARTS
from tests.harness.ranks import Running, run_program, start_program
from tests.run_folder import last_tensors, only_run, read_summary

COMMAND = ["python", "-m", "hardened_ddp_command"]  # forked; as typed: tests/new_user.sh
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
LIMIT_S = 120


def run_words(pace: Path, output: Path) -> list[str]:
    """Give the arguments of a run that takes its time as long as there is a file."""
    pace.touch()
    words = ["--cpu_only", "--num_workers", "0", "--batch_size", "10", "--max_steps", "30"]
    words += ["--model", "mlp", "--dataset", "tests.plugins:paced_points", "--no_tensorboard"]
    words += ["--dataset_args", f"{{pace: {pace}}}", "--log_interval", "1"]
    return [*words, "--run_name", "r", "--output_dir", str(output)]


def wait_for_steps(running: Running, output: Path) -> None:
    metrics = output / "r" / "metrics.jsonl"
    running.wait_for(metrics.exists, timeout_s=60, what="a step")


@pytest.mark.slow
def test_a_stop_in_a_pod_is_3_and_the_same_command_goes_on_to_equal_weights(tmp_path: Path) -> None:
    pace, log = tmp_path / "pace", tmp_path / "termination-log"
    log.touch()
    argv = [*COMMAND, "--nproc_per_node", "2"]
    words = run_words(pace, tmp_path / "stopped")
    env = POD | {"HARDENED_DDP_TERMINATION_LOG": str(log)}
    with start_program([*argv, *words], env=env) as running:
        wait_for_steps(running, tmp_path / "stopped")
        running.kill(number=signal.SIGTERM)
        finished = running.wait(LIMIT_S)
    assert finished.status == 3, finished.describe()
    assert 0 < read_summary(only_run(tmp_path / "stopped"))["step"] < 30
    pace.unlink()
    run_program([*argv, *words], env=env, timeout_s=LIMIT_S).ok()
    assert log.read_bytes() == b""
    whole = [*words[:-1], str(tmp_path / "whole")]
    run_program([*argv, *whole], timeout_s=LIMIT_S).ok()
    assert last_tensors(tmp_path / "stopped") == last_tensors(tmp_path / "whole")


def test_a_lost_rank_is_75_with_its_reason_in_the_termination_log(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    words = run_words(tmp_path / "pace", tmp_path / "runs")
    env = POD | {"HARDENED_DDP_TERMINATION_LOG": str(log)}
    with start_program([*COMMAND, "--nproc_per_node=2", *words], env=env) as running:
        wait_for_steps(running, tmp_path / "runs")
        pid = running.pid_of_rank(1)
        os.kill(pid, signal.SIGKILL)
        finished = running.wait(LIMIT_S)
    assert finished.status == 75, finished.describe()
    # torchrun may end the other rank before that has found out
    told = "DDP-G04", "rank 1 was the first to end: by SIGKILL"
    assert any(words in log.read_text() for words in told), log.read_text()


@pytest.mark.slow
def test_starts_without_progress_end_with_1_at_the_limit(tmp_path: Path) -> None:
    words = [*COMMAND, *run_words(tmp_path / "pace", tmp_path / "runs"), "--time_limit", "1s"]
    assert run_program(words, env=POD, timeout_s=LIMIT_S).status == 3
    attempts = only_run(tmp_path / "runs") / "attempts.jsonl"
    first = json.loads(attempts.read_text().splitlines()[-1])
    assert first["step"] == 0
    more = [{**first, "began_at": first["began_at"] - i} for i in range(1, MOST_STARTS - 1)]
    attempts.write_text("".join(json.dumps(line) + "\n" for line in [first, *more]))
    finished = run_program(words, env=POD, timeout_s=LIMIT_S)
    assert finished.status == 1
    assert f"{MOST_STARTS} starts of" in finished.output
