"""The heartbeat of a run lock: its holder counts up in the file, and others watch the count.

Owns the thread of the holder, and the watch of another process that wants the lock.
WHY a count in the file: the file system is the only thing that two hosts are sure to share. Their
clocks may differ, and the times of a file are cached or set by either host on some file systems.
What goes wrong here: a holder that is stopped and continued later is silent too. It finds out that
its lock was taken over before it writes the next checkpoint (run_lock.py).
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from hardened_ddp.ranks.awake import AwakeTime

log = logging.getLogger(__name__)

BEAT_EVERY_S = 3.0
SILENT_AFTER_S = 15.0
"""A count that stays the same for so long belongs to a process that is dead or stopped."""

_WATCH_FACTOR = 2  # a holder that still counts after so many times SILENT_AFTER_S stays
_LOOK_EVERY_S = 0.25
_WIDTH = 12
_BEFORE = b'{"beats": '


def with_count(body: bytes, count: int = 0) -> bytes:
    """Put the count before the other members of a JSON object, at a fixed place and width."""
    return b"%s%*d, %s" % (_BEFORE, _WIDTH, count, body.removeprefix(b"{"))


class LockHeartbeat:
    """Counts up in an open lock file until it is stopped."""

    def __init__(self, descriptor: int, *, every_s: float = BEAT_EVERY_S) -> None:
        """Write the first count. WHY now: a count of 0 says that this file system can't do it."""
        # WHY its own: the thread may hang in a write while the lock is released
        self._descriptor = os.dup(descriptor)
        self._every_s = every_s
        self._count = 0
        self._end = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="lock-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which may hang in a write: then do not wait for it."""
        self._end.set()
        self._thread.join(self._every_s)

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            self._beat()
        os.close(self._descriptor)

    def _beat(self) -> None:
        try:
            os.pwrite(self._descriptor, b"%*d" % (_WIDTH, self._count + 1), len(_BEFORE))
            os.fsync(self._descriptor)  # WHY: other hosts see it only then, on NFS
            self._count += 1
        except OSError as error:
            log.debug("no heartbeat in the run lock: %s", error)


def is_silent(
    read: Callable[[], bytes | None], *, silent_after_s: float, every_s: float = _LOOK_EVERY_S
) -> bool:
    """Watch a lock that may belong to another host; return whether it does not change any more.

    read returns its content, None if it is gone. Waits for silent_after_s, and at most twice as
    long for a holder that is about to leave.
    """
    content = read()
    watched, changed_s = AwakeTime(4 * every_s), 0.0
    while content is not None:
        now_s = watched.passed_s()
        if now_s - changed_s >= silent_after_s:
            return True
        if now_s >= _WATCH_FACTOR * silent_after_s:
            return False
        time.sleep(every_s)
        if (found := read()) != content:
            content, changed_s = found, now_s
    return True
