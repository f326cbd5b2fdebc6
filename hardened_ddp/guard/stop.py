"""Stopping on request: a signal, a file or the time limit ends the run at one agreed step.

A signal handler only records the signal. A small all-reduce (a maximum) over the control group
carries it: started at one step boundary and read at a later one, so no rank waits for it. All ranks
learn of the stop at the same step, and save together. WHY not at every step: ranks agree, in the
same all-reduce, on an interval of about CHECK_EVERY_S, so that even steps of a millisecond cost
nothing more. A second signal ends this process at once.

Owns the last resort, too: a thread for a rank that does not reach a step boundary. WHY: Python runs
a signal's handler in the main thread, between two bytecodes. A main thread that waits in a
collective for a rank that hangs runs none, until the launcher kills it (torchrun and Slurm: 30 s
after SIGTERM), and all steps since the last checkpoint are lost. The weights in its memory are
those of the last completed step; the thread saves them (training/survivor_save.py) and ends the
process.
"""

import contextlib
import logging
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

from hardened_ddp.errors import PeerLostError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import SAVE_REQUESTS, environment, launcher_has_died
from hardened_ddp.ranks.threads import HelperThread
from hardened_ddp.reporting.ending import settle

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.05
# Times the number of ranks: the agreement is an all-reduce of all of them over TCP.
CHECK_PER_RANK_S = 5e-4
MAX_INTERVAL = 1000
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
STOP_FILE = "stop.request"
# Above every signal number.
_FILE_CODE = 1000
_TIME_CODE = 1001
# And above those: the launcher of rank code - _LOST_CODE died. WHY not a normal stop: the launchers
# of the other nodes still run, and may continue without it.
_LOST_CODE = 1002
SHARE_TO_WAIT = 2 / 3  # of the grace period, for the main thread; the rest is for saving

# WHY: on Ctrl-C torchrun sends its ranks SIGINT and, right after it, SIGTERM: one request.
SAME_REQUEST_S = 3.0

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


def leave_at_once(status: int) -> NoReturn:
    """End this process without Python's cleanup.

    WHY: that takes a second or more with torch, and a restart would wait for it.
    """
    status = settle(status, environment())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or never opened
            stream.flush()
    os._exit(status)


class LastResort:
    """Waits for a signal, then for the main thread; then saves and exits."""

    def __init__(self, save: Callable[[], None], *, grace_s: float) -> None:
        """Wait in a thread from now on. Main thread.

        grace_s: how long the launcher waits after its signal before it kills.
        """
        self._save = save
        self._wait_s = grace_s * SHARE_TO_WAIT
        self._reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self._is_relieved = False
        self._thread = HelperThread(self._listen, name="last-resort")
        self._thread.start()
        # Python writes the number of each signal to it at once.
        signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        # WHY: a signal to a forked worker would be written to this process's wakeup fd.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def relieve(self) -> None:
        """End the thread: the main thread takes care of the stop. Main thread."""
        # WHY first: further signals would be written to whatever file gets the descriptor next.
        signal.set_wakeup_fd(-1)
        self._is_relieved = True
        # WHY not close alone: a forked loader worker holds the connection open too
        self.writer.shutdown(socket.SHUT_WR)  # wakes the thread
        self.writer.close()
        self._thread.join()
        self._reader.close()

    def _listen(self) -> None:
        received_at = None
        while True:
            left_s = None
            if received_at is not None:
                left_s = max(0.0, received_at + self._wait_s - time.monotonic())
            ready, _, _ = select.select([self._reader], [], [], left_s)
            if self._is_relieved:  # WHY before reading: the main thread answers what is there
                return
            if not ready:
                text = "a stop was requested %.0f s ago, and this rank still waits"
                log.warning(text, self._wait_s)
                try:
                    self._save()
                finally:
                    # WHY at once: the main thread is in a wait that does not end.
                    leave_at_once(PeerLostError.exit_status)
            for number in self._reader.recv(64):
                if number not in SIGNALS:
                    continue
                if received_at is None:
                    received_at = time.monotonic()
                elif time.monotonic() - received_at > SAME_REQUEST_S:
                    leave_at_once(128 + number)  # a second request: exit without saving


class StopRequest:
    """Collects this rank's reasons to stop, and agrees on them with the other ranks."""

    def __init__(
        self, group: Group, *, time_limit: str = "", digest: Callable[[], int] | None = None
    ) -> None:
        """time_limit: as in the settings; it counts from the start of the launcher.

        digest: a number that must be the same on all ranks at each poll: see is_alike. With it a
        poll waits for its answer, unless polls are so frequent that the ranks answer a later one.
        """
        self.group = group
        self._digest = digest
        self.is_alike = True  # the digests of the last all-reduce were equal
        self._ends_at = _launched_at(group) + seconds_of(time_limit) if time_limit else None
        self.folder: Path | None = None
        self.code = 0
        self.reason = ""  # the result of the last poll
        self._noted_at = 0.0
        # The last poll checked file and time: about every CHECK_EVERY_S. The loop uses it too.
        self.has_looked = False
        self._word = torch.zeros(4, dtype=torch.int64)  # code, interval, digest, -digest
        self._check_every_s = max(CHECK_EVERY_S, CHECK_PER_RANK_S * group.world_size)
        self._pending: dist.Work | None = None
        self._interval = 1
        self._has_new_pace = False
        self._tick = self._started_tick = 0
        self._started_at = time.perf_counter()
        # Saves and exits if a signal comes, but no step boundary.
        self.last_resort: LastResort | None = None
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}

    def __enter__(self) -> "StopRequest":
        """Take over the signals that mean: save and stop. Rank-local, main thread."""
        for number in SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SAVE_REQUESTS)  # delivers those that came before
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Restore the previous signal handlers, but not after an error.

        WHY: torchrun sends signals to the surviving ranks, and this one reports its error later.
        """
        self.relieve_last_resort()
        if kind is None:
            self.release()

    def watch(self, folder: Path) -> None:
        """Look for the stop file in folder. Rank-local, before the first poll."""
        self.folder = folder
        self._started_at = time.perf_counter()

    def leave_children_alone(self) -> None:
        """Take SIGCHLD back from torch's DataLoader. Rank-local.

        WHY: its handler raises in the main thread at any bytecode when a worker dies, even inside
        an optimizer step. Without it the death shows when the next batch is requested.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def poll(self) -> str:
        """Return why all ranks stop now; empty: continue. Collective: all ranks, equally often.

        Call it between steps, and between batches of an evaluation. Usually costs a comparison.
        Raises PeerLostError, on all ranks, if the launcher of one of several nodes died.
        """
        self.has_looked = False
        self._tick += 1
        is_early = self._tick - self._started_tick < self._interval and self._pending is not None
        code = 0 if is_early else self._poll()
        if not code:
            return ""
        self.relieve_last_resort()  # all ranks stop here: no rank waits for another one
        if code >= _LOST_CODE:
            raise PeerLostError(
                f"the launcher of rank {code - _LOST_CODE}, torchrun for instance, died on one of "
                f"{self.group.launch.num_nodes} nodes; its ranks exit",
                fix="nothing, if --max_restarts lets the other launchers continue without it; else "
                "start the run again with the same --run_name",
            )
        names = {_FILE_CODE: STOP_FILE, _TIME_CODE: "time_limit"}
        self.reason = names.get(code) or signal.Signals(code).name
        return self.reason

    @contextmanager
    def another_pace(self) -> Iterator[None]:
        """Agree again on the interval of polls: the work inside takes another time than a step.

        Collective: all ranks, between the same polls.
        """
        self._change_pace()
        try:
            yield
        finally:
            self._change_pace()

    def _change_pace(self) -> None:
        self._interval, self._started_tick = 1, self._tick
        self._started_at = time.perf_counter()
        self._has_new_pace = True

    def _poll(self) -> int:
        if self.group.world_size == 1:
            now = time.perf_counter()
            if now - self._started_at > self._check_every_s:
                self._look_around()
                self._started_at = now
            return self.code
        code = self._answer()
        if not code:
            self._start()
            # WHY: where a step takes minutes, the answer at the next one would come too late
            if self._digest is not None and self._interval == 1:
                code = self._answer()
        return code

    def _answer(self) -> int:
        """Return the code of the all-reduce under way; 0: there is none. Collective: all ranks."""
        if self._pending is None:
            return 0
        self.group.finish(self._pending)
        self._pending = None
        # WHY: an all-reduce started before a change of pace has the interval of the old one
        self._interval = 1 if self._has_new_pace else max(1, int(self._word[1]))
        self.is_alike = bool(self._word[2] == -self._word[3])  # the max of x and of -x
        return int(self._word[0])

    def finish(self) -> None:
        self._answer()  # collective
        if self.folder is not None and self.group.launch.is_main:
            # WHY: the run that continues here must not stop at once.
            (self.folder / STOP_FILE).unlink(missing_ok=True)

    def release(self) -> None:
        self.relieve_last_resort()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _start(self) -> None:
        """Send this rank's code, and how many polls take CHECK_EVERY_S here."""
        now = time.perf_counter()
        num_polls = max(1, self._tick - self._started_tick)
        poll_time = max(1e-6, (now - self._started_at) / num_polls)
        self._look_around()
        launch = self.group.launch
        if self.code == signal.SIGTERM and launch.num_nodes > 1 and launcher_has_died.is_set():
            self.code = _LOST_CODE + launch.rank
        self._word[0] = self.code
        interval = min(MAX_INTERVAL, max(1, int(self._check_every_s / poll_time)))
        self._word[1] = 1 if self._has_new_pace else interval  # no poll was timed yet
        if self._digest is not None:
            self._word[2] = digest = self._digest()
            self._word[3] = -digest
        self._pending = self.group.start_max(self._word)  # collective
        self._started_tick, self._started_at = self._tick, now
        self._has_new_pace = False

    def _look_around(self) -> None:
        self.has_looked = True
        if self.code:
            return
        if self.folder is not None and (self.folder / STOP_FILE).exists():
            self.code = _FILE_CODE
        elif self._ends_at is not None and time.time() >= self._ends_at:
            self.code = _TIME_CODE

    def relieve_last_resort(self) -> None:
        """End it: the main thread takes care of the stop, or saves by itself. Main thread."""
        if self.last_resort is not None:
            self.last_resort.relieve()
            self.last_resort = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.code == 0:
            self.code, self._noted_at = number, now
        elif now - self._noted_at > SAME_REQUEST_S:
            self.release()
            signal.raise_signal(number)


def seconds_of(text: str) -> float:
    found = re.findall(r"([0-9.]+)([dhms])", text)
    return sum(float(number) * _UNITS[unit] for number, unit in found)


def _launched_at(group: Group) -> float:
    """Return when the launcher started, in seconds since the epoch: a restart keeps it."""
    import psutil  # WHY here: only runs with a limit need it

    is_launched = group.launch.launcher != "none"
    return psutil.Process(os.getppid() if is_launched else os.getpid()).create_time()
