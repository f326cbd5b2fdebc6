"""Where the time of a step goes: data, forward, backward, optimizer.

A mark ends a phase. On the CPU that is a look at the clock. On a GPU the CPU only queues work, so
the clock would time the queueing: there a mark is an event in the GPU's own queue, which costs no
waiting, and only one step in sample_every has them. The data phase of a GPU is the time in which it
had nothing to do because no batch was there.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

import torch

SAMPLE_EVERY = 10
PHASES = ("data", "forward", "backward", "optimizer")
_LAST_PHASE = PHASES[-1]
_MOST_UNREAD_STEPS = 1_000


class Event(Protocol):
    """A moment in the GPU's queue, as torch.cuda.Event is one."""

    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...  # Any: an event of the same kind


class StepClock:
    """Adds up the time of each phase between two readings."""

    def __init__(self, device: torch.device, *, sample_every: int = SAMPLE_EVERY) -> None:
        self._gpu: GpuTimeline | None = None
        if device.type == "cuda":
            self._gpu = GpuTimeline(partial(_record, device), sample_every=sample_every)
        self._num_steps = 0
        self._last = perf_counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def mark(self, phase: str) -> None:
        """End phase now: the time since the last mark belongs to it. The last phase ends a step."""
        if self._gpu is not None:
            self._gpu.mark(phase)
            return
        now = perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now
        if phase == _LAST_PHASE:
            self._num_steps += 1

    def skip(self) -> None:
        """Leave out the time since the last mark: evaluation, saving, reporting."""
        self._last = perf_counter()
        if self._gpu is not None:
            self._gpu.skip()

    def read_and_reset(self) -> dict[str, float]:
        """Give the mean seconds per step of each phase; empty if no step was timed."""
        if self._gpu is not None:
            return self._gpu.read_and_reset()
        count, seconds = self._num_steps, self._seconds
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._num_steps = 0
        return {phase: total / count for phase, total in seconds.items()} if count else {}


class GpuTimeline:
    """The moments in which the GPU came past the marks, in one step of sample_every."""

    def __init__(self, record: Callable[[], Event], *, sample_every: int) -> None:
        """record: puts an event into the GPU's queue and returns it."""
        self._record = record
        self._sample_every = sample_every
        self._step = 0
        self._marks: list[tuple[str, Event]] = []
        """The start of this step and the marks since; empty in a step that is not sampled."""

        self._unread: deque[list[tuple[str, Event]]] = deque(maxlen=_MOST_UNREAD_STEPS)

    def mark(self, phase: str) -> None:
        """End phase where the GPU's queue stands now."""
        if self._marks:
            self._marks.append((phase, self._record()))
        if phase != _LAST_PHASE:
            return
        if self._marks:
            self._unread.append(self._marks)
            self._marks = []
        self._step += 1
        # WHY not step 0: it loads kernels and tries out algorithms.
        if self._step % self._sample_every == 1 % self._sample_every:
            self._marks = [("", self._record())]

    def skip(self) -> None:
        """Leave out the time since the last mark; within a step, leave out that step."""
        self._marks = [("", self._record())] if len(self._marks) == 1 else []

    def read_and_reset(self) -> dict[str, float]:
        """Give the mean seconds per sampled step of each phase. Never waits for the GPU."""
        seconds = dict.fromkeys(PHASES, 0.0)
        count = 0
        # The GPU works in order: behind a step that is not done, none is.
        while self._unread and self._unread[0][-1][1].query():
            marks = self._unread.popleft()
            count += 1
            for (_, start), (phase, end) in pairwise(marks):
                seconds[phase] += start.elapsed_time(end) / 1000
        return {phase: total / count for phase, total in seconds.items()} if count else {}


def _record(device: torch.device) -> Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    event.record(torch.cuda.current_stream(device))
    return event
