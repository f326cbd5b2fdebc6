"""Points in the work that a device does later, and copies beside that work.

On the CPU everything is done at once. A GPU runs behind the host, which only queues its work.
Read next: async_device.py.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


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
        self._arrived = new_event(self.on_device.device)
        return self._arrived

    def is_up(self) -> bool:
        """Return whether the gradient was bad. Waits until the device has computed it."""
        if self._arrived is not None:
            self._arrived.wait()
        return bool(self._on_host)


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
