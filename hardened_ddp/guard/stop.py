"""Stopping on request: a signal, a file or the time limit ends the run at one agreed step.

Owns the signal handlers. A handler only takes a note; nothing is saved or sent inside it. The note
rides in a small all-reduce (a maximum) over the control group that is started at one step boundary
and read at a later one, so nobody waits for it: all ranks learn of the stop at the same step, and
save together. WHY not at every step: ranks agree, in the same all-reduce, on an interval that keeps
it to about CHECK_EVERY_S, so that even steps of a millisecond pay nothing.
A second signal gets torch's and Python's own handling back: it ends this process at once.
"""

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from hardened_ddp.errors import PeerLostError
from hardened_ddp.guard.watchdog import SAME_REQUEST_S, LastResort
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import SAVE_REQUESTS

log = logging.getLogger(__name__)

CHECK_EVERY_S = 0.05
MAX_INTERVAL = 1000
ENDING_S = 0.05
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
STOP_FILE = "stop.request"
# Above every signal number.
_FILE_CODE = 1000
_TIME_CODE = 1001
# And above those: the launcher of rank code - _LOST_CODE died. WHY not a stop like another: the
# launchers of the other nodes live, and go on without that one if they may.
_LOST_CODE = 1002
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


class StopRequest:
    """Collects this rank's reasons to stop, and agrees on them with the other ranks."""

    def __init__(self, group: Group, *, time_limit: str = "") -> None:
        """time_limit: as in the settings; it counts from the start of the launcher."""
        self.group = group
        self._ends_at = _launched_at(group) + seconds_of(time_limit) if time_limit else None
        self.folder: Path | None = None
        self.code = 0
        self.reason = ""
        """What the last poll said."""

        self._noted_at = 0.0
        self.has_looked = False
        """The last poll looked around, as about every CHECK_EVERY_S: time for what is done then."""

        self._notice = ""

        self._num_notices = 0
        self._told = ""
        self._word = torch.zeros(3, dtype=torch.int64)
        self._pending: dist.Work | None = None
        self._interval = 1
        self._has_new_pace = False
        self._tick = self._started_tick = 0
        self._started_at = time.perf_counter()
        self.last_resort: LastResort | None = None
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}
        self._launcher_pid = os.getppid()

    def __enter__(self) -> "StopRequest":
        """Take over the signals that mean: save and stop. Rank-local, main thread."""
        for number in SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SAVE_REQUESTS)  # what came before comes now
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Give the signals back, but not after an error.

        WHY: torchrun ends the ranks that are left, and why this one leaves is said after this.
        """
        if kind is None:
            self.release()
        else:
            self._relieve_last_resort()

    def watch(self, folder: Path) -> None:
        """Look for the stop file in folder. Rank-local, before the first poll."""
        self.folder = folder
        self._started_at = time.perf_counter()

    def start_last_resort(self, save: Callable[[], None], *, grace_s: float) -> None:
        """Have save called, and leave, where this rank hears of a stop but can't come to it.

        grace_s: how long the launcher waits after its signal before it kills. Rank-local.
        """
        self.last_resort = LastResort(save, signals=SIGNALS, grace_s=grace_s)
        fd = self.last_resort.wakeup_fd
        signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        # WHY: a forked worker that is told to end would speak into this process's ear.
        os.register_at_fork(after_in_child=_hear_nothing)

    def leave_children_alone(self) -> None:
        """Take SIGCHLD back from torch's DataLoader. Rank-local.

        WHY: its handler raises in the main thread at any bytecode when a worker dies, even inside
        an optimizer step. Without it the death shows where the next batch is asked for.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def poll(self) -> str:
        """Say why all ranks stop now; empty: go on. Collective: all ranks, equally often.

        Call it between steps, and between batches of an evaluation. Costs a comparison, mostly.
        Raises PeerLostError, on all ranks, if the launcher of one of several nodes died.
        """
        self.has_looked = False
        self._tick += 1
        is_early = self._tick - self._started_tick < self._interval and self._pending is not None
        code = 0 if is_early else self._poll()
        if not code:
            return ""
        self.reason = _describe(code)
        if self.last_resort is not None:
            self.last_resort.relieve()  # all ranks stop here: from now on, no one waits in vain
        if code >= _LOST_CODE:
            raise PeerLostError(
                f"the launcher of rank {code - _LOST_CODE}, torchrun for instance, died on one of "
                f"{self.group.launch.num_nodes} nodes; its ranks leave",
                fix="nothing, if --max_restarts lets the other launchers go on without it; else "
                "start the run again with the same --run_name",
            )
        return self.reason

    def tell(self, notice: str) -> None:
        """Have the other ranks log a notice of rank 0, too: each text once. Rank-local."""
        self._notice = notice

    @contextmanager
    def another_pace(self) -> Iterator[None]:
        """Agree anew on how often to ask: what is done inside takes another time than a step.

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
            if now - self._started_at > CHECK_EVERY_S:
                self._look_around()
                self._started_at = now
            return self.code
        code = 0
        if self._pending is not None:
            self.group.finish(self._pending)
            code = int(self._word[0])
            # WHY: what is under way since before a change of pace was measured at the old one
            self._interval = 1 if self._has_new_pace else max(1, int(self._word[1]))
            self._pending = None
            self._read_notice(int(self._word[2]))
        if not code:
            self._start()
        return code

    def finish(self) -> None:
        """Wait for the all-reduce under way. Collective: all ranks."""
        if self._pending is not None:
            self.group.finish(self._pending)
            self._pending = None
        if self.folder is not None and self.group.launch.is_main:
            # WHY: the run that continues here must not stop at once.
            (self.folder / STOP_FILE).unlink(missing_ok=True)

    def release(self) -> None:
        """Give the signals back to whoever had them. Rank-local."""
        self._relieve_last_resort()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _start(self) -> None:
        """Send this rank's word: its code, and how many polls make up CHECK_EVERY_S here."""
        now = time.perf_counter()
        num_polls = max(1, self._tick - self._started_tick)
        poll_time = max(1e-6, (now - self._started_at) / num_polls)
        self._look_around()
        if self.code == signal.SIGTERM and self._launcher_died():
            self.code = _LOST_CODE + self.group.launch.rank
        self._word[0] = self.code
        interval = min(MAX_INTERVAL, max(1, int(CHECK_EVERY_S / poll_time)))
        self._word[1] = 1 if self._has_new_pace else interval  # no poll was timed yet
        self._word[2] = self._tell_notice()
        self._pending = self.group.start_max(self._word)  # collective
        self._started_tick, self._started_at = self._tick, now
        self._has_new_pace = False

    def _tell_notice(self) -> int:
        """Leave a new notice where the others find it; give the number of notices."""
        if self._notice != self._told and self.group.launch.is_main:
            self._told = self._notice
            if self._notice:
                self._num_notices += 1
                self.group.publish(f"notice/{self._num_notices}", self._notice)
        return self._num_notices

    def _read_notice(self, number: int) -> None:
        if number > self._num_notices:
            self._num_notices = number
            log.warning("rank 0: %s", self.group.published(f"notice/{number}"))

    def _look_around(self) -> None:
        """See whether the stop file is there, or the time is over."""
        self.has_looked = True
        if self.code:
            return
        if self.folder is not None and (self.folder / STOP_FILE).exists():
            self.code = _FILE_CODE
        elif self._ends_at is not None and time.time() >= self._ends_at:
            self.code = _TIME_CODE

    def _relieve_last_resort(self) -> None:
        if self.last_resort is not None:
            signal.set_wakeup_fd(-1)
            self.last_resort.relieve()
            self.last_resort = None

    def _launcher_died(self) -> bool:
        """Say whether SIGTERM came because this node's launcher died, among several that live."""
        if self.group.launch.num_nodes == 1:
            return False
        import psutil  # WHY here: only a run that is stopped needs it

        # WHY wait: the signal comes while the launcher is still ending, thread by thread
        time.sleep(max(0.0, self._noted_at + ENDING_S - time.monotonic()))
        if os.getppid() != self._launcher_pid:
            return True
        try:
            return psutil.Process(self._launcher_pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.code == 0:
            self.code, self._noted_at = number, now
        elif now - self._noted_at > SAME_REQUEST_S:
            self.release()
            signal.raise_signal(number)


def _hear_nothing() -> None:
    signal.set_wakeup_fd(-1)


def _describe(code: int) -> str:
    if code == 0 or code >= _LOST_CODE:
        return ""
    return {_FILE_CODE: STOP_FILE, _TIME_CODE: "time_limit"}.get(code) or signal.Signals(code).name


def seconds_of(text: str) -> float:
    """Give the seconds of a time such as 1d12h, 3h55m or 90s."""
    found = re.findall(r"([0-9.]+)([dhms])", text)
    return sum(float(number) * _UNITS[unit] for number, unit in found)


def _launched_at(group: Group) -> float:
    """When the launcher started, in seconds since the epoch: a restart does not set it back."""
    import psutil  # WHY here: only runs with a limit need it

    is_launched = group.launch.launcher != "none"
    return psutil.Process(os.getppid() if is_launched else os.getpid()).create_time()
