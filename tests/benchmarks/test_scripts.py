"""The benchmarks that only print: what they say on any machine, and the arithmetic of faults."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.equal.runs import RUNS
from benchmarks.faults import account
from benchmarks.faults.cases import FAULTS, TOTAL_STEPS
from benchmarks.faults.running import Attempt, Observed
from benchmarks.faults.table import figures_of, markdown
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
    "right": ("[rank1]: OSError: [Errno 24] Too many open files\n", ["data-open-files"]),
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


# 2 ranks, 4 samples, one of each per step: an epoch is 2 steps.
EPOCH = [((0, 1), (2, 3)), ((2, 0), (1, 3))]


def make_start(run: int, steps: dict[int, tuple[int, ...]], *, at: float = 0.0) -> account.Start:
    """One line per step, with the ids of all ranks."""
    lines = [account.Line(step, at + step, True, ids) for step, ids in steps.items()]
    return account.Start(run, 0, tuple(lines))


def test_a_start_that_goes_back_behind_two_others_takes_both_back() -> None:
    steps = [{1: (0, 1), 2: (2, 3)}, {3: (0, 1), 4: (2, 3)}, {2: (2, 3)}]
    starts = [make_start(run, done) for run, done in enumerate(steps)]
    assert account.count_lost_steps(starts) == 3
    assert [(x.step, x.ids) for x in account.kept_lines(starts)] == [(1, (0, 1)), (2, (2, 3))]


def test_samples_too_often_and_missing_are_counted_apart() -> None:
    lines = [account.Line(1, 0, True, (0, 1)), account.Line(2, 0, True, (0, 0))]
    assert account.count_samples(lines, num_samples=4, num_epochs=1) == (2, 2)


def test_lines_of_both_ranks_are_read_and_a_cut_one_is_left_out(tmp_path: Path) -> None:
    for rank in (0, 1):
        with (tmp_path / f"steps-0-0-rank-{rank}.jsonl").open("w", encoding="ascii") as file:
            for step, ids in enumerate(EPOCH, start=1):
                facts = {"step": step, "time": step, "finite": step < 2, "ids": ids[rank]}
                file.write(json.dumps(facts) + "\n")
            file.write('{"step": 3, "ti')
    (tmp_path / "steps-1-0-rank-0.jsonl").touch()  # a start that did no step
    [start] = account.read_starts(tmp_path)
    assert (start.first, start.last, len(start.lines)) == (1, 2, 4)
    assert account.count_samples(start.lines, num_samples=4, num_epochs=2) == (0, 0)
    assert account.first_poisoned_step(start.lines) == 2


def test_time_runs_from_the_fault_to_the_next_step() -> None:
    starts = [make_start(0, {1: (0,), 2: (1,)}), make_start(1, {3: (2,)}, at=10)]
    assert account.seconds_to_next_step(starts, 5.0) == 8.0
    assert account.seconds_to_next_step(starts, 20.0) is None


def observed(*statuses: int | None, steps: list[list[int]], fault: str = "kill") -> Observed:
    """Make a run by the status of each attempt, and the steps of each start."""
    attempts = [Attempt(status=s, wall_s=1.0, num_orphans=0, error="") for s in statuses]
    starts = [make_start(run, dict.fromkeys(done, ())) for run, done in enumerate(steps)]
    return Observed("bare", FAULTS[fault], attempts, starts, fault_time=0.0)


def test_each_fault_has_a_table_with_a_cell_for_each_figure() -> None:
    row = figures_of(observed(1, 0, steps=[[1, 2], [2, TOTAL_STEPS]]))
    other = figures_of(observed(1, 1, steps=[[1, 2]], fault="nan")) | {"contender": "trainer"}
    parts = markdown([other, row], FAULTS).split("\n\n")
    assert parts[0] == f"### {FAULTS['kill'].title}"
    assert parts[2] == f"### {FAULTS['nan'].title}"
    table, other_table = parts[1].splitlines(), parts[3].splitlines()
    assert len({line.count("|") for line in [*table, *other_table]}) == 1
    assert table[2].startswith("| bare | status 1; then from step 2 | 1 |")
    assert other_table[2].endswith("| - | - | - |")
