"""Worker fallback: fewer workers, or pipes, after a fault; back up after a time without faults.

Owns the levels that were left and when to go back to one. WHY the time doubles: a fault that
returns whenever there are more workers must not cause a restart of them every few minutes.
Does not own: which level a fault leads to (stream.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

MOST_DOUBLINGS = 6
"""How often the required time without faults doubles: from 5 minutes to 5 hours."""


@dataclass(frozen=True, slots=True)
class WorkerLevel:
    """A number of workers, and how their batches come back."""

    num_workers: int
    shares_memory: bool = True

    def __str__(self) -> str:
        workers = f"{self.num_workers or 'no'} worker{'' if self.num_workers == 1 else 's'}"
        return workers if self.shares_memory or not self.num_workers else f"{workers} through pipes"


class WorkerFallback:
    """The current level, and the levels above it that were left."""

    def __init__(
        self, top: WorkerLevel, *, quiet_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """quiet_s: seconds without a fault before going up one level; 0: never."""
        self.level = top
        self._quiet_s = quiet_s
        self._clock = clock
        self._above: list[WorkerLevel] = []
        self._num_doublings = 0
        self._moved_at = clock()
        self._went_up = False
        self.is_low = False
        """Whether a level above was left."""

    @property
    def wait_s(self) -> float:
        """Seconds without a fault that are required now."""
        return self._quiet_s * 2.0**self._num_doublings

    def go_down(self, level: WorkerLevel) -> None:
        """Leave the level for one below, because of a fault."""
        if self._went_up:  # else this is the first fault, or it follows another one
            is_soon = self._clock() - self._moved_at < 2 * self.wait_s
            self._num_doublings = min(self._num_doublings + 1, MOST_DOUBLINGS) if is_soon else 0
        self._above.append(self.level)
        self.level, self.is_low = level, True
        self._moved_at, self._went_up = self._clock(), False

    def stay(self) -> None:
        """Note a fault that does not change the level."""
        self._moved_at = self._clock()

    def is_quiet(self) -> bool:
        """Return whether there was no fault for long enough to go up."""
        return self.is_low and 0 < self.wait_s <= self._clock() - self._moved_at

    def go_up(self) -> None:
        """Go back to the level that was left last."""
        self.level = self._above.pop()
        self.is_low = bool(self._above)
        self._moved_at, self._went_up = self._clock(), True
