"""Where the time of a step goes: data, forward, backward, optimizer.

A mark ends a phase. On a GPU the CPU only queues work, so marks would time the queueing: then the
device is waited for at each mark, but only in one step of SAMPLE_EVERY.
"""

from time import perf_counter

import torch

SAMPLE_EVERY = 50
PHASES = ("data", "forward", "backward", "optimizer")


class StepClock:
    """Adds up the time of each phase between two readings."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits = device.type == "cuda"
        self._is_sampled = True
        self._num_steps = 0
        self._step = 0
        self._last = perf_counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def mark(self, phase: str) -> None:
        """End phase now: the time since the last mark belongs to it."""
        if self._waits:
            if phase == PHASES[-1]:
                self._count_step()
            if not self._is_sampled:
                return
            torch.cuda.synchronize(self._device)
        elif phase == PHASES[-1]:
            self._num_steps += 1
        now = perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def skip(self) -> None:
        """Leave out the time since the last mark: evaluation, saving, reporting."""
        self._last = perf_counter()

    def read_and_reset(self) -> dict[str, float]:
        """Give the mean seconds per step of each phase; empty if no step was timed."""
        count, seconds = self._num_steps, self._seconds
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._num_steps = 0
        return {phase: total / count for phase, total in seconds.items()} if count else {}

    def _count_step(self) -> None:
        self._num_steps += self._is_sampled
        self._step += 1
        self._is_sampled = self._step % SAMPLE_EVERY == 0
