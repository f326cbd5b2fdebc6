"""The status of a run that really runs under hardened-ddp; of launchers: test_next_commands.py.

That a run which was stopped in a pod goes on to the same weights: tests/deploy/test_pod_life.py.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from hardened_ddp.reporting.ending import MOST_STARTS
from tests.harness.ranks import run_program, start_program
from tests.run_folder import only_run

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


def test_a_lost_rank_is_75_with_its_reason_in_the_termination_log(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    words = run_words(tmp_path / "pace", tmp_path / "runs")
    env = POD | {"HARDENED_DDP_TERMINATION_LOG": str(log)}
    with start_program([*COMMAND, "--nproc_per_node=2", *words], env=env) as running:
        metrics = tmp_path / "runs" / "r" / "metrics.jsonl"
        running.wait_for(metrics.exists, timeout_s=60, what="a step")
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
    # WHY: its trial alone takes longer than the limit, however fast the machine is
    words[words.index("mlp")] = "tests.plugins:paced_mlp"
    words += ["--model_args", "{pause_s: 0.5}"]
    log = tmp_path / "termination-log"
    log.touch()
    env = POD | {"HARDENED_DDP_TERMINATION_LOG": str(log)}
    assert run_program(words, env=env, timeout_s=LIMIT_S).status == 3
    assert log.read_bytes() == b"", "a stop is no error"
    attempts = only_run(tmp_path / "runs") / "attempts.jsonl"
    first = json.loads(attempts.read_text().splitlines()[-1])
    assert first["step"] == 0
    more = [{**first, "began_at": first["began_at"] - i} for i in range(1, MOST_STARTS - 1)]
    attempts.write_text("".join(json.dumps(line) + "\n" for line in [first, *more]))
    finished = run_program(words, env=POD, timeout_s=LIMIT_S)
    assert finished.status == 1
    assert f"{MOST_STARTS} starts of" in finished.output
