"""Operations and waits of a step in the form of GPUs: the bars, and that the counting counts."""

import json
from pathlib import Path

import torch

from benchmarks import step_ops
from benchmarks.gpu.checks import nan_and_inf_are_found_in_every_type
from tests.harness.ranks import train


def test_a_step_dispatches_little_more_than_the_bare_loop_and_waits_for_one_flag(
    tmp_path: Path,
) -> None:
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
