"""Storage that does not answer for a while: told while training waits for it.

Owns when it is told. WHY: a stall of minutes looks like a hang to whoever reads the log, and it may
end the run; the samples in question point to the file, and the storage behind it.
Does not own: when it counts as a hang (verdict.py).
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from hardened_ddp.guard.verdict import LEARNED_FACTOR, Report
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.tracker import Tracker

log = logging.getLogger(__name__)

SLOW_AFTER_S = 30.0
TELL_EVERY_S = 60.0
_SHOWN = 8


class SlowData:
    """Follows the waits of one rank for its data."""

    def __init__(self) -> None:
        self._due_s = SLOW_AFTER_S
        self._told_s = 0.0

    def tell(
        self, report: Report, *, tracker: Tracker, samples: Callable[[int], Sequence[int]]
    ) -> None:
        """Tell it in the log, if it is time. samples: those that are processed in a phase."""
        longest_s = tracker.longest_ns[Phase.DATA] / 1e9
        if text := self.note(report, longest_s=longest_s, samples=partial(samples, Phase.DATA)):
            log.warning("%s", text)

    def note(
        self, report: Report, *, longest_s: float, samples: Callable[[], Sequence[int]]
    ) -> str:
        """Return what to tell; empty: nothing. longest_s: the longest such wait before."""
        if report.phase != Phase.DATA or report.age_s < self._told_s:
            told_s, self._told_s, self._due_s = self._told_s, 0.0, SLOW_AFTER_S
            return f"the data came after {told_s:.0f} s or more" if told_s else ""
        if report.age_s < max(self._due_s, LEARNED_FACTOR * longest_s if not self._told_s else 0):
            return ""
        self._told_s, self._due_s = report.age_s, report.age_s + TELL_EVERY_S
        read = [sample for sample in samples() if sample >= 0][:_SHOWN]
        which = f" (samples {', '.join(map(str, read))})" if read else ""
        left_s = report.limit_s - report.age_s
        end = (
            "without a limit" if left_s > TELL_EVERY_S * 1e6 else f"for {max(0, left_s):.0f} s more"
        )
        return (
            f"slow storage: rank {report.rank} has waited {report.age_s:.0f} s for the data of "
            f"step {report.step}{which}. It waits {end} (--loader_timeout_s)"
        )
