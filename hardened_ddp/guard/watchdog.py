"""The last resort: a stop was requested, and this rank does not reach a step boundary.

Owns a thread that receives signals at once. WHY: Python runs a signal's handler in the main thread,
between two bytecodes. A main thread that waits in a collective for a rank that hangs runs none,
until the launcher kills it (torchrun and Slurm: 30 s after SIGTERM), and all steps since the last
checkpoint are lost. The weights in its memory are those of the last completed step; the thread
saves them and ends the process.

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

# WHY: on Ctrl-C torchrun sends its ranks SIGINT and, right after it, SIGTERM: one request.
SAME_REQUEST_S = 3.0


def leave_at_once(status: int) -> NoReturn:
    """End this process without Python's cleanup.

    WHY: that takes a second or more with torch, and a restart would wait for it.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never opened
            stream.flush()
    os._exit(status)


class LastResort:
    """Waits for a signal, then for the main thread; then saves and exits."""

    def __init__(
        self, save: Callable[[], None], *, signals: Collection[int], grace_s: float
    ) -> None:
        """signals: the numbers that request a stop. Signals arrive through wakeup_fd."""
        self._save = save
        self._signals = signals
        self._wait_s = grace_s * SHARE_TO_WAIT
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._is_relieved = False
        self._thread = threading.Thread(target=self._listen, name="last-resort", daemon=True)
        self._thread.start()

    @property
    def wakeup_fd(self) -> int:
        """For signal.set_wakeup_fd: Python writes the number of each signal to it at once."""
        return self._writer.fileno()

    def relieve(self) -> None:
        """End the thread: the main thread takes care of the stop. A second call does nothing."""
        if not self._is_relieved:
            self._is_relieved = True
            # WHY not close alone: a forked loader worker holds the connection open too
            self._writer.shutdown(socket.SHUT_WR)  # wakes the thread
            self._writer.close()
            self._thread.join()
            self._reader.close()

    def _listen(self) -> None:
        received_at = None
        while True:
            left_s = None
            if received_at is not None:
                left_s = received_at + self._wait_s - time.monotonic()
            ready, _, _ = select.select([self._reader], [], [], left_s and max(0.0, left_s))
            if self._is_relieved:
                return
            if not ready:
                self._leave()
            for number in self._reader.recv(64):
                if number not in self._signals:
                    continue
                if received_at is None:
                    received_at = time.monotonic()
                elif time.monotonic() - received_at > SAME_REQUEST_S:
                    leave_at_once(128 + number)  # a second request: exit without saving

    def _leave(self) -> None:
        log.warning("a stop was requested %.0f s ago, and this rank still waits", self._wait_s)
        try:
            self._save()
        finally:
            # WHY at once: the main thread is in a wait that does not end.
            leave_at_once(PeerLostError.exit_status)
