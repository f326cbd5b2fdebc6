"""Storage that stalls is told as such, and waiting that was asked for is no hang."""

from pathlib import Path

import pytest

from ddp_runs.run_events import _kind
from hardened_ddp.guard.hang_rules import Report
from hardened_ddp.guard.slow import SlowData
from hardened_ddp.ranks.phase import Phase
from tests.harness.ranks import train

STALL = ["--cpu_only", "--batch_size", "2", "--log_interval", "1", "--eval_every", "0"]
STALL += ["--epochs", "1", "--model", "mlp", "--num_workers", "0", "--hang_after_s", "1"]
STALL += ["--dataset", "tests.plugins:points_that_stall"]


def told(slow: SlowData, phase: Phase, age_s: float, *, limit_s: float, longest_s: float) -> str:
    report = Report(1, 412, phase, age_s, limit_s)
    return slow.note(report, longest_s=longest_s, samples=lambda: [9912, -1])


def test_a_stall_is_told_after_half_a_minute_and_then_each_minute_until_it_is_over() -> None:
    slow, ages = SlowData(), []
    for age_s in range(200):
        if text := told(slow, Phase.DATA, age_s, limit_s=300, longest_s=0.1):
            ages.append(age_s)
            assert "for the data of step 412 (samples 9912). It waits" in text
            assert f"waits for {300 - age_s} s more" in text
    assert ages == [30, 90, 150]
    assert told(slow, Phase.FORWARD, 0, limit_s=60, longest_s=0.1) == (
        "the data came after 150 s or more"
    )
    assert not told(slow, Phase.FORWARD, 1, limit_s=60, longest_s=0.1)


def test_a_report_counts_a_stall_as_slow_and_not_as_a_hang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told(SlowData(), Phase.DATA, 40, limit_s=300, longest_s=0.1)
    [record] = caplog.records
    assert _kind(record.name, record.levelname, record.getMessage()) == "slow"


def test_a_wait_that_is_usual_for_this_run_is_not_told() -> None:
    slow = SlowData()
    assert not told(slow, Phase.DATA, 90, limit_s=300, longest_s=20)
    assert "without a limit" in told(slow, Phase.DATA, 101, limit_s=3e8, longest_s=20)


def test_waiting_that_was_asked_for_is_no_hang(tmp_path: Path) -> None:
    """Sample 133 takes 3 s, in a step after the first ones; a hang would end the run after 1 s."""
    argv = [
        *STALL,
        "--loader_timeout_s",
        "60",
        "--dataset_args",
        "{stall_s: 3}",
        "--output_dir",
        tmp_path,
    ]
    train(argv, 1, timeout_s=60).ok()
