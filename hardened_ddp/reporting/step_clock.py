"""Where the time of a step goes: data, forward, backward, all-reduce, optimizer.

On the CPU the tracker's own sums say it. A GPU works later than the CPU asks for: there the clock
would time the queueing. So each change of phase puts an event into the GPU's own queue, which costs
no waiting, and only in one step of sample_every. The data phase of a GPU is the time in which it
had nothing to do because no batch was there; its backward has the all-reduces in it.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.tracker import Tracker

SAMPLE_EVERY = 10
PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
REPORTED = [phase.label for phase in (*PHASES, Phase.ALL_REDUCE)]
_MOST_UNREAD_STEPS = 1_000


class Event(Protocol):
    """A moment in the GPU's queue, as torch.cuda.Event is one."""

    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...  # Any: an event of the same kind


class StepClock:
    """Gives the mean time of each phase of a step between two readings."""

    def __init__(
        self, tracker: Tracker, device: torch.device, *, sample_every: int = SAMPLE_EVERY
    ) -> None:
        self._tracker = tracker
        self._timeline: GpuTimeline | None = None
        if device.type == "cuda":
            self._timeline = GpuTimeline(partial(_record, device), sample_every=sample_every)
            tracker.follow_on(self._timeline)

    def read_and_reset(self) -> Mapping[str, float]:
        """Give the mean seconds per step of each phase; empty if no step was timed."""
        split = self._tracker.read_split()
        return split if self._timeline is None else self._timeline.read_and_reset()


class GpuTimeline:
    """The moments in which the GPU came to a new phase, in one step of sample_every."""

    def __init__(self, record: Callable[[], Event], *, sample_every: int) -> None:
        """record: puts an event into the GPU's queue and returns it."""
        self._record = record
        self._sample_every = sample_every
        self._phase = int(Phase.START_UP)
        self._step = 0
        self._marks: list[tuple[str, Event]] = []
        """The start of this step and the ends of its phases; empty if it is not sampled."""

        self._unread: deque[list[tuple[str, Event]]] = deque(maxlen=_MOST_UNREAD_STEPS)

    def enter(self, phase: int) -> None:
        """End the phase under way where the GPU's queue stands now; phase begins there."""
        before, self._phase = self._phase, phase
        if phase not in PHASES:
            return
        if before not in PHASES:  # evaluation, a checkpoint, a report: no part of a step
            self._skip()
            return
        if self._marks:
            self._marks.append((Phase(before).label, self._record()))
        if before == Phase.OPTIMIZER and phase == Phase.DATA:
            self._end_step()

    def read_and_reset(self) -> dict[str, float]:
        """Give the mean seconds per sampled step of each phase. Never waits for the GPU."""
        seconds = dict.fromkeys([phase.label for phase in PHASES], 0.0)
        count = 0
        # The GPU works in order: behind a step that is not done, none is.
        while self._unread and self._unread[0][-1][1].query():
            marks = self._unread.popleft()
            count += 1
            for (_, start), (label, end) in pairwise(marks):
                seconds[label] += start.elapsed_time(end) / 1000
        return {label: total / count for label, total in seconds.items()} if count else {}

    def _end_step(self) -> None:
        if self._marks:
            self._unread.append(self._marks)
            self._marks = []
        self._step += 1
        # WHY not step 0: it loads kernels and tries out algorithms.
        if self._step % self._sample_every == 1 % self._sample_every:
            self._marks = [("", self._record())]

    def _skip(self) -> None:
        """Leave out the time since the last mark; within a step, leave out that step."""
        self._marks = [("", self._record())] if len(self._marks) == 1 else []


def _record(device: torch.device) -> Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    event.record(torch.cuda.current_stream(device))
    return event
