"""Judging steps and ends of programs from records: what a comparison must not mix up."""

from ddp_doctor.audit.endings import judge_endings
from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.updates import judge_updates
from ddp_doctor.audit.weights import has_local_steps

LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:13215"


def rank_with(number: int, sampled: list[int]) -> Rank:
    """Make a rank that clips averaged gradients in each sampled step."""
    process: Record = {"world": "2", "rank": str(number)}
    rank = Rank(number, process)
    for step in sampled:
        rank.add({"k": "clip", "line": "train.py:9", "next_steps": {"0": step}, "g": [step],
                  "is_scaled": False})  # fmt: skip
        rank.add({"k": "step", "o": 0, "n": step, "g": [7]})
    return rank


def test_ranks_that_sampled_other_steps_are_not_accused_of_clipping_too_early() -> None:
    ranks = Ranks({0: rank_with(0, [*range(1, 13)]), 1: rank_with(1, [1, 2, 3, 4, 6, 8, 10, 12])})
    # the record of the optimizer is missing on purpose: only clipping is judged
    assert list(judge_updates(ranks)) == []


def test_equal_weights_of_a_second_model_are_no_local_steps_of_the_first() -> None:
    first, other = rank_with(0, []), rank_with(1, [])
    for number, rank in enumerate((first, other)):
        for step in (1, 2):  # of a GAN whose generator is past DDP
            for optimizer, weights in ((0, [10 * step + number]), (1, [step])):
                record: Record = {"o": optimizer, "n": step, "g": [7], "w": weights}
                rank.add(record | {"k": "step", "before": weights})
    assert not has_local_steps(first, other)


def ended(number: int, *, steps: int, error: str = "") -> Rank:
    rank = Rank(number, {"world": "2", "rank": str(number)})
    rank.add({"k": "step", "o": 0, "n": steps})
    rank.add({"k": "exit", "error": error, "code": int(bool(error)), "line": "/x/train.py:63"})
    return rank


def codes_of(*ranks: Rank) -> list[tuple[str, int]]:
    verdicts = judge_endings(Ranks({rank.number: rank for rank in ranks}), hung=False)
    return [(verdict.code, verdict.line) for verdict in verdicts]


def test_a_rank_that_lost_ranks_which_had_finished_was_alone_in_a_collective() -> None:
    finished, alone = ended(1, steps=48), ended(0, steps=48, error=LOST)
    assert codes_of(alone, finished) == [("collectives-differ", 63)]


def test_a_lost_connection_is_an_echo_of_another_failure_and_of_uneven_batches() -> None:
    alone = ended(0, steps=48, error=LOST)
    assert codes_of(alone, ended(1, steps=40)) == []
    failed = ended(1, steps=48, error="KeyError: 3")
    assert codes_of(alone, failed) == [("exception", 63)]
