"""Limits on waits: a call that may never return, and time in which this process could run.

What goes wrong here: a device behind an all-reduce that never ends, a store whose server hangs.
Such a call can't be cancelled: its thread stays until the process ends.
Does not own: the limits. Those that torch keeps inside of a collective follow the clock.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

_LONGEST_GAP_S, _LONGEST_NAP_S = 1.0, 0.005

T = TypeVar("T")


def call_within(question: Callable[[], T], limit_s: float) -> T:
    """Call question; return its result or raise what it raises. Rank-local.

    Raises TimeoutError if it takes longer than limit_s.
    """
    answers: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((question(),))
        except Exception as error:  # WHY broad: raised again in the thread that waits
            answers.put(error)

    threading.Thread(target=ask, name="ask-within", daemon=True).start()
    try:
        answer = answers.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer for {limit_s:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer[0]


class Work(Protocol):
    """A collective under way, as torch.distributed returns it."""

    def is_completed(self) -> bool: ...
    def wait(self) -> bool: ...


class AwakeTime:
    """Adds up the time between calls of passed_s; a gap counts for at most longest_gap_s.

    WHY not the clock: a job that was stopped as a whole for an hour (SIGSTOP, Slurm's suspend, a
    laptop that sleeps) has not waited for an hour. When it continues, each rank would find its
    limit passed, although all the others continue at the same moment.
    """

    def __init__(self, longest_gap_s: float) -> None:
        """longest_gap_s: a few times the planned interval between two calls."""
        self._longest_gap_s = longest_gap_s
        self._last = time.monotonic()
        self._passed_s = 0.0

    def passed_s(self) -> float:
        """Return the seconds awake since the start."""
        now = time.monotonic()
        self._passed_s += min(now - self._last, self._longest_gap_s)
        self._last = now
        return self._passed_s


def finish_work(work: Work, *, limit_s: float) -> None:
    """Wait for a collective whose own timeout is long. Raises RuntimeError if it fails or lasts."""
    waited, nap_s = AwakeTime(_LONGEST_GAP_S), 1e-5
    while not work.is_completed():
        if waited.passed_s() > limit_s:
            raise RuntimeError(f"Timed out waiting {limit_s:g} s for the other ranks")
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    work.wait()
