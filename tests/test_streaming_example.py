"""The example of a stream: one command, and it learns what it says."""

from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.ranks import run_command, train
from tests.run_folder import only_run, read_summary

EXAMPLE = ROOT / "examples" / "streaming"
COMMAND: list[str | Path] = ["--config", EXAMPLE / "config.yaml", "--cpu_only"]


@pytest.mark.slow
def test_it_learns_to_tell_prose_from_code_and_names(tmp_path: Path) -> None:
    place: list[str | Path] = ["--output_dir", tmp_path / "runs", "--data_dir", tmp_path / "data"]
    train([*COMMAND, *place, "--ledger"], 2).ok()
    run = only_run(tmp_path / "runs")
    assert read_summary(run)["test_accuracy"] > 0.93
    verify = ["python", "ddp_training.py", "verify-ledger", str(run)]
    assert run_command(verify, timeout_s=60).ok().stdout.count("each exactly once") == 4


def test_it_has_at_most_80_lines() -> None:
    assert len((EXAMPLE / "lines.py").read_text(encoding="utf-8").splitlines()) <= 80
