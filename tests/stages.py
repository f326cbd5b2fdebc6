"""The stages of the tests: each promise once, everything, or random faults without end.

    python test_ddp_training.py                    each promise once: what a new user runs
    python test_ddp_training.py --all              every promise and every drill: what CI runs
    python test_ddp_training.py --hostile [--seed N]    the first under what new machines do
    python test_ddp_training.py --soak [--for 30m] [--seed N]
                                                   random faults, again and again, until Ctrl-C
    python test_ddp_training.py tests/data/test_data_faults.py -x    these tests, slow ones too

All other arguments are pytest's. Owns: the choice of a stage, and the rounds of a soak.
Does not own: which tests are slow (their marks), what runs side by side (conftest.py), and what
new machines do (hostile.py).
"""

import argparse
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.processes import ROOT
from tests.hostile import run_hostile

CONFIGURED = ("-c", str(ROOT / "pyproject.toml"))
EVERYWHERE = (str(ROOT / "test_ddp_training.py"), str(ROOT / "tests"))
SOAKED = (
    "tests/promises/test_chaos.py::test_faults_at_random_moments_end_in_the_weights_of_the_undisturbed_run",
    "tests/promises/test_fault_plans.py::test_ten_faults_in_a_hundred_steps_do_not_change_the_weights",
    "tests/promises/test_restarts.py::test_ten_of_ten_restarts_go_on_at_the_next_step",
)
"""Of these, a soak does one round after the other."""

SECONDS = {"s": 1, "m": 60, "h": 3600}


def run_stage(argv: Sequence[str]) -> int:
    """Run a stage, or the tests that argv names; give pytest's exit status."""
    words = list(argv)
    if "--soak" in words:
        words.remove("--soak")
        return soak(words)
    if "--hostile" in words:
        words.remove("--hostile")
        return run_hostile(words)
    if any(Path(word.partition("::")[0]).exists() for word in words):
        return int(pytest.main([*CONFIGURED, *words]))
    is_all = "--all" in words
    stage = [] if is_all else ["-m", "not slow"]
    words = [word for word in words if word != "--all"]
    # WHY: beside each other, ranks with several threads each are slower. And a test that forks
    # needs a process without torch's threads, which its child would not have.
    os.environ["OMP_NUM_THREADS"] = "1"
    # WHY: where this is set, as in containers, each of hundreds of processes compiles all modules.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # More than there are CPUs: most tests wait now and then, for time to pass or a process, the
    # slow ones longer. Each costs 5 s of CPU time before its first test.
    num_processes = (os.cpu_count() or 1) + (4 if is_all else 2)
    side_by_side = ["--numprocesses", str(num_processes), "--no-loadscope-reorder"]
    return int(pytest.main([*CONFIGURED, *stage, *side_by_side, *words, *EVERYWHERE]))


def soak(argv: Sequence[str]) -> int:
    """Do round after round with new seeds, until one fails, the time is over or Ctrl-C comes."""
    parser = argparse.ArgumentParser(prog="test --soak", allow_abbrev=False)
    parser.add_argument("--for", dest="limit_s", type=_seconds, default=float("inf"))
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    given = parser.parse_args(argv)
    began_at = time.monotonic()
    num_done = 0
    try:
        while time.monotonic() - began_at < given.limit_s:
            seed = given.seed + num_done
            again = f"python test_ddp_training.py --soak --for 1s --seed {seed}"
            print(f"round {num_done + 1}: {again}", flush=True)
            status = _do_round(seed)
            if status:
                print(f"failed after {num_done} good rounds; the same round again: {again}")
                return status
            num_done += 1
    except KeyboardInterrupt:
        print()
    print(f"{num_done} rounds in {time.monotonic() - began_at:.0f} s, all good")
    return 0


def _do_round(seed: int) -> int:
    words = ["--quiet", "--no-header", "--no-summary", "--rounds=1", "--plans=1", f"--seed={seed}"]
    # WHY a process: pytest in ours would know the modules and servers of the last round
    argv = [sys.executable, "-m", "pytest", *CONFIGURED, *words, *SOAKED]
    return subprocess.run(argv, cwd=ROOT, check=False).returncode


def _seconds(text: str) -> float:
    """Read 90s, 30m or 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; a time is 90s, 30m or 2h")
    return float(found[1]) * SECONDS[found[2]]
