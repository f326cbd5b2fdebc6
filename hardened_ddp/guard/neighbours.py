"""The other ranks of this machine, inspected from outside, and killed where they can't exit.

A pid may mean a process of another container, or another one some time later. So a neighbour is of
the same boot and namespace of process ids, and a pidfd holds it from the start on.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from hardened_ddp.guard.hang_rules import HELD, STOPPED, UNINTERRUPTIBLE, Report
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import (
    HEART,
    LIMITS,
    PHASE,
    SAMPLE,
    SINCE,
    STEP,
    Phase,
    Tracker,
    open_words,
)
from hardened_ddp.ranks.process import stat_fields, this_process
from hardened_ddp.ranks.stacks import ask_for_stacks

TRACED, GONE = "t", "gone"


@dataclass(slots=True)
class Neighbour:
    """Another rank of this machine."""

    rank: int
    pid: int
    pidfd: int
    words: memoryview
    own: Tracker  # of this rank. All ranks learn the same limits of phases, and its are up to date.
    stacks_fd: int
    stopped_limit_s: float  # how long the process may be stopped
    heart: int = -1
    silent_s: float = 0.0  # how long its watch has not ticked while ours did

    def look(self, awake_s: float) -> None:
        heart = self.words[HEART]
        self.silent_s = 0.0 if heart != self.heart else self.silent_s + awake_s
        self.heart = heart

    @property
    def is_lost(self) -> bool:
        """Whether it is silent for longer than its limit, or stopped; not in a debugger."""
        if self.silent_s <= self.stopped_limit_s:
            return False
        state = self.state()
        is_late = state == STOPPED or self.silent_s > self._limit_s(self.words[PHASE]) > 0
        return is_late and state not in (TRACED, GONE)

    def state(self) -> str:
        fields = stat_fields(self.pid)
        if not fields or fields[0] in "ZX":
            return GONE
        return fields[0] if fields[0] in (STOPPED, UNINTERRUPTIBLE, TRACED) else HELD

    def report(self) -> Report:
        words = self.words
        phase = words[PHASE]
        has_sample = phase == Phase.DATA and words[SAMPLE] >= 0
        return Report(
            rank=self.rank,
            step=words[STEP],
            phase=phase,
            age_s=(time.monotonic_ns() - words[SINCE]) / 1e9,
            limit_s=self._limit_s(phase),
            samples=(words[SAMPLE],) if has_sample else (),
            state=self.state() if self.is_lost else "",
        )

    def _limit_s(self, phase: int) -> float:
        return self.own.words[LIMITS + phase] / 1e9

    def stacks(self) -> str:
        if self.state() == STOPPED:
            return "no stacks: the process is stopped and can't run the code that writes them\n"
        found = ask_for_stacks(self.pid, self.stacks_fd)
        return found or f"no stacks: the process does not answer (state {self.state()})\n"

    def kill(self) -> None:
        """Kill it with SIGKILL. A pidfd never means another process."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


def find_neighbours(
    group: Group, fds: tuple[int, int], *, stopped_limit_s: float
) -> list[Neighbour]:
    """Find the other ranks of this machine, while none of them is stopped. Collective: all ranks.

    fds: the descriptors of the heartbeat and the stacks of this rank; -1 without.
    """
    found = []
    place = this_process().place
    me = [place, os.getpid(), *fds]
    for rank, entry in enumerate(group.gather_json(me)):  # collective
        its_place, pid, heartbeat_fd, stacks_fd = entry
        if rank == group.launch.rank or its_place != place or heartbeat_fd < 0:
            continue
        with contextlib.suppress(OSError, ValueError):  # it has ended, or may not be looked at
            words, pidfd = open_words(pid, heartbeat_fd), os.pidfd_open(pid)
            its_own = (words, group.tracker, stacks_fd, stopped_limit_s)
            found.append(Neighbour(rank, pid, pidfd, *its_own))
    return found
