"""The benchmarks that only print: each runs on any machine, and says what it is to say."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.equal.runs import RUNS
from benchmarks.faults.cases import FAULTS
from tests.harness.ranks import run_program

SAID = {
    "peer_faults.py --list": " .*\n".join(FAULTS),
    "equal_weights.py --list": "\n".join(RUNS),
    "dp_vs_ddp.py --quick": (
        r"^DDP / DataParallel = \d+\.\d\d |"
        r"DataParallel needs them(.*\n)+DDP / one process = \d+\.\d\d "
    ),
    "replay_poison.py --num 2 --kind tokens": r"^\| tokens that mean nothing \|( 2 \|){4} 1\.0 \|",
    "digest_cost.py --work tiny --blocks 2": (
        r"^\| tiny \| [\d.]+ ms \| [\d.]+ x \| [\d.]+ %: (ended|kept) \| [\d.]+ x \|$"
    ),
}


@pytest.mark.parametrize(
    "words", [pytest.param(w, marks=[] if "--list" in w else pytest.mark.slow) for w in SAID]
)
def test_it_prints_what_it_is_to_say(words: str) -> None:
    name, *options = words.split()
    done = run_program(["python", f"benchmarks/{name}", *options], timeout_s=200).ok()
    assert re.search(SAID[words], done.stdout, re.MULTILINE)


LOGS = {
    "oom": ("[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n", ["memory-gpu"]),
    "wrong": ("RuntimeError: CUDA error: device-side assert triggered\n", ["memory-gpu"]),
    "done": ("step 1 loss 0.3\nTraining finished\n", ["healthy"]),
    "cut": ("step 1 loss 0.3\nstep 2 loss 0.2\n", ["healthy"]),
}


def test_what_explain_claims_is_counted_beside_the_truth(tmp_path: Path) -> None:
    for name, (text, codes) in LOGS.items():
        (tmp_path / f"{name}.log").write_text(text)
        (tmp_path / f"{name}.json").write_text(json.dumps({"codes": codes}))
    done = run_program(["python", "benchmarks/explain_calibration.py", tmp_path], timeout_s=60)
    assert done.status == 1, done.stderr
    assert "| certain | 2 | 1 (50%) | 95% |" in done.stdout
    assert "| healthy | 1 | 1 (100%) | 100% |" in done.stdout
    assert "| open | 1 |" in done.stdout
    assert f"certain: gpu-assert for {tmp_path / 'wrong.log'}" in done.stdout
