"""On a GPU: the last update that the device has finished, found without waiting for the device.

Owns events around each update, and the copy of a state while the device is stuck. The host queues
work and goes on. If another rank dies or is stopped, NCCL's all-reduce never ends, and nothing that
was queued behind it runs: the update, the copy of the flag that tells whether the gradient was good
(late.py), each read on the same stream. But the weights in the device's memory are those of the
last finished update, and a second stream can still copy them. They are those of a step boundary if
the event after that update is reached before the copy, and the one before the next update is still
not reached after it.

The host is at most one update ahead of the device, so there is only one next update.
What goes wrong here: a kernel on the second stream. To load one may wait for the whole device, so
there are only copies.
Read next: training/survivor_save.py, the caller.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hardened_ddp.model.optimizer import skips_by_flag
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress, Totals

if TYPE_CHECKING:
    from hardened_ddp.step.attempt import Attempt

_LOOK_EVERY_S = 0.01


class Event(Protocol):
    """A point in the work that was queued on a device."""

    def is_reached(self) -> bool:
        """Return whether the device is past it. Does not wait."""

    def wait(self) -> None:
        """Wait until the device is past it."""


class DeviceEvent:
    """An event on this thread's current stream of a GPU."""

    def __init__(self) -> None:
        # WHY blocking: else the wait for it spins, and takes a core of the loader's workers
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
        self._event.record()

    def is_reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # torch's

    def wait(self) -> None:
        self._event.synchronize()


class HostEvent:
    """An event on the CPU, which runs its work at once."""

    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        return


def new_event(device: torch.device) -> Event:
    """Return an event that comes after the work queued on device so far."""
    return DeviceEvent() if device.type == "cuda" else HostEvent()


def beside(device: torch.device) -> AbstractContextManager[Any]:  # Any: nothing of use
    """Queue the work inside on a stream of its own, which waits for no other."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch's


@dataclass(frozen=True, slots=True)
class Update:
    """A committed step, and events around its update."""

    attempt: "Attempt"
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


class Boundaries:
    """Follows the updates of a run on a device that runs behind the host."""

    def __init__(self, parts: Parts, progress: Progress, totals: Totals) -> None:
        self._progress = progress
        self._totals = totals
        self._device = parts.device
        self._tracker = parts.group.tracker
        self._current: Attempt | None = None
        self._before: Event | None = None
        self._progress_before = progress
        self._last: Update | None = None
        # WHY: such an optimizer keeps numbers on the host, which would be ahead of the weights.
        self._waits_for_gradient = not skips_by_flag(parts.optimizer)

    def begin(self, attempt: "Attempt") -> None:
        """Note that a step begins; its buffers and sums are copied. Main thread."""
        attempt.begun = new_event(self._device)
        self._current = attempt

    def before_update(self, attempt: "Attempt") -> None:
        """Note that the update of a step comes next. Main thread, before the commit.

        Waits for the update before it, so that the host is not further ahead. WHY not with a flag:
        reading the flag of the step before has waited.
        """
        flag = attempt.flag
        self._before = before = new_event(self._device) if flag is None else flag.send()
        self._progress_before = replace(self._progress)
        if flag is not None:
            return
        limit: Event | None = before
        if not self._waits_for_gradient:
            limit = None if self._last is None else self._last.after
        if limit is not None and not limit.is_reached():
            # WHY: this rank may wait here for another one that has not joined an all-reduce
            with self._tracker.within(Phase.ALL_REDUCE):
                limit.wait()

    def after_update(self, attempt: "Attempt") -> None:
        """Note that the update is queued. Main thread, within the commit."""
        assert self._before is not None  # before_update came first
        after = new_event(self._device)
        self._last = Update(attempt, self._progress_before, self._before, after)
        self._current = None

    def take_back(self, attempt: "Attempt") -> None:
        """Note that a step is done again, since the device skipped its update. Main thread.

        WHY not as the last update: a step that is done again gets another flag, or none.
        """
        self._current, self._last = attempt, None

    def forget(self) -> None:
        """Drop what is known: another state was loaded. Main thread."""
        self._current = self._before = self._last = None

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


def read_beside(number: torch.Tensor | float, device: torch.device) -> float:
    """Read a number on device without waiting for the work that is queued there."""
    with beside(device):
        return float(number)


def _before(update: Update) -> Boundary | None:
    """Return the boundary before an update; None: the device has not reached it."""
    attempt = update.attempt
    if attempt.begun is None or not attempt.begun.is_reached():
        return None
    return Boundary(update.progress, attempt.buffers, attempt.totals_before[0], update)
