"""What strikes ranks from outside: signals, limits, files, a port.

Owns: the moment at which a rank that pauses is struck, and what is done between two starts.
Does not own: what a rank does to itself (drills/injectors.py).
"""

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drills.fault import Fault
from drills.injections import Board, Pause
from drills.processes import Ranks, send
from hardened_ddp.checkpoint.listing import find_newest
from hardened_ddp.checkpoint.manifest import STATE_NAME
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME

PATIENCE_S = 8.0
"""How long ranks have to leave after one has failed; then SIGTERM, and once more then SIGKILL."""

_FULL_BYTES = 48 * 1024
"""As large may a file become on a full disk: logs fit, a checkpoint does not."""


class Outside:
    """Strikes the ranks of one drill, over all of its starts."""

    def __init__(self, fault: Fault, board: Board, run: Path, *, num_ranks: int) -> None:
        self.fault, self.board, self.run = fault, board, run
        self.num_ranks = num_ranks
        self.has_struck = False
        self._stopped: set[int] = set()
        self._failed_at: float | None = None
        self._has_asked = False

    def look(self, ranks: Ranks) -> None:
        """Strike if it is the moment, and let those that held still go on."""
        for pause in self.board.waiting():
            self._strike(pause, ranks)
            self.board.end(pause)
        if self.fault.outside == "at a checkpoint" and not self.has_struck:
            # WHY so: the name of a checkpoint on its way to the disk; it is there for a moment.
            names = os.listdir(self.run / CHECKPOINTS_NAME) if self._has_checkpoints() else []
            if any(name.startswith(".partial") for name in names):
                self._send(ranks, 0, self.fault.signal)

    def act_as_launcher(self, ranks: Ranks) -> None:
        """End the ranks that are left when one has failed, as torchrun does, with more patience.

        WHY patience: those that can are to leave by themselves. A stopped one can't.
        """
        statuses = ranks.statuses
        living = [rank for rank, status in enumerate(statuses) if status is None]
        if not living or not any(statuses):
            self._failed_at = None
            return
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if set(living) <= self._stopped or now - self._failed_at > 2 * PATIENCE_S:
            for rank in living:
                self._signal(ranks, rank, signal.SIGKILL)
        elif now - self._failed_at > PATIENCE_S and not self._has_asked:
            self._has_asked = True
            for rank in living:
                self._signal(ranks, rank, signal.SIGTERM)

    def mend(self) -> None:
        """Take the cause away before the next start; or break what the first one left."""
        self.board.claim("mended")
        if self.fault.outside in ("torn checkpoint", "flipped checkpoint"):
            newest, _ = find_newest(self.run / CHECKPOINTS_NAME)
            if newest is not None:
                _damage(newest.path / STATE_NAME, is_torn=self.fault.outside == "torn checkpoint")
                self.has_struck = True

    def _strike(self, pause: Pause, ranks: Ranks) -> None:
        match self.fault.outside:
            case "full disk":
                self.has_struck = True
                limit = _FULL_BYTES if pause.number == 0 else resource.RLIM_INFINITY
                pid = ranks.pid_of(pause.victim)
                if pid is not None:
                    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
            case "strike all":
                for rank in range(self.num_ranks):
                    self._send(ranks, rank, self.fault.signal)
            case "torchrun killed":
                self.has_struck = True
                launcher = ranks.pid_of(-1)
                if launcher is not None:
                    send(launcher, self.fault.signal)
            case _:
                self._send(ranks, pause.victim, pause.signal or self.fault.signal)

    def _send(self, ranks: Ranks, rank: int, number: int) -> None:
        self.has_struck = True
        if number == signal.SIGSTOP:
            self._stopped.add(rank)
        self._signal(ranks, rank, number)

    def _signal(self, ranks: Ranks, rank: int, number: int) -> None:
        if (pid := ranks.pid_of(rank)) is not None:
            send(pid, number)

    def _has_checkpoints(self) -> bool:
        return (self.run / CHECKPOINTS_NAME).is_dir()


@contextmanager
def occupied(port: int) -> Iterator[None]:
    """Listen on port, as another program."""
    with socket.create_server(("127.0.0.1", port)):
        yield


def _damage(path: Path, *, is_torn: bool) -> None:
    size = path.stat().st_size
    if is_torn:
        os.truncate(path, size // 2)
        return
    with path.open("r+b") as file:
        file.seek(size // 2)
        byte = file.read(1)[0]
        file.seek(size // 2)
        file.write(bytes([byte ^ 1]))
