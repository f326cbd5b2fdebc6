"""What a step costs: its code, and its operations and waits in the form of GPUs.

The bars of the benchmarks that count them hold, and they count.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from benchmarks import step_ops, step_path
from benchmarks.gpu.checks import nan_and_inf_are_found_in_every_type
from tests.harness.ranks import run_program, train


def run_forked(words: Sequence[str], **how: Any) -> CompletedProcess[str]:
    """Run a torchrun of the benchmark on forked ranks: in the place of subprocess.run."""
    env = {name: how["env"][name] for name in ("PYTHONPATH", "STEP_TRACE")}
    done = run_program(words, timeout_s=300, cwd=how["cwd"], env=env)
    return CompletedProcess(words, done.status, done.output)


@pytest.mark.slow
def test_it_counts_a_step_a_save_and_a_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_path.subprocess, "run", run_forked)
    monkeypatch.setattr(sys, "argv", ["step_path.py", "--verbose"])
    # WHY again: on a busy machine each step that is watched may be one that asks for a stop
    for _ in range(3):
        status, output = step_path.main(), capsys.readouterr().out
        if not status:
            break
    assert not status, output
    figures = re.findall(r"^  (\w+) +(\d+) .* PASS$", output, re.MULTILINE)
    step = ["frames", "files", "functions"]
    assert [name for name, _ in figures] == [*step, *step, "save", "resume"], output
    assert all(int(count) > 0 for _, count in figures)
    for expected in ("ddp_training.py: fit", "checkpoint/disk.py", "training/run_folder.py"):
        assert expected in output


def test_a_step_dispatches_little_more_than_a_bare_loop_and_waits_once(tmp_path: Path) -> None:
    env = {"OPS_TRACE": str(tmp_path / "seen.json")}
    train([*step_ops.flags_of("mlp"), "--output_dir", tmp_path], 2, env=env).ok()
    seen = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    figures = step_ops.figures_of(seen)
    assert sum(seen["bare"]["operations"].values()) > 50
    for name, (count, places) in figures.items():
        assert count <= step_ops.BARS[name], (name, places)
    assert figures["flags"][0] == figures["evaluation"][0] == 1  # they are seen
    reports = [part["waits"] for part in seen["parts"] if part["kind"] == "report"]
    assert any("tolist" in wait for waits in reports for wait in waits)


def test_a_flag_is_up_for_nan_and_inf_and_not_for_large_numbers() -> None:
    nan_and_inf_are_found_in_every_type(torch.device("cpu"))
