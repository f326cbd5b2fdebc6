"""The benchmark of faults: its arithmetic, its words, and that it lists what it has."""

import json
from pathlib import Path

from benchmarks.faults import account
from benchmarks.faults.cases import FAULTS, TOTAL_STEPS
from benchmarks.faults.running import Attempt, Observed
from benchmarks.faults.table import figures_of, markdown

# 2 ranks, 4 samples, one of each per step: an epoch is 2 steps.
EPOCH = [((0, 1), (2, 3)), ((2, 0), (1, 3))]


def make_start(run: int, steps: dict[int, tuple[int, ...]], *, at: float = 0.0) -> account.Start:
    """One line per step, with the ids of all ranks."""
    lines = [account.Line(step, at + step, True, ids) for step, ids in steps.items()]
    return account.Start(run, 0, tuple(lines))


def test_a_start_that_goes_back_behind_two_others_takes_both_back() -> None:
    starts = [
        make_start(0, {1: (0, 1), 2: (2, 3)}),
        make_start(1, {3: (0, 1), 4: (2, 3)}),
        make_start(2, {2: (2, 3)}),
    ]
    assert account.count_lost_steps(starts) == 3
    assert [(x.step, x.ids) for x in account.kept_lines(starts)] == [(1, (0, 1)), (2, (2, 3))]


def test_samples_too_often_and_missing_are_counted_apart() -> None:
    lines = [account.Line(1, 0, True, (0, 1)), account.Line(2, 0, True, (0, 0))]
    assert account.count_samples(lines, num_samples=4, num_epochs=1) == (2, 2)


def test_lines_of_both_ranks_are_read_and_a_cut_one_is_left_out(tmp_path: Path) -> None:
    for rank in (0, 1):
        lines = [
            json.dumps({"step": step, "time": step, "finite": step < 2, "ids": ids[rank]})
            for step, ids in enumerate(EPOCH, start=1)
        ]
        text = "\n".join(lines) + '\n{"step": 3, "ti'
        (tmp_path / f"steps-0-0-rank-{rank}.jsonl").write_text(text, encoding="ascii")
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
