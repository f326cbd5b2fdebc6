"""Judging steps from records: what a comparison of the ranks must not mix up."""

from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.updates import judge_updates
from ddp_doctor.audit.weights import has_local_steps


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
