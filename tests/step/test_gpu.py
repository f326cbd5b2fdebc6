"""Faults within steps on a real GPU: memory that is really gone, 16-bit training, a shared GPU.

The checks and the faults that only a GPU has: benchmarks/gpu_report.py, which runs these, too.
"""

import re
from pathlib import Path

import pytest
import torch

from tests.harness.ranks import train
from tests.run_folder import last_tensors, only_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POINTS = ["--dataset", "tests.plugins:points", "--dataset_args", "{size: 48}", "--batch_size", "8"]
POINTS += ["--epochs", "3", "--log_interval", "1", "--eval_every", "0", "--num_workers", "0"]
POINTS += ["--deterministic"]
SHARED = ["--backend", "gloo"]  # two ranks on one GPU, which NCCL refuses


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("ranks", [[], SHARED], ids=["alone", "two ranks on one GPU"])
def test_faults_within_steps_change_no_weights(amp: str, ranks: list[str], tmp_path: Path) -> None:
    faults = {0: {8: "raise", 11: "raise in backward"}, 1: {14: "raise in backward", 17: "raise"}}
    argv = [*POINTS, *ranks, "--amp", amp, "--model", "tests.plugins:FailingOnce", "--model_args"]
    world_size = 2 if ranks else 1
    undisturbed, faulty = tmp_path / "undisturbed", tmp_path / "faulty"
    train([*argv, "{}", "--output_dir", undisturbed], world_size).ok()
    finished = train([*argv, str({"faults": faults}), "--output_dir", faulty], world_size).ok()
    assert last_tensors(faulty) == last_tensors(undisturbed)
    assert finished.outputs[0].count("retrying step") >= 2


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_memory_that_is_really_gone_gives_smaller_micro_batches(phase: str, tmp_path: Path) -> None:
    argv = [*POINTS, "--model", "tests.plugins:Hungry", "--model_args", f"{{phase: {phase}}}"]
    finished = train([*argv, "--output_dir", tmp_path], 1).ok()
    sizes = re.findall(r"micro-batches have (\d) samples at most", finished.outputs[0])
    # four may not fit: what the trial before the first step has freed may lie around a workspace
    assert sizes in (["4"], ["4", "2"])
    assert only_run(tmp_path)
