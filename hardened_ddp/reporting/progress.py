"""Signs of life while a run starts: a thread names the part that takes long.

The tracker is told of each part.
Does not own: the lines of a run that trains (training/run_report.py).
"""

import logging
import threading

from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.ranks.threads import HelperThread
from hardened_ddp.reporting.log import start_logging, stop_logging

log = logging.getLogger(__name__)

FIRST_SIGN_S = 2.0
_TICK_S = 0.5
_END_LIMIT_S = 2.0


class StartUp:
    """Logging, and the signs of life, from now to close()."""

    def __init__(
        self, tracker: Tracker, launch: Launch, *, debug: bool, first_sign_s: float = FIRST_SIGN_S
    ) -> None:
        start_logging(rank=launch.rank, world_size=launch.world_size, debug=debug)
        self._tracker = tracker
        self._first_sign_s = first_sign_s
        self._end = threading.Event()
        self._thread = HelperThread(self._watch, name="start-up")
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it still runs, and logging."""
        self._end.set()
        self._thread.join(_END_LIMIT_S)
        stop_logging()

    def _watch(self) -> None:
        seen, next_sign_s = "", 0.0
        tick_s = min(_TICK_S, self._first_sign_s / 4)
        while not self._end.wait(tick_s):
            tracker = self._tracker
            if tracker.num_steps > 0 or tracker.phase in (Phase.EVALUATION, Phase.CHECKPOINT):
                return
            part, age_s = tracker.part_of_start()
            if part != seen:
                seen, next_sign_s = part, self._first_sign_s
            if age_s >= next_sign_s:
                log.info("%s: %.0f s so far", part, age_s)
                next_sign_s = max(3 * next_sign_s, age_s + self._first_sign_s)
