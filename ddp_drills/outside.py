"""Faults from outside of the ranks: signals, limits, files, a port."""

import resource
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_drills.fault import Fault
from ddp_drills.injections import Board, Pause
from ddp_drills.processes import Ranks, send
from hardened_ddp.checkpoint.folder import STATE_NAME, find_newest
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME

# How long ranks have to exit after one has failed. Then SIGTERM; after the same time SIGKILL.
PATIENCE_S = 8.0
# The limit of a file's size on a full disk: logs fit, a checkpoint does not.
_FULL_BYTES = 48 * 1024


class Outside:
    """Causes the faults from outside of one drill, over all of its starts."""

    def __init__(self, fault: Fault, board: Board, run: Path, *, num_ranks: int) -> None:
        self.fault, self.board, self.run, self.num_ranks = fault, board, run, num_ranks
        self.has_acted = self._has_asked = False
        self._stopped: set[int] = set()
        self._failed_at: float | None = None

    def look(self, ranks: Ranks) -> None:
        """Cause the fault if a rank pauses for it, and end the pause."""
        for pause in self.board.waiting():
            self._act(pause, ranks)
            self.board.end(pause)
        is_due = self.fault.outside == "at a checkpoint" and not self.has_acted
        # WHY the name: a checkpoint has it while it is written, which takes only a moment.
        if is_due and any((self.run / CHECKPOINTS_NAME).glob(".partial*")):
            self._send(ranks, 0, self.fault.signal)

    def act_as_launcher(self, ranks: Ranks) -> None:
        """End the surviving ranks when one has failed; not at once: most exit by themselves."""
        statuses = ranks.statuses
        living = [rank for rank, status in enumerate(statuses) if status is None]
        if not living or not any(statuses):
            self._failed_at = None
            return
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if set(living) <= self._stopped or now - self._failed_at > 2 * PATIENCE_S:
            _signal_all(ranks, living, signal.SIGKILL)
        elif now - self._failed_at > PATIENCE_S and not self._has_asked:
            self._has_asked = True
            _signal_all(ranks, living, signal.SIGTERM)

    def prepare_next_start(self) -> None:
        """Remove the cause before the next start; or damage a checkpoint of the first one."""
        self.board.claim("cause removed")
        kind, newest = self.fault.outside, find_newest(self.run / CHECKPOINTS_NAME)[0]
        if kind in ("torn checkpoint", "flipped checkpoint") and newest is not None:
            _damage(newest.path / STATE_NAME, is_torn=kind == "torn checkpoint")
            self.has_acted = True

    def _act(self, pause: Pause, ranks: Ranks) -> None:
        self.has_acted = True
        match self.fault.outside:
            case "full disk":
                limit = _FULL_BYTES if pause.number == 0 else resource.RLIM_INFINITY
                if (pid := ranks.pid_of(pause.victim)) is not None:
                    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
            case "all ranks":
                _signal_all(ranks, range(self.num_ranks), self.fault.signal)
            case "torchrun killed":
                _signal_all(ranks, [-1], self.fault.signal)
            case _:
                self._send(ranks, pause.victim, pause.signal or self.fault.signal)

    def _send(self, ranks: Ranks, rank: int, number: int) -> None:
        self.has_acted = True
        if number == signal.SIGSTOP:
            self._stopped.add(rank)
        _signal_all(ranks, [rank], number)


def _signal_all(ranks: Ranks, chosen: Iterable[int], number: int) -> None:
    """Send a signal to those of the chosen ranks that still run; -1: to torchrun."""
    for pid in filter(None, [ranks.pid_of(rank) for rank in chosen]):
        send(pid, number)


@contextmanager
def occupied(holder: socket.socket) -> Iterator[None]:
    """Listen on the port of holder, as another program would."""
    with socket.create_server(("127.0.0.1", holder.getsockname()[1])):
        yield


def _damage(path: Path, *, is_torn: bool) -> None:
    content, middle = bytearray(path.read_bytes()), path.stat().st_size // 2
    content[middle] ^= 1
    path.write_bytes(content[:middle] if is_torn else content)
