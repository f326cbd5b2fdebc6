"""What only a device needs that runs behind the host, such as a GPU.

The host queues work and goes on. Two things follow from that:

- Whether the gradient of a step was good is read one step later, without a wait. Reading a number
  on a GPU waits for all work before it, and asking the other ranks would cost a message per step.
  Instead, a rank that failed has sent NaN (gradients/buckets.py), and that, or a gradient that is
  not finite by itself, sets a flag on the device. The flag makes the optimizer skip the update: it
  is found_inf of torch's fused optimizers, with which GradScaler skips a step. It is the same on
  all ranks, because the sums are. It is copied to the host while the next step already runs, and
  read only then; if it is up, the host takes back both steps and does them again. So the host is at
  most one step ahead of the GPU. With fp16 a gradient that is not finite is normal: GradScaler
  skips such a step and lowers the scale. That is taken back too; the retry shows which it was.
- If another rank dies or is stopped, NCCL's all-reduce never ends, and nothing that was queued
  behind it runs: the update, the copy of the flag, each read on the same stream. But the weights in
  the device's memory are those of the last finished update, and a second stream can still copy
  them. They are those of a step boundary if the event after that update is reached before the copy,
  and the one before the next update is still not reached after it.

The host is at most one update ahead of the device, so there is only one next update.
What goes wrong here: a kernel on the second stream. To load one may wait for the whole device, so
there are only copies.
Read next: training/survivor_save.py, which saves what find() returns.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.gradients.sums import Sums
from hardened_ddp.model.optimizer import skips_by_flag
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.step import token_mean
from hardened_ddp.step.attempt import Attempt
from hardened_ddp.step.events import Event, Flag, new_event
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress, Totals

_LOOK_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class Update:
    """A committed step, and events around its update."""

    attempt: Attempt
    progress: Progress
    """Before it."""

    before: Event
    after: Event

    def is_skipped(self) -> bool:
        """Return whether the device is past it and changed nothing: the gradient was bad."""
        return self.before.is_reached() and self.attempt.is_bad()


@dataclass(frozen=True, slots=True)
class Boundary:
    """The state at a step boundary, as far as it is not in the live tensors."""

    progress: Progress
    buffers: Sequence[torch.Tensor | None]
    """The moving buffers; empty: the live ones."""

    loss: torch.Tensor | float
    """The sum of the losses since the last reading, on the device."""

    next: Update | None = None
    """The update after it. The live tensors are those of the boundary until the device begins it.
    None: it is not queued."""

    def still_holds(self) -> bool:
        """Return whether the live tensors are still those of the boundary."""
        return self.next is None or not self.next.before.is_reached() or self.next.is_skipped()


class AsyncDevice:
    """Follows the steps of a run on a device that runs behind the host."""

    def __init__(self, parts: Parts, progress: Progress, totals: Totals) -> None:
        self.unconfirmed: Attempt | None = None
        """The last step, as long as its flag has not been read."""

        self.checks_one_step_late = parts.checks_one_step_late
        """The flag is read one step later; else each step waits for its gradient."""

        self._parts = parts
        self._progress = progress
        self._totals = totals
        self._current: Attempt | None = None
        self._before: Event | None = None
        self._progress_before = progress
        self._last: Update | None = None
        # WHY: such an optimizer keeps numbers on the host, which would be ahead of the weights.
        self._waits_for_gradient = not skips_by_flag(parts.optimizer)

    def begin(self, attempt: Attempt) -> None:
        """Note that a step begins; its buffers and sums are copied. Main thread."""
        attempt.begun = new_event(self._parts.device)
        self._current = attempt

    def note(self, attempt: Attempt, sums: Sums) -> None:
        """Take up the sums of a step that only the device knows to be good. Main thread."""
        assert sums.is_bad is not None
        is_bad = sums.is_bad
        if attempt.failure is None and not self._parts.task.counts_samples:
            is_bad = token_mean.divide_on_device(
                self._parts.gradients.local, sums.count, is_bad, num_samples=attempt.window.size
            )
        attempt.flag = Flag(is_bad)
        attempt.loss_after = self._totals.loss_sum.clone()

    def can_wait(self, window: Window) -> bool:
        """Return whether the flag of the last step may be read after the step over window."""
        sends_within = not self._parts.config.loop.continue_on_error
        sends_within &= self._parts.gradients.sends_within(window)
        return self.checks_one_step_late and sends_within

    def has_bad_step(self) -> bool:
        """Return whether the last step must be done again. Waits for the device."""
        if self.unconfirmed is None:
            return False
        # WHY: this rank may wait here for another one that has not joined an all-reduce
        with self._parts.group.tracker.within(Phase.ALL_REDUCE):
            return self.unconfirmed.is_bad()

    def take_bad(self) -> Attempt | None:
        """Return the last step if it must be done again; it is confirmed now. Waits."""
        is_bad, attempt = self.has_bad_step(), self.unconfirmed
        self.unconfirmed = None
        return attempt if is_bad else None

    def leave_out(self, attempt: Attempt) -> None:
        """Let the optimizer skip the update if the flag of a step is up. Main thread."""
        if self.checks_one_step_late:
            flag = None if attempt.flag is None else attempt.flag.on_device
            self._parts.precision.leave_out(self._parts.optimizer, flag)

    def before_update(self, attempt: Attempt) -> None:
        """Note that the update of a step comes next. Main thread, before the commit.

        Waits for the update before it, so that the host is not further ahead. WHY not with a flag:
        reading the flag of the step before has waited.
        """
        flag = attempt.flag
        self._before = before = new_event(self._parts.device) if flag is None else flag.send()
        self._progress_before = replace(self._progress)
        if flag is not None:
            return
        limit: Event | None = before
        if not self._waits_for_gradient:
            limit = None if self._last is None else self._last.after
        if limit is not None and not limit.is_reached():
            # WHY: this rank may wait here for another one that has not joined an all-reduce
            with self._parts.group.tracker.within(Phase.ALL_REDUCE):
                limit.wait()

    def after_update(self, attempt: Attempt) -> None:
        """Note that the update is queued. Main thread, within the commit."""
        assert self._before is not None  # before_update came first
        after = new_event(self._parts.device)
        self._last = Update(attempt, self._progress_before, self._before, after)
        self._current = None
        self.unconfirmed = attempt if attempt.flag is not None else None

    def take_back(self, attempt: Attempt) -> None:
        """Note that a step is done again, since the device skipped its update. Main thread.

        WHY not as the last update: a step that is done again gets another flag, or none.
        """
        self._current, self._last = attempt, None

    def forget(self) -> None:
        """Drop what is known: another state was loaded. Main thread."""
        self._current = self._before = self._last = self.unconfirmed = None

    def find(self, limit_s: float) -> Boundary | None:
        """Return the last boundary that the device has reached; None: it reached none in limit_s.

        Rank-local, while no other thread commits a step. Does not wait for work that is stuck.
        """
        end = time.monotonic() + limit_s
        while (found := self._look()) is None and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)
        return found

    def _look(self) -> Boundary | None:
        last, current = self._last, self._current
        if last is not None and not last.after.is_reached():
            # Between the two events the weights are half updated.
            return None if last.before.is_reached() else _before(last)
        if last is not None and last.is_skipped():
            return _before(last)
        progress = replace(self._progress)
        if current is None:
            return Boundary(progress, (), self._totals.loss_sum)
        is_begun = current.begun is not None and current.begun.is_reached()
        return Boundary(progress, current.buffers, current.totals_before[0]) if is_begun else None


def _before(update: Update) -> Boundary | None:
    """Return the boundary before an update; None: the device has not reached it."""
    attempt = update.attempt
    if attempt.begun is None or not attempt.begun.is_reached():
        return None
    return Boundary(update.progress, attempt.buffers, attempt.totals_before[0], update)
