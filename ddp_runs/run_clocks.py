"""Clocks that disagree: what a run folder says of times that can't be.

Owns finding them, so that watch and report can say why a state or a duration may be wrong.
Does not own: reading the files (run_files.py).
"""

from collections.abc import Iterable

from ddp_runs.run_json import Json, number_of

_TOLERANCE_S = 30.0
"""By how much the clocks of two hosts may differ before it matters."""


def clock_problems(ranks: Iterable[Json], attempts: Iterable[Json], *, now: float) -> list[str]:
    """Name ranks whose last sign of life is in the future, and attempts that end too early."""
    found = []
    for rank in ranks:
        ahead_s = number_of(rank, "now") - now
        if ahead_s > _TOLERANCE_S:
            found.append(
                f"rank-{rank['rank']}.json: is {ahead_s:.0f} s in the future: the clocks of its "
                "host and of this machine differ, so whether the rank is alive can't be told here"
            )
    if any(number_of(attempt, "now") < number_of(attempt, "began_at") for attempt in attempts):
        found.append(
            "attempts.jsonl: an attempt ends before it begins: a clock was set back, so the times "
            "of this run are not exact"
        )
    return found
