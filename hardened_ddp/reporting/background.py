"""One thread that writes, so that training never waits for a disk.

The queue is bounded: while a disk hangs, further jobs are counted and dropped. The thread is a
daemon: it can't keep the program from ending. Without close() what waits in the queue is lost.
"""

import contextlib
import logging
import queue
from collections.abc import Callable

from hardened_ddp.ranks.threads import HelperThread

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 10.0
_MAX_WAITING = 10_000


class ReportWriter:
    """Runs report jobs one after the other, and flushes after each."""

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
        wait_s: float | None = None
        is_over = False
        while not is_over:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=wait_s)
                is_over = job is None
                if job is not None:
                    self._do(job)
            # WHY again without a job: the disk may have room by then
            wait_s = None if self._do(self._flush) else _RETRY_AFTER_S

    def _do(self, work: Callable[[], object]) -> object:
        try:
            return work()
        except Exception:  # WHY broad: it would end the thread, and all later reports with it
            log.warning("a report failed and is skipped, training continues", exc_info=True)
            return None
