"""The benchmarks of digests and replay run, and say what they are to say."""

import re

import pytest

from tests.harness.ranks import run_program


@pytest.mark.slow
def test_poison_is_planted_and_found() -> None:
    command = ["python", "benchmarks/replay_poison.py", "--num", "2", "--kind", "tokens"]
    done = run_program(command, timeout_s=200).ok()
    assert "\n| tokens that mean nothing | 2 | 2 | 2 | 2 | 1.0 |" in done.stdout


@pytest.mark.slow
def test_the_cost_of_digests_is_a_ratio_and_auto_ends_what_costs_too_much() -> None:
    command = ["python", "benchmarks/digest_cost.py", "--work", "tiny", "--blocks", "2"]
    done = run_program(command, timeout_s=200).ok()
    assert re.search(
        r"^\| tiny \| [\d.]+ ms \| [\d.]+ x \| [\d.]+ %: (ended|kept) \| [\d.]+ x \|$",
        done.stdout,
        re.MULTILINE,
    )
