"""The last resort: a stop was asked for, and this rank does not come to a step boundary.

Owns a thread that hears signals at once. WHY: Python runs a signal's handler in the main thread,
between two lines of Python. A main thread that waits in a collective for a rank that hangs runs
none, until the launcher kills it (torchrun and Slurm: 30 s after SIGTERM) with all that was done
since the last checkpoint. The weights in its memory are those of the last completed step; the
thread saves them and ends the process.

Does not own: the handlers (stop.py), what is saved and by which rank (training/survivor_save.py).
"""

import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import NoReturn

from hardened_ddp.errors import PeerLostError

log = logging.getLogger(__name__)

SHARE_TO_WAIT = 2 / 3
"""Of the grace period, for the main thread; the rest is for saving."""

# WHY: on Ctrl-C torchrun sends its workers SIGINT and, at once, SIGTERM: that is one request.
SAME_REQUEST_S = 3.0


def leave_at_once(status: int) -> NoReturn:
    """End this process without Python's own clearing up.

    WHY: that takes torch a second or more, for which a restart would wait.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never opened
            stream.flush()
    os._exit(status)


class LastResort:
    """Waits for a signal, then for the main thread; then saves and leaves."""

    def __init__(
        self, save: Callable[[], None], *, signals: Collection[int], grace_s: float
    ) -> None:
        """signals: the numbers that ask for a stop. Signals come in through wakeup_fd."""
        self._save = save
        self._signals = signals
        self._wait_s = grace_s * SHARE_TO_WAIT
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._is_relieved = False
        self._thread = threading.Thread(target=self._listen, name="last-resort", daemon=True)
        self._thread.start()

    @property
    def wakeup_fd(self) -> int:
        """For signal.set_wakeup_fd: the number of each signal is written to it at once."""
        return self._mouth.fileno()

    def relieve(self) -> None:
        """End the thread: the main thread takes care of the stop. A second call does nothing."""
        if not self._is_relieved:
            self._is_relieved = True
            self._mouth.close()  # which the thread hears
            self._thread.join()
            self._ear.close()

    def _listen(self) -> None:
        heard_at = None
        while True:
            left_s = None if heard_at is None else heard_at + self._wait_s - time.monotonic()
            ready, _, _ = select.select([self._ear], [], [], left_s and max(0.0, left_s))
            if self._is_relieved:
                return
            if not ready:
                self._leave()
            for number in self._ear.recv(64):
                if number not in self._signals:
                    continue
                if heard_at is None:
                    heard_at = time.monotonic()
                elif time.monotonic() - heard_at > SAME_REQUEST_S:
                    leave_at_once(128 + number)  # asked twice: at once, with the last checkpoint

    def _leave(self) -> None:
        log.warning("a stop was asked for %.0f s ago, and this rank still waits", self._wait_s)
        try:
            self._save()
        finally:
            # WHY so hard: the main thread is in a wait that does not end.
            leave_at_once(PeerLostError.exit_status)
