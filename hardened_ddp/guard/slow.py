"""Detection of a rank that is slower than the others, with the split of its step time.

Owns the comparison. It compares each rank's own work in a step: time that a rank waits for others
in a collective does not count.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

FACTOR = 1.5
NUM_REPORTS = 3
"""Reports in a row before a rank counts as slow: a single one may be chance."""

NUM_AVERAGED = 5

LEAST_S = 0.001
"""Smaller differences are noise of the system."""

BACKWARD_AND_WAIT = "backward with all-reduce"
"""On a GPU the two can't be told apart, so this is not counted as work."""

_WORK = ("data", "forward", "backward", "optimizer")

Split = Mapping[str, float]


class Splits:
    """The last splits of this rank's step time, one of each report."""

    def __init__(self) -> None:
        self._last: deque[Split] = deque(maxlen=NUM_AVERAGED)
        self._count = 0

    def add(self, split: Split) -> None:
        """Add the split of one report, in seconds."""
        self._last.append(split)
        self._count += 1

    def newest(self) -> tuple[int, Split]:
        """Return the number of reports, and the mean of the last ones. From any thread."""
        count, last = self._count, tuple(self._last)
        names = dict.fromkeys(name for split in last for name in split)
        return count, {n: sum(split.get(n, 0.0) for split in last) / len(last) for n in names}


class SlowRanks:
    """Records the ranks' splits of the step time, and reports which ranks became slow."""

    def __init__(self) -> None:
        self._slow: set[int] = set()
        self._in_a_row: dict[int, int] = {}
        self._seen: dict[int, int] = {}

    def note(self, splits: Mapping[int, tuple[int, Split]]) -> list[str]:
        """Add the newest split of each rank with its number; return what to log."""
        if len(splits) < 2:
            return []
        work = {rank: work_s(split) for rank, (_, split) in splits.items()}
        told = []
        for rank, (number, split) in splits.items():
            if number == self._seen.get(rank):
                continue
            self._seen[rank] = number
            usual = median(value for other, value in work.items() if other != rank)
            is_slow = work[rank] > FACTOR * usual and work[rank] - usual > LEAST_S
            if is_slow == (rank in self._slow):
                self._in_a_row[rank] = 0
                continue
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1
            if self._in_a_row[rank] < NUM_REPORTS:
                continue
            self._in_a_row[rank] = 0
            if is_slow:
                self._slow.add(rank)
                told.append(
                    f"rank {rank} is slow: {_ms(work[rank])} of work a step beside {_ms(usual)} of "
                    f"the others (median): {describe(split)}"
                )
            else:
                self._slow.discard(rank)
                told.append(f"rank {rank} is no longer slow: {_ms(work[rank])} of work a step")
        return told


def work_s(split: Split) -> float:
    """Return the seconds of a rank's own work in a step."""
    return sum(split.get(name, 0.0) for name in _WORK)


def describe(split: Split) -> str:
    """Format a split as text, with the waiting."""
    parts = [f"{name} {_ms(s)}" for name, s in split.items() if s > LEAST_S / 10]
    return ", ".join(parts)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
