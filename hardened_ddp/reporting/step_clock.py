"""The time of each phase of a step: data, forward, backward, all-reduce, optimizer.

On the CPU these are the tracker's own sums. On a GPU that clock sees only the queueing: each
change of phase records an event in the GPU's stream, in one of sample_every steps. There the data
phase is the time in which the GPU has no batch; backward includes the all-reduces.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch

from hardened_ddp.ranks.phase import Phase, Tracker

SAMPLE_EVERY = 10
PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
REPORTED = [phase.label for phase in (*PHASES, Phase.ALL_REDUCE)]
_MOST_UNREAD_STEPS = 1_000


def start_clock(tracker: Tracker, device: torch.device) -> Callable[[], Mapping[str, float]]:
    """Measure phases; return what reads their mean seconds per step since its last call."""
    if device.type != "cuda":
        return tracker.read_split
    timeline = GpuTimeline(partial(_record, device), sample_every=SAMPLE_EVERY)
    tracker.follow = timeline.enter
    return timeline.read_and_reset


class GpuTimeline:
    """The times at which the GPU enters each phase, in one of sample_every steps."""

    def __init__(self, record: Callable[[], torch.cuda.Event], *, sample_every: int) -> None:
        """record: records an event in the GPU's stream and returns it."""
        self._record = record
        self._sample_every = sample_every
        self._phase = int(Phase.START_UP)
        self._step = 0
        # The start of this step and the ends of its phases; empty if the step is not sampled.
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._unread: deque[list[tuple[str, torch.cuda.Event]]] = deque(maxlen=_MOST_UNREAD_STEPS)

    def enter(self, phase: int) -> None:
        """End the current phase at this point of the GPU's stream, and begin phase there."""
        before, self._phase = self._phase, phase
        if phase not in PHASES:
            return
        if before not in PHASES:  # evaluation, a checkpoint, a report: not part of a step
            self._skip()
            return
        if self._marks:
            self._marks.append((Phase(before).label, self._record()))
        if before == Phase.OPTIMIZER and phase == Phase.DATA:
            self._end_step()

    def read_and_reset(self) -> dict[str, float]:
        """Return the mean seconds per sampled step of each phase. Never waits for the GPU."""
        seconds = dict.fromkeys([phase.label for phase in PHASES], 0.0)
        count = 0
        # The GPU works in order: after a step that is not done, no later step is done.
        while self._unread:
            marks = self._unread[0]
            if not marks[-1][1].query():  # type: ignore[no-untyped-call]  # torch's
                break
            self._unread.popleft()
            count += 1
            for (_, start), (label, end) in pairwise(marks):
                seconds[label] += start.elapsed_time(end) / 1000
        return {label: total / count for label, total in seconds.items()} if count else {}

    def _end_step(self) -> None:
        if self._marks:
            self._unread.append(self._marks)
            self._marks = []
        self._step += 1
        # WHY not step 0: it loads kernels and benchmarks algorithms.
        if self._step % self._sample_every == 1 % self._sample_every:
            self._marks = [("", self._record())]

    def _skip(self) -> None:
        """Drop the time since the last mark; in the middle of a step, drop the step."""
        self._marks = [("", self._record())] if len(self._marks) == 1 else []


def _record(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    event.record(torch.cuda.current_stream(device))
    return event
