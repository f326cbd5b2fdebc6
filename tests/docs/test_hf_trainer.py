"""The example with the Trainer of transformers, as its README line types it."""

import json
import struct
from pathlib import Path

import pytest

from tests.harness.processes import ROOT
from tests.harness.ranks import import_in_server, run_program

SCRIPT = ROOT / "examples" / "hf_trainer" / "train.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_the_digits_on_one_process_and_with_torchrun(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs requirements-extras.txt")
    pytest.importorskip("accelerate", reason="needs requirements-extras.txt")
    import_in_server("transformers.trainer")
    launcher = ["torchrun", "--standalone", "--nproc_per_node=2"] if ranks == 2 else ["python"]
    argv = [*launcher, str(SCRIPT), "--cpu_only", "--epochs", "2"]
    done = run_program(argv, timeout_s=170, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}).ok()
    assert f"{ranks} ranks, 360 test samples" in done.stdout
    result = json.loads((tmp_path / "runs" / "hf_trainer" / "eval_results.json").read_text())
    assert result["eval_accuracy"] > 0.9
    assert result["eval_mean_recall"] > 0.9
    assert (tmp_path / "runs" / "hf_trainer" / "model.safetensors").is_file()
    head = (tmp_path / "data/MNIST/raw/t10k-images-idx3-ubyte").read_bytes()[:16]
    assert struct.unpack(">4B3I", head) == (0, 0, 8, 3, 360, 28, 28)
