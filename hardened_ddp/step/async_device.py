"""What only a device that runs behind the host needs, such as a GPU.

- Whether the gradient of a step was good is read one step later, without a wait: reading a number
  waits for all work before it. A rank that failed has sent NaN (gradients/by_ddp.py). That, or a
  gradient that is not finite by itself, sets a flag on the device, which is the same on all ranks,
  because the sums are. It makes the optimizer skip the update: it is found_inf of torch's fused
  optimizers, with which GradScaler skips a step. The host reads its copy while the next step
  already runs; if it is up, both steps are rolled back and retried. With fp16 a gradient that is
  not finite is normal: that step is taken back too, and its retry shows which of the two it was.
- If another rank dies or is stopped, NCCL's all-reduce never ends, and nothing that was queued
  behind it runs. But the weights in the device's memory are those of the last finished update, and
  a second stream can copy them. They are those of a step boundary if the event after that update is
  reached before the copy, and the one before the next update is not reached after it. The host is
  at most one update ahead, so there is only one next update.

WHY only copies on the second stream: to load a kernel may wait for the whole device.
Read next: training/survivor_save.py, which saves what find() returns.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.gradients.sums import Sums
from hardened_ddp.model.moving_buffers import NO_COPIES, Copies
from hardened_ddp.model.optimizer import skips_by_flag
from hardened_ddp.ranks.device import is_reached
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.step.gradient import Attempt, Totals, divide_on_device
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress

_LOOK_EVERY_S = 0.01


class Event:
    """A point in the work that was queued on this thread's current stream of the device."""

    def __init__(self) -> None:
        # WHY blocking: else the wait for it spins, and takes a core of the loader's workers
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
        self._event.record()

    def is_reached(self) -> bool:
        """Return whether the device is past it. Does not wait."""
        return is_reached(self._event)

    def wait(self) -> None:
        self._event.synchronize()


class Flag:
    """A number on the device, and its asynchronous copy to the host."""

    def __init__(self, is_bad: torch.Tensor) -> None:
        """is_bad: of shape (), 1.0 if the gradient was bad, else 0.0."""
        self.on_device = self._on_host = is_bad
        self._arrived: Event | None = None

    def send(self) -> Event:
        """Queue the copy to the host; return the event after it. All that counts is queued."""
        if self.on_device.is_cuda:
            self._on_host = torch.empty((), dtype=self.on_device.dtype, pin_memory=True)
            self._on_host.copy_(self.on_device, non_blocking=True)
        self._arrived = Event()
        return self._arrived

    def wait(self) -> None:
        """Wait until the device has computed it."""
        if self._arrived is not None:
            self._arrived.wait()
            self._arrived = None

    def is_up(self) -> bool:
        """Return whether the gradient was bad. Waits until the device has computed it."""
        self.wait()
        return bool(self._on_host)


@dataclass(slots=True)
class QueuedStep:
    """A step whose work the host has queued."""

    attempt: Attempt
    begun: Event  # when the buffers and sums before it have been copied

    # When this rank's own gradients are there. None: the host has not queued all of them.
    computed: Event | None = None

    # Up: some rank failed in it, or its gradient is not finite. None: known not to be so.
    flag: Flag | None = None
    loss_after: torch.Tensor | float = 0.0  # the sum of the losses after it, on the device

    # Around its update, and the progress before that: once the update is queued.
    before: Event = field(init=False)
    after: Event = field(init=False)
    progress: Progress = field(init=False)

    def loss(self) -> float:
        """Return this rank's loss in it. Waits for the device."""
        return float(self.loss_after) - float(self.attempt.totals_before[0])

    def note_computed(self) -> None:
        """Note that this rank's gradients are queued, and the last of them are sent next."""
        self.computed = Event()

    def is_bad(self) -> bool:
        """Return whether its flag is up. Waits for the device."""
        return self.flag is not None and self.flag.is_up()

    def is_skipped(self) -> bool:
        """Return whether the device is past its update and changed nothing: a bad gradient."""
        return self.before.is_reached() and self.is_bad()


@dataclass(frozen=True, slots=True)
class Boundary:
    """The state at a step boundary, as far as it is not in the live tensors."""

    progress: Progress
    buffers: Copies  # the moving buffers; empty: the live ones
    loss: torch.Tensor | float  # the sum of the losses since the last reading, on the device

    # The step after it. The live tensors are those of the boundary until the device begins its
    # update. None: that is not queued.
    next: QueuedStep | None = None

    def still_holds(self) -> bool:
        """Return whether the live tensors are still those of the boundary."""
        return self.next is None or not self.next.before.is_reached() or self.next.is_skipped()


class AsyncDevice:
    """Follows the steps of a run on a device that runs behind the host."""

    def __init__(self, parts: Parts, progress: Progress, totals: Totals) -> None:
        # The last step, as long as its flag has not been read.
        self.unconfirmed: QueuedStep | None = None

        # The flag is read one step later; else each step waits for its gradient.
        self.checks_one_step_late = parts.checks_one_step_late
        self._parts = parts
        self._progress = progress
        self._totals = totals
        self._current: QueuedStep | None = None
        self._last: QueuedStep | None = None  # its update is queued
        beside(parts.device)  # WHY now: while the device is stuck, to make its streams may wait

    def can_run_ahead(self, window: Window) -> bool:
        """Return whether the step over window may be queued before the last flag is read."""
        return self.checks_one_step_late and self._parts.gradients.sends_within(window)

    def begin(self, attempt: Attempt) -> None:
        """Note that a step begins; its buffers and sums are copied. Main thread."""
        self._current = QueuedStep(attempt, Event())
        attempt.when_computed = self._current.note_computed
        attempt.after_forward = self._wait_for_last

    def _wait_for_last(self) -> None:
        """Wait for the flag of the last step, without reading it: a forward is queued behind it.

        WHY: a GPU takes some thousands of launches ahead. If they are that many while it is stuck,
        the host is stuck in the next one, with a lock of the driver: then no thread can copy the
        weights. So at most an update and a forward wait behind an all-reduce, but no backward.
        """
        if self.unconfirmed is not None and self.unconfirmed.flag is not None:
            # WHY: this rank may wait here for another one that has not joined an all-reduce
            with self._parts.group.tracker.within(Phase.ALL_REDUCE):
                self.unconfirmed.flag.wait()

    def note(self, sums: Sums) -> None:
        """Take up the sums of the current step, if only the device knows whether they are good."""
        if (is_bad := sums.is_bad) is None:
            return
        assert self._current is not None  # begin came first
        attempt = self._current.attempt
        if attempt.failure is None and not self._parts.task.counts_samples:
            is_bad = divide_on_device(
                self._parts.gradients.local, sums.count, is_bad, num_samples=attempt.window.size
            )
        self._current.flag = Flag(is_bad)
        self._current.loss_after = self._totals.loss_sum.clone()

    def take_bad(self) -> QueuedStep | None:
        """Return the last step if it must be retried; it is confirmed now. Waits."""
        if self.unconfirmed is None:
            return None
        # WHY: this rank may wait here for another one that has not joined an all-reduce
        with self._parts.group.tracker.within(Phase.ALL_REDUCE):
            last = self.unconfirmed if self.unconfirmed.is_bad() else None
        self.unconfirmed = None
        return last

    def before_update(self) -> None:
        """Note that the update of the current step comes next. Main thread, before the commit.

        The optimizer skips it if the flag is up. Waits for the update before it, so that the host
        is not further ahead. WHY not with a flag: reading the flag of the step before has waited.
        """
        assert self._current is not None  # begin came first
        current, flag = self._current, self._current.flag
        if self.checks_one_step_late:
            on_device = None if flag is None else flag.on_device
            self._parts.precision.leave_out(self._parts.optimizer, on_device)
        current.before = Event() if flag is None else flag.send()
        current.progress = replace(self._progress)
        if flag is not None:
            return
        limit = self._last.after if self._last is not None else None
        # WHY: an optimizer of another kind keeps numbers on the host, ahead of the weights
        if not skips_by_flag(self._parts.optimizer):
            limit = current.before
        if limit is not None and not limit.is_reached():
            # WHY: this rank may wait here for another one that has not joined an all-reduce
            with self._parts.group.tracker.within(Phase.ALL_REDUCE):
                limit.wait()

    def skipped(self) -> torch.Tensor | None:
        """Return on the device 1.0 if it skips the update of the current step, else 0.0.

        None: it never skips any. WHY 0.0 in a retry: the same kernels then follow as without it.
        """
        assert self._current is not None  # begin came first
        if not self.checks_one_step_late:
            return None
        if self._current.flag is None:
            return torch.zeros((), device=self._parts.device)
        return self._current.flag.on_device

    def after_update(self) -> None:
        """Note that the update is queued. Main thread, within the commit."""
        assert self._current is not None  # before_update came first
        self._current.after = Event()
        self._last, self._current = self._current, None
        self.unconfirmed = self._last if self._last.flag is not None else None

    def take_back(self, step: QueuedStep) -> None:
        """Note that a step is retried, since the device skipped its update. Main thread.

        WHY not as the last update: a step that is retried has no flag any more.
        """
        step.flag = None
        self._current, self._last = step, None

    def phase_of(self, host: int) -> int:
        """Return the phase in which the device is, by that of the host. Any thread.

        A host that waits for a sum may wait for its own device, stuck in a kernel of its own; and
        one that queues work may wait for the other ranks: no more launches fit into the queue.
        """
        last, current = self._last, self._current
        is_alone = self._parts.group.world_size == 1  # it waits for no other
        is_behind = last is not None and not last.before.is_reached()  # before the last update
        step = last if is_behind else current
        computed = None if step is None else step.computed
        if is_alone or (computed is not None and not computed.is_reached()):
            return Phase.BACKWARD if host == Phase.ALL_REDUCE else host
        is_queueing = is_behind and host in (Phase.FORWARD, Phase.BACKWARD)
        return Phase.ALL_REDUCE if is_queueing and computed is not None else host

    def forget(self) -> None:
        """Drop what is known: another state was loaded. Main thread."""
        self._current = self._last = self.unconfirmed = None

    def find(self, limit_s: float) -> Boundary | None:
        """Return the last boundary that the device has reached; None: it reached none in limit_s.

        Rank-local, while no other thread commits a step. Does not wait for work that is stuck.
        """
        end = time.monotonic() + limit_s
        while (found := self._find_now()) is None and time.monotonic() < end:
            time.sleep(_LOOK_EVERY_S)
        return found

    def _find_now(self) -> Boundary | None:
        last, current = self._last, self._current
        if last is not None and not last.after.is_reached():
            # Between the two events the weights are half updated.
            return None if last.before.is_reached() else _before(last)
        if last is not None and last.is_skipped():
            return _before(last)
        progress = replace(self._progress)
        if current is None:
            return Boundary(progress, NO_COPIES, self._totals.loss_sum)
        if not current.begun.is_reached():
            return None
        return Boundary(progress, current.attempt.buffers, current.attempt.totals_before[0])


def _before(step: QueuedStep) -> Boundary | None:
    """Return the boundary before an update; None: the device has not reached it."""
    if not step.begun.is_reached():
        return None
    return Boundary(step.progress, step.attempt.buffers, step.attempt.totals_before[0], step)


def beside(device: torch.device) -> AbstractContextManager[Any]:  # Any: not used
    """Queue the work inside on a stream of its own, which waits for no other.

    WHY the priority: torch has 32 streams of each. Those of 0 are given out in turn to the futures
    of DDP's hooks too, and wait for an all-reduce, perhaps for ever.
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # torch's
    return torch.cuda.stream(stream)


def copy_beside(
    tensors: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Copy tensors to the host, without waiting for the work that is queued on device."""
    with beside(device):
        # WHY empty_like: with the same memory layout the copy needs no kernel
        return {
            name: torch.empty_like(tensor, device="cpu").copy_(tensor)
            for name, tensor in tensors.items()
        }
