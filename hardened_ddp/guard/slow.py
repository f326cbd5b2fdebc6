"""Tells what is slow before it looks like a hang: a rank compared with the others, or the storage.

Ranks are compared by their own work in a step: time that a rank waits for others in a collective
does not count. Storage is named while training waits for it. WHY: a stall of minutes looks like a
hang to whoever reads the log; the samples in question point to the file.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from hardened_ddp.guard.hang_rules import LEARNED_FACTOR, Report
from hardened_ddp.ranks.phase import Phase

log = logging.getLogger(__name__)

FACTOR = 1.5
NUM_REPORTS = 3  # reports in a row before a rank counts as slow: a single one may be chance
NUM_AVERAGED = 5

LEAST_S = 0.001  # smaller differences are noise of the system
# On a GPU the two can't be told apart, so this is not counted as work.
BACKWARD_AND_WAIT = "backward with all-reduce"
SLOW_AFTER_S = 30.0
TELL_EVERY_S = 60.0
_SHOWN = 8
_WORK = ("data", "forward", "backward", "optimizer")

Split = Mapping[str, float]


class Splits:
    """The last splits of this rank's step time, one of each report."""

    def __init__(self) -> None:
        self._last: deque[Split] = deque(maxlen=NUM_AVERAGED)
        self._count = 0

    def add(self, split: Split) -> None:
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
            if is_slow == (rank in self._slow):
                self._in_a_row[rank] = 0
                continue
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1
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


class SlowData:
    """Follows the waits of one rank for its data."""

    def __init__(self) -> None:
        self._due_s = SLOW_AFTER_S
        self._told_s = 0.0

    def note(
        self, report: Report, *, longest_s: float, samples: Callable[[], Sequence[int]]
    ) -> str:
        """Log and return what there is to tell of a wait that takes long, or of its end.

        longest_s: the longest such wait before. samples: those that are being read.
        """
        age_s, text = report.age_s, ""
        if report.phase != Phase.DATA or age_s < self._told_s:
            text = f"the data came after {self._told_s:.0f} s or more" if self._told_s else ""
            self._told_s, self._due_s = 0.0, SLOW_AFTER_S
        elif age_s >= max(self._due_s, 0 if self._told_s else LEARNED_FACTOR * longest_s):
            self._told_s, self._due_s = age_s, age_s + TELL_EVERY_S
            read = [sample for sample in samples() if sample >= 0][:_SHOWN]
            which = f" (samples {', '.join(map(str, read))})" if read else ""
            left_s = max(0.0, report.limit_s - age_s)
            end = "without a limit" if left_s > TELL_EVERY_S * 1e6 else f"for {left_s:.0f} s more"
            text = (
                f"slow storage: rank {report.rank} has waited {age_s:.0f} s for the data of step "
                f"{report.step}{which}. It waits {end} (--loader_timeout_s)"
            )
        # WHY here: a report sorts warnings by the module that logs them, and this is no hang
        if text:
            log.warning("%s", text)
        return text
