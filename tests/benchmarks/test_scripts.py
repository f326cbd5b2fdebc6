"""The benchmarks that only print: each runs on any machine, and says what it is to say."""

import re

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
