"""The watch for hangs: names the rank that makes no progress, and where; then saves and exits.

A thread of each rank checks, about once a second, the heartbeat of this rank and those of the other
ranks of its machine (neighbours.py). If a phase takes longer than its limit, it raises the alarm.
Then the threads of all ranks write Python's stacks to RUN/hangs and agree (hang_consensus.py) on
which ranks hang, by the rules of hang_rules.py. If one does, they save the last completed step,
kill the ranks that can't exit by themselves, and exit with a status on which the launcher starts
again. So does a rank that waits on a GPU for one whose process ended.

Time counts only while the thread itself runs: a job that was stopped as a whole and continued, or a
machine that slept, did not hang. Neither does a rank in a debugger. A process that is alone on its
machine while native code holds the GIL does not exit.
"""

import contextlib
import faulthandler
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hardened_ddp.errors import HangError, HardenedError, PeerLostError
from hardened_ddp.guard.hang_consensus import NUM_WITNESSES, HangConsensus
from hardened_ddp.guard.hang_rules import Hang, Report, decide, limits_ns, longest_wait_s
from hardened_ddp.guard.neighbours import GONE, Neighbour, find_neighbours
from hardened_ddp.guard.slow import SlowRanks, Split
from hardened_ddp.guard.stop import leave_at_once
from hardened_ddp.ranks.group import Group, lost_peer, nccl_trace
from hardened_ddp.ranks.launch import environment, log_failure
from hardened_ddp.ranks.phase import (
    FIRST_WAIT,
    HEART,
    LIMITS,
    NUM_PHASES,
    PHASE,
    SINCE,
    STEP,
    Phase,
)
from hardened_ddp.ranks.stacks import is_debugged, offer_stacks, withdraw_stacks
from hardened_ddp.ranks.threads import AwakeTime, HelperThread, call_within, keep_ready
from hardened_ddp.reporting.ending import write_error_file
from hardened_ddp.reporting.sinks import open_no_link, write_text
from hardened_ddp.settings.typed_command import own_command

log = logging.getLogger(__name__)

FOLDER = "hangs"
TICK_S = 1.0
_MAX_TICKS = 3
_COMPARE_EVERY_S = 2.0
_END_LIMIT_S = 3.0
_DEVICE_WAITS = (Phase.ALL_REDUCE, Phase.BROADCAST)
_DEVICE_WORK, _DEVICE_WORK_S = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER), 3.0
_NUM_QUESTIONS = 2  # to a device at once: by the watch, and by the save
_RAISE_S = 0.25  # until the main thread raises by itself, where it does


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What the watch needs from the run. Called on the watch's thread."""

    save: Callable[..., None]  # as save_while_stuck in training/survivor_save.py
    # The phase of this rank's device, by that of its main thread. None: they are the same.
    phase: Callable[[int], int] | None = None
    # The samples that this rank processes in that phase.
    samples: Callable[[int], Sequence[int]] = lambda phase: ()
    worker_stacks: Callable[[], Mapping[int, str]] = dict
    # The split of this rank's step time, and the number of that report.
    split: Callable[[], tuple[int, Split]] = lambda: (0, {})
    # Phases with a longer limit, in seconds.
    least_s: Mapping[int, float] = field(default_factory=dict)


class HangWatch:
    """Watches over one run on this rank. Use it in a with statement."""

    def __init__(self, group: Group, folder: Path, *, hang_after_s: float) -> None:
        """hang_after_s: the least limit of a phase; 0: no watch."""
        self._group = group
        self._folder = folder / FOLDER
        self._hang_after_s = hang_after_s
        self._wait_limit_s = longest_wait_s(group.timeout_s) if group.world_size > 1 else math.inf
        self._tick_s = min(TICK_S, hang_after_s / 4, self._wait_limit_s / 4)
        self._subject = Subject(save=lambda *why: None)
        self._age_s = self._muted_s = self._compare_in_s = 0.0
        self._seen_since = self._seen_phase = 0
        self._longest_s = [0.0] * NUM_PHASES  # of each phase, without the first steps
        self._slow = SlowRanks()
        self._end = threading.Event()
        self._is_deciding = threading.Event()
        self._thread: HelperThread | None = None

    def __enter__(self) -> "HangWatch":
        """Start the watch. Main thread. Collective: all ranks."""
        group, limit_s = self._group, self._hang_after_s
        is_gpu = group.device.type == "cuda"
        self._end_questions = keep_ready(_NUM_QUESTIONS if is_gpu else 0)
        fds = (group.tracker.share(), offer_stacks()) if limit_s > 0 else (-1, -1)
        self._heartbeat_fd, self._stacks_fd = fds
        self._neighbours = find_neighbours(group, fds, stopped_limit_s=limit_s)  # collective
        if limit_s <= 0:
            return self
        self._consensus = HangConsensus(
            group.store.second(),
            rank=group.launch.rank,
            world_size=group.world_size,
            tick_s=self._tick_s,
        )
        self._main_thread = threading.get_ident()
        self._thread = HelperThread(self._watch, name="hang-watch")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def attach(self, subject: Subject) -> None:
        self._subject = subject

    def close(self) -> None:
        """Stop the watch; if the ranks are deciding on a hang, wait for that. Main thread.

        WHY wait: a rank that lost another one calls this, and the verdict says why it was lost.
        The watch's thread then ends this process.
        """
        self._end_questions()
        if self._thread is None:
            return
        self._end.set()
        self._thread.join(_END_LIMIT_S)
        while self._thread.is_alive() and self._is_deciding.is_set():
            self._thread.join(self._tick_s)
        self._thread = None
        withdraw_stacks(self._stacks_fd)
        while self._neighbours:
            os.close(self._neighbours.pop().pidfd)
        if self._heartbeat_fd >= 0:
            os.close(self._heartbeat_fd)

    def _watch(self) -> None:
        awake, last_s = AwakeTime(_MAX_TICKS * self._tick_s), 0.0
        while not self._end.wait(self._tick_s):
            now_s = awake.passed_s()
            awake_s, last_s = now_s - last_s, now_s
            try:
                self._tick(awake_s)
            except Exception:  # WHY broad: if the watch ended, the next hang would not be noticed
                log.debug("hang detection raised an error", exc_info=True)
        self._consensus.leave()

    def _tick(self, awake_s: float) -> None:
        words = self._group.tracker.words
        words[HEART] += 1
        self._age(awake_s)
        self._set_limits()
        report = self._report()
        if self._group.world_size > 1:
            self._consensus.beat(report, words[HEART], self._subject.split())
            for neighbour in self._neighbours:
                neighbour.look(awake_s)
            self._leave_if_alone(report)
            self._compare_in_s -= awake_s
            if self._group.launch.is_main and self._compare_in_s <= 0:
                self._compare_in_s = _COMPARE_EVERY_S
                self._slow.note(self._consensus.splits())
        self._muted_s = max(0.0, self._muted_s - awake_s)
        is_suspicious = self._muted_s == 0.0 and self._is_suspicious(report, awake_s)
        # WHY step and time: tells several hangs of one run apart, with one name on all ranks
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-step-{report.step}" if is_suspicious else ""
        if alarm := self._consensus.alarm(name):
            self._answer_alarm(self._folder / alarm, is_witness=is_suspicious)

    def _age(self, awake_s: float) -> None:
        """Add up how long this rank is in its phase; an hour as a stopped job does not count."""
        tracker = self._group.tracker
        since = tracker.words[SINCE]
        if since != self._seen_since:
            phase, longest_s = self._seen_phase, self._longest_s
            if tracker.is_warm:
                longest_s[phase] = max(longest_s[phase], self._age_s)
            self._seen_since, self._seen_phase, self._age_s = since, tracker.words[PHASE], 0.0
        self._age_s = min((time.monotonic_ns() - since) / 1e9, self._age_s + awake_s)

    def _set_limits(self) -> None:
        tracker = self._group.tracker
        limits = limits_ns(
            hang_after_s=self._hang_after_s,
            longest_s=self._longest_s,
            is_warm=tracker.is_warm,
            least_s=self._subject.least_s,
        )
        for phase, limit in enumerate(limits):
            tracker.words[LIMITS + phase] = limit

    def _report(self, samples: tuple[int, ...] = ()) -> Report:
        words, rank = self._group.tracker.words, self._group.launch.rank
        phase = words[PHASE]
        limit_s = words[LIMITS + phase] / 1e9
        ask = self._subject.phase
        if ask is not None and self._age_s > min(_DEVICE_WORK_S, limit_s / 2):
            # WHY suppress: a GPU with an error, or a driver that is stuck, answers nothing
            with contextlib.suppress(RuntimeError, TimeoutError):
                phase = call_within(partial(ask, phase), TICK_S)
        return Report(rank, words[STEP], phase, self._age_s, limit_s, samples)

    def _is_suspicious(self, report: Report, awake_s: float) -> bool:
        is_working = report.phase < FIRST_WAIT
        if is_working and report.is_late and is_debugged(self._main_thread):
            self._age_s = 0.0
            return False
        if self._lost() or (is_working and report.is_late):
            return True
        if is_working:
            return False
        if report.age_s > self._wait_limit_s:
            return True
        if not report.is_late or report.rank >= NUM_WITNESSES:
            return False
        # This rank waits for long: does any rank hang, by the beats of all of them?
        seen = {**self._consensus.watch_beats(awake_s), report.rank: report}
        if len(seen) < self._group.world_size:
            return False
        return decide(list(seen.values()), wait_limit_s=self._wait_limit_s) is not None

    def _lost(self) -> list[Neighbour]:
        """Return the neighbours that can't answer any more."""
        return [neighbour for neighbour in self._neighbours if neighbour.is_lost]

    def _others_here(self) -> dict[int, Report]:
        living = [neighbour for neighbour in self._neighbours if neighbour.state() != GONE]
        return {neighbour.rank: neighbour.report() for neighbour in living}

    def _leave_if_alone(self, report: Report) -> None:
        """Save and exit if a neighbour's process ended, and the main thread waits for it for ever.

        WHY: NCCL raises nothing then. With gloo the main thread raises, and saves by itself.
        """
        words, since = self._group.tracker.words, self._seen_since
        is_gpu = self._group.device.type == "cuda"  # there a forward may wait, too
        is_stuck = is_gpu and report.phase in _DEVICE_WORK and report.age_s > _DEVICE_WORK_S
        gone = [neighbour.rank for neighbour in self._neighbours if neighbour.state() == GONE]
        if not gone or not (is_stuck or report.phase in _DEVICE_WAITS):
            return
        if self._end.wait(_RAISE_S) or self._group.is_broken or words[SINCE] != since:
            return
        self._is_deciding.set()
        where = f"{Phase(report.phase).label} of step {report.step}"
        why = RuntimeError(f"Connection closed by peer: rank {gone[0]} ended, in {where}")
        error = lost_peer(why, self._group, is_dead=True)
        assert error is not None, "this message tells of a lost rank"
        self._tell(error)
        try:
            self._subject.save(error, gone=gone)
        finally:
            leave_at_once(PeerLostError.exit_status)

    def _answer_alarm(self, folder: Path, *, is_witness: bool) -> None:
        """Write stacks, and agree on which ranks hang; end the run, or go on if none does."""
        self._is_deciding.set()
        mine = self._report(tuple(self._subject.samples(self._group.tracker.words[PHASE])))
        with contextlib.suppress(OSError):  # WHY suppress: a full disk must not hide the verdict
            self._write_stacks(folder, mine)
        hang = self._consensus.agree(
            mine, self._others_here, is_witness=is_witness, wait_limit_s=self._wait_limit_s
        )
        if hang is not None:
            self._end_run(hang, folder)
        log.warning("a hang was suspected, but all ranks make progress; their stacks: %s", folder)
        self._muted_s = self._hang_after_s / 2
        self._is_deciding.clear()

    def _end_run(self, hang: Hang, folder: Path) -> None:
        """Say who hangs, save, kill the neighbours that can't exit by themselves, and exit."""
        self._consensus.publish(hang)
        launch = self._group.launch
        # WHY: a loop of the user's own is not one that torchrun can start again (OWN_LOOPS.md)
        by_itself = "" if launch.start.is_whole else " (torchrun --max_restarts resumes by itself)"
        error = HangError(
            hang.text,
            fix=f"read the stacks of all ranks in {folder}{by_itself}; to resume: "
            f"{launch.command('--resume', self._folder.parent)}",
        )
        self._tell(error)
        try:
            with contextlib.suppress(OSError):
                write_text(folder / "verdict.txt", f"{hang.text}\n")
            self._subject.save(error)
            # WHY every rank does it: the others may not have watched that neighbour for long enough
            # to know that it is lost. To kill it twice does no harm.
            for neighbour in self._lost():
                log.warning("rank %d can't exit by itself: it is killed", neighbour.rank)
                neighbour.kill()
            is_server = launch.is_main and not launch.agent_owns_store
            self._consensus.await_others(is_server=is_server, limit_s=_END_LIMIT_S)
            # WHY: it keeps the GIL, and the thread that waits for NCCL may hold what it takes
            faulthandler.dump_traceback_later(_END_LIMIT_S, exit=True)
            if trace := nccl_trace():
                write_text(folder / f"rank_{launch.rank}_nccl.json", trace)
        finally:
            leave_at_once(HangError.exit_status)

    def _tell(self, error: HardenedError) -> None:
        """Say why this process ends, to its log and its launcher, as its main thread would."""
        if self._group.is_main:
            error.add_note(f"why: {own_command('explain', self._folder.parent)}")
        log_failure(error)
        write_error_file(error, environment())

    def _write_stacks(self, folder: Path, report: Report) -> None:
        """Write the stacks of this rank, its workers, and the neighbours that don't answer."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{report.rank}.txt"
        with open(path, "w", encoding="utf-8", opener=open_no_link) as file:
            where = f"process {os.getpid()} on {socket.gethostname()}"
            phase = Phase(report.phase).label
            file.write(f"rank {report.rank}, {where}: {phase} of step {report.step}")
            file.write(f" for {report.age_s:.1f} s; its main thread is {self._main_thread:#018x}\n")
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
        for neighbour in self._lost():
            path = folder / f"rank_{neighbour.rank}.txt"
            # WHY "x": one rank asks it, whichever of those that see it lost is the first.
            with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                file.write(f"rank {neighbour.rank}, process {neighbour.pid}, asked from outside\n")
                file.write(neighbour.stacks())
        for pid, text in self._subject.worker_stacks().items():
            path = folder / f"rank_{report.rank}_worker_{pid}.txt"
            write_text(path, text or "no stacks: it does not answer\n")
