"""Models that have CPU ranks learn of a bad gradient one step later, as ranks with GPUs do.

Imported by a rank when it builds its model, which is before that choice is made.
"""

import logging

from torch import nn

from hardened_ddp.step import async_device, parts
from hardened_ddp.step.async_device import Flag
from tests.plugins import FailingOnce

log = logging.getLogger("hardened_ddp.late_looks")


class ToldFlag(Flag):
    """Says that it is up: so a test knows that this is how the fault was learned of."""

    def is_up(self) -> bool:
        is_up = super().is_up()
        if is_up:
            log.warning("a flag was up")
        return is_up


class HostEvent:
    """An event on the CPU, which runs its work at once."""

    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        return


parts.ASYNC_DEVICES = (*parts.ASYNC_DEVICES, "cpu")
async_device.Flag, async_device.Event = ToldFlag, HostEvent  # type: ignore[misc, assignment]

__all__ = ["FailingOnce", "mlp"]


def mlp(num_classes: int) -> nn.Module:
    """Build a network for the digits, with BatchNorm: a forward changes its statistics."""
    hidden = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    return nn.Sequential(nn.Flatten(), hidden, nn.Linear(32, num_classes))
