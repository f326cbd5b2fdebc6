"""Operations and waits of a step in the form of GPUs: the bars, and that the counting counts."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import step_ops
from hardened_ddp.gradients.sums import flag_of
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_flag_is_up_for_nan_and_inf_and_not_for_large_numbers(dtype: torch.dtype) -> None:
    # but for those whose square is inf in the optimizer: fused Adam on a GPU makes NaN of them
    most = torch.finfo(dtype).max / 2 if dtype in (torch.float16, torch.float64) else 1.8e19
    large = torch.full((100,), most, dtype=dtype)
    if most == 1.8e19:
        assert flag_of([large, large[:3] * 1.1]) == 1.0
    assert flag_of([large, torch.ones(2, dtype=dtype), torch.empty(0, dtype=dtype)]) == 0.0
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = large.clone()
        broken[3] = bad
        flag = flag_of([torch.ones(2, dtype=dtype), broken])
        assert (flag.item(), flag.dtype, flag.shape) == (1.0, torch.float32, ())
