"""The examples: each learns what it says and has at most 80 lines; faults: test_fault_plans.py."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.processes import ROOT
from tests.harness.ranks import import_in_server, run_program, train
from tests.run_folder import only_run, read_summary

EXAMPLES = ROOT / "examples"
LEARNS = {  # a figure of the test set, its bound, and whether it has to be above it
    "language_model": ("test_perplexity", 6.5, False),
    "mixup": ("test_accuracy", 0.9, True),
    "regression": ("test_r2", 0.45, True),
    "segmentation": ("test_mean_iou", 0.75, True),
    "streaming": ("test_accuracy", 0.93, True),
}
OF_SKLEARN = ("mixup", "regression", "segmentation")


def config_of(example: str) -> dict[str, Any]:  # Any: YAML
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / example / "config.yaml").read_text("utf-8"))
    return found


@pytest.mark.parametrize("example", LEARNS)
def test_an_example_has_at_most_80_lines_and_says_its_command(example: str) -> None:
    [file] = (EXAMPLES / example).glob("*.py")
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    assert f"--config examples/{example}/config.yaml" in text
    assert "torchrun" in text


@pytest.mark.slow
@pytest.mark.parametrize("example", LEARNS)
def test_an_example_learns_what_it_says(example: str, tmp_path: Path) -> None:
    if example in OF_SKLEARN:
        import_in_server("sklearn.datasets")
    argv: list[str | Path] = ["--config", EXAMPLES / example / "config.yaml", "--cpu_only"]
    argv += ["--output_dir", tmp_path / "runs", "--data_dir", tmp_path / "data", "--ledger"]
    argv += ["--num_workers", "0"]  # WHY: those of each rank import torch anew
    train(argv, 2, timeout_s=600).ok()
    run = only_run(tmp_path / "runs")
    name, bound, is_above = LEARNS[example]
    found = read_summary(run)[name]
    assert (found > bound) == is_above, f"{name} {found}"
    verified = train(["verify-ledger", run], launcher="none").ok()
    assert verified.output.count("each exactly once") == config_of(example)["epochs"]
    if example == "regression":
        [best] = run.rglob("best.json")
        assert '"metric": "r2"' in best.read_text(encoding="utf-8")
    if example == "language_model":
        train(["export", run, "--output", tmp_path / "x"], launcher="none").ok()
        sample = ["python", "-m", "examples.language_model.gpt", str(tmp_path / "x")]
        text = run_program(sample, timeout_s=120).ok().stdout
        assert text.startswith("The ")
        words = [f" {word} " for word in ("the", "is", "of", "to", "a", "in", "and")]
        assert sum(text.count(word) for word in words) >= 3, text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_of_transformers_learns_on_one_process_and_with_torchrun(
    ranks: int, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="needs requirements-extras.txt")
    pytest.importorskip("accelerate", reason="needs requirements-extras.txt")
    import_in_server("transformers.trainer")
    launcher = ["torchrun", "--standalone", "--nproc_per_node=2"] if ranks == 2 else ["python"]
    argv = [*launcher, EXAMPLES / "hf_trainer" / "train.py", "--cpu_only", "--epochs", "2"]
    done = run_program(argv, timeout_s=170, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}).ok()
    assert f"{ranks} ranks, 360 test samples" in done.stdout
    result = json.loads((tmp_path / "runs" / "hf_trainer" / "eval_results.json").read_text())
    assert result["eval_accuracy"] > 0.9
    assert result["eval_mean_recall"] > 0.9
    assert (tmp_path / "runs" / "hf_trainer" / "model.safetensors").is_file()
    head = (tmp_path / "data/MNIST/raw/t10k-images-idx3-ubyte").read_bytes()[:16]
    assert struct.unpack(">4B3I", head) == (0, 0, 8, 3, 360, 28, 28)
