"""Judging how programs ended, from records."""

from ddp_doctor.audit.endings import judge_endings
from ddp_doctor.audit.records import Rank, Ranks

LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:13215"


def rank_with(number: int, *, steps: int, error: str = "") -> Rank:
    rank = Rank(number, {"world": "2", "rank": str(number)})
    rank.add({"k": "step", "o": 0, "n": steps})
    rank.add({"k": "exit", "error": error, "code": int(bool(error)), "line": "/x/train.py:63"})
    return rank


def codes_of(*ranks: Rank) -> list[tuple[str, int]]:
    verdicts = judge_endings(Ranks({rank.number: rank for rank in ranks}), hung=False)
    return [(verdict.code, verdict.line) for verdict in verdicts]


def test_a_rank_that_lost_ranks_which_had_finished_was_alone_in_a_collective() -> None:
    finished, alone = rank_with(1, steps=48), rank_with(0, steps=48, error=LOST)
    assert codes_of(alone, finished) == [("collectives-differ", 63)]


def test_a_lost_connection_is_an_echo_of_another_failure_and_of_uneven_batches() -> None:
    alone = rank_with(0, steps=48, error=LOST)
    assert codes_of(alone, rank_with(1, steps=40)) == []
    failed = rank_with(1, steps=48, error="KeyError: 3")
    assert codes_of(alone, failed) == [("exception", 63)]
