"""explain_calibration.py counts what explain claims, beside what is true."""

import json
import subprocess
import sys
from pathlib import Path

from tests.harness.processes import ROOT

LOGS = {
    "oom": ("[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n", ["memory-gpu"]),
    "wrong": ("RuntimeError: CUDA error: device-side assert triggered\n", ["memory-gpu"]),
    "done": ("step 1 loss 0.3\nTraining finished\n", ["healthy"]),
    "cut": ("step 1 loss 0.3\nstep 2 loss 0.2\n", ["healthy"]),
}


def test_claims_are_counted_beside_the_truth(tmp_path: Path) -> None:
    for name, (text, codes) in LOGS.items():
        (tmp_path / f"{name}.log").write_text(text)
        (tmp_path / f"{name}.json").write_text(json.dumps({"codes": codes}))
    command = [sys.executable, "benchmarks/explain_calibration.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "| certain | 2 | 1 (50%) | 95% |" in done.stdout
    assert "| healthy | 1 | 1 (100%) | 100% |" in done.stdout
    assert "| open | 1 |" in done.stdout
    assert f"certain: gpu-assert for {tmp_path / 'wrong.log'}" in done.stdout
