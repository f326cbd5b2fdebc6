"""Names a rank that is slow beside the others.

Ranks are compared by their own work in a step: time that a rank waits for others in a collective
does not count.
"""

import logging
from collections.abc import Mapping
from statistics import median

log = logging.getLogger(__name__)

FACTOR = 1.5
NUM_REPORTS = 5  # reports in a row before a rank counts as slow: a single one may be chance

LEAST_S = 0.001  # smaller differences are noise of the system
# On a GPU the two can't be told apart, so this is not counted as work.
BACKWARD_AND_WAIT = "backward with all-reduce"
_WORK = ("data", "forward", "backward", "optimizer")

Split = Mapping[str, float]  # of the time of a step: seconds by phase


class SlowRanks:
    """Records the ranks' splits of the step time, and reports which ranks became slow."""

    def __init__(self) -> None:
        self._slow: set[int] = set()
        self._in_a_row: dict[int, int] = {}
        self._seen: dict[int, int] = {}

    def note(self, splits: Mapping[int, tuple[int, Split]]) -> list[str]:
        """Add each rank's newest split; log and return which became slow, or no longer are."""
        if len(splits) < 2:
            return []
        work = {r: sum(split.get(name, 0.0) for name in _WORK) for r, (_, split) in splits.items()}
        told = []
        for rank, (number, split) in splits.items():
            if number == self._seen.get(rank):
                continue
            self._seen[rank] = number
            usual = median(value for other, value in work.items() if other != rank)
            is_slow = work[rank] > FACTOR * usual and work[rank] - usual > LEAST_S
            has_changed = is_slow != (rank in self._slow)
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1 if has_changed else 0
            if self._in_a_row[rank] < NUM_REPORTS:
                continue
            self._in_a_row[rank] = 0
            self._slow ^= {rank}
            text = f"rank {rank} is no longer slow: {_ms(work[rank])} of work a step"
            if is_slow:
                parts = [f"{name} {_ms(s)}" for name, s in split.items() if s > LEAST_S / 10]
                beside = f"beside {_ms(usual)} of the others (median): {', '.join(parts)}"
                text = f"rank {rank} is slow: {_ms(work[rank])} of work a step {beside}"
            log.warning("%s", text)
            told.append(text)
        return told


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
