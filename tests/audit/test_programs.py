"""Programs with one planted mistake, which is found on its line, and healthy ones: not accused."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.audit_cases.case import Case
from benchmarks.audit_cases.styles import NEEDS, STYLES
from ddp_doctor.audit.catalogue import CATALOGUE
from ddp_doctor.audit.command import judge
from ddp_doctor.audit.records import Ranks, read_ranks
from ddp_doctor.audit.verdict import Verdict
from tests.audit.observed_server import run_observed
from tests.audit.programs import HEALTHY, LOOP, MISTAKES, WRAP
from tests.harness.ranks import another_server, run_ranks


@pytest.fixture(scope="module", autouse=True)
def observed() -> Iterator[None]:
    """The ranks of all programs are forked from one process."""
    with another_server("tests.audit.observed_server"):
        yield


def audit(case: Case, folder: Path) -> tuple[Ranks, list[Verdict]]:
    """Run a case; give its ranks and the verdicts."""
    if importlib.util.find_spec(needed := NEEDS.get(case.style, "torch")) is None:
        pytest.skip(f"{needed} is not installed")
    records = folder / "records"
    records.mkdir()
    script = folder / "train.py"
    script.write_text(case.source())
    run_ranks(run_observed, 2, script, records, timeout_s=40)
    ranks = read_ranks(records)
    assert len(ranks) == 2
    assert not [e for rank in ranks for e in rank.all("error")]
    verdicts = judge(ranks, hung=False)
    assert ranks.failures == []
    assert all(words in str(verdicts) for words in case.words()), verdicts
    return ranks, verdicts


QUICK = {"the tutorial", "the inner module is called"}


def cases(some: Sequence[Case]) -> list[object]:
    """Mark all but the quick cases as slow."""
    return [
        pytest.param(c, id=f"{c.style}-{c.name}", marks=() if c.name in QUICK else pytest.mark.slow)
        for c in some
    ]


@pytest.mark.parametrize("case", cases(HEALTHY))
def test_a_healthy_program_is_not_accused(case: Case, tmp_path: Path) -> None:
    ranks, verdicts = audit(case, tmp_path)
    assert [f"{v.place} {v.code}: {v.sentence}" for v in verdicts if v.is_mistake] == []
    assert all(rank.step_count >= 4 for rank in ranks)


@pytest.mark.parametrize("case", cases(MISTAKES))
def test_a_planted_mistake_is_found_on_its_line(case: Case, tmp_path: Path) -> None:
    _, verdicts = audit(case, tmp_path)
    told = [f"{v.severity} {v.place} {v.code}: {v.sentence} {v.evidence}" for v in verdicts]
    mistakes = [v for v in verdicts if v.is_mistake]
    assert {v.code for v in mistakes} in ({code} for code in case.codes), told
    assert mistakes[0].file == str(tmp_path / "train.py")
    assert mistakes[0].line in case.lines(), told
    assert mistakes[0].evidence


@pytest.mark.slow
def test_a_slow_rank_and_a_needless_search_for_unused_parameters_are_advice(tmp_path: Path) -> None:
    slow = (LOOP, f"{LOOP}            import time; time.sleep(0.02 * rank)\n")
    search = (WRAP, "    model = DDP(net, find_unused_parameters=True)\n")
    ranks, verdicts = audit(Case("slow", "plain", (slow, search)), tmp_path)
    by_code = {v.code: v for v in verdicts if not v.is_mistake}
    assert "rank 1 is slow" in by_code["slow-rank"].sentence
    assert "find-unused-needless" in by_code
    assert [v for v in verdicts if v.is_mistake] == []
    # Nobody waits for a rank that is slower by a fraction of a millisecond.
    for rank in ranks:
        for step in rank.all("step"):
            step |= {"wait_s": 1e-4, "forward_s": 0.0, "backward_s": 7e-4, "optimizer_s": 1e-4}
            step |= {"wall_s": 1e-3 + 3e-4 * rank.number, "own_s": 0.0, "collective_s": 0.0}
    assert "slow-rank" not in {v.code for v in judge(ranks, hung=False)}


def test_there_are_enough_programs_of_all_kinds() -> None:
    assert len(MISTAKES) >= 30
    assert len(HEALTHY) >= 15
    assert {c.style for c in (*MISTAKES, *HEALTHY)} == STYLES.keys() - {"spawn"}
    assert {code for c in MISTAKES for code in c.codes} <= set(CATALOGUE)
