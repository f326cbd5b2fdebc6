"""The benchmark for students: it runs on any machine, and says what it compared."""

import re

import pytest

from tests.harness.ranks import run_program


@pytest.mark.slow
def test_it_prints_the_ratio_and_says_what_is_compared() -> None:
    done = run_program(["python", "benchmarks/dp_vs_ddp.py", "--quick"], timeout_s=150).ok()
    assert re.search(r"^DDP / (one process|DataParallel) = \d+\.\d\d ", done.stdout, re.MULTILINE)
    if "one process" in done.stdout:
        assert "DataParallel needs them" in done.stdout
