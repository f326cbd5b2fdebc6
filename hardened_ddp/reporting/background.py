"""One thread that writes, so that training never waits for a disk.

The queue is bounded: while a disk hangs, further jobs are counted and dropped. The thread is a
daemon: it can't keep the program from ending. Without close() the last second's reports are lost.
"""

import logging
import queue
from collections.abc import Callable
from time import monotonic

from hardened_ddp.ranks.threads import HelperThread

log = logging.getLogger(__name__)

_FLUSH_EVERY_S = 1.0
_RETRY_AFTER_S = 10.0
_MAX_WAITING = 10_000


class ReportWriter:
    """Runs report jobs one after the other, and flushes soon after them."""

    def __init__(self, *, flush: Callable[[], bool], name: str) -> None:
        """flush: writes what the jobs buffered; returns whether all of it is written."""
        self._flush = flush
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: HelperThread | None = None
        self.num_refused = 0
        """Jobs that were dropped because too many were waiting."""

    def do(self, job: Callable[[], None]) -> bool:
        """Queue a job; never waits. Returns False if it is dropped, because too many wait."""
        if self._thread is None:
            self._thread = HelperThread(self._run, name=self._name)
            self._thread.start()
        if self._jobs.qsize() >= _MAX_WAITING:
            self.num_refused += 1
            return False
        self._jobs.put(job)
        return True

    def close(self, *, timeout_s: float, last: Callable[[], None] | None = None) -> bool:
        """Run the queued jobs, flush and end the thread; False if that takes over timeout_s.

        After False it may be called again, to wait for longer.
        last: a job that is never dropped, if there was any other.
        """
        if self._thread is None:
            return True
        if last is not None:
            self._jobs.put(last)
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due: float | None = None  # when to flush; None: all is written
        last_flush = float("-inf")
        while True:
            if due is not None and monotonic() >= due:  # also while one job follows another
                is_written = self._do(self._flush)
                last_flush = monotonic()
                due = None if is_written else last_flush + _RETRY_AFTER_S
            try:
                job = self._jobs.get(timeout=None if due is None else max(0.0, due - monotonic()))
            except queue.Empty:
                continue
            if job is None:
                self._do(self._flush)
                return
            self._do(job)
            if due is None:
                # WHY at once after a pause: a reader of the file then sees each report immediately.
                due = max(monotonic(), last_flush + _FLUSH_EVERY_S)

    def _do(self, work: Callable[[], object]) -> object:
        try:
            return work()
        except Exception:  # WHY broad: it would end the thread, and all later reports with it
            log.warning("a report failed and is skipped, training continues", exc_info=True)
            return None
