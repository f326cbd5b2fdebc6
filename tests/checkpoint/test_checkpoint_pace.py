"""Automatic checkpoints: early enough to lose little, and never a load on training or the disk."""

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.checkpoint.store import (
    CheckpointStore,
    CheckpointWriter,
    WriteCost,
    device_wait_s,
)
from hardened_ddp.training.state import Pace

HOUR = 3600.0
DISK = 1e9  # bytes/s


def save_for(hours: float, size_bytes: float, training_s: float) -> list[float]:
    """Return when a run saves whose writes cost so much."""
    now, free_at = 0.0, 0.0
    pace, saved_at = Pace(int(size_bytes), clock=lambda: now), list[float]()
    while now < hours * HOUR:
        now += 0.25
        cost = WriteCost(training_s, size_bytes / DISK) if saved_at else None
        if now >= free_at and pace.is_time(cost):
            pace.begin()
            saved_at.append(now)
            free_at = now + size_bytes / DISK
    return saved_at


@pytest.mark.parametrize("parameters", [1e5, 25.6e6, 1e9, 3e9, 30e9])
@pytest.mark.parametrize("training_s", [0.0, 0.02, 5.0])
def test_saving_takes_at_most_a_hundredth_of_the_time_and_a_tenth_of_the_disk(
    parameters: float, training_s: float
) -> None:
    size_bytes = 12 * parameters
    saved_at = save_for(6, size_bytes, training_s)
    assert saved_at[0] <= 600.25
    gaps = [after - before for before, after in pairwise(saved_at)]
    assert all(gap >= training_s / 0.01 for gap in gaps)
    assert all(gap >= size_bytes / DISK / 0.1 for gap in gaps)


class SlowDisk(Disk):
    def sync(self, descriptor: int) -> None:
        threading.Event().wait(0.5)
        super().sync(descriptor)


def test_a_write_measures_how_long_the_disk_was_in_use(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep_last=2, disk=SlowDisk()))
    assert writer.cost is None
    assert writer.submit(1, tensors={"weight": torch.ones(4)}, meta={})
    writer.before_update()
    writer.close()
    assert writer.cost is not None
    assert writer.cost.disk_s >= 1.0  # two files
    assert writer.cost.training_s < writer.cost.disk_s


class Event:
    """A CUDA event at a time, in ms."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.at_ms - self.at_ms


def test_the_wait_of_the_device_counts_from_where_it_begins() -> None:
    waits: list[Any] = [(Event(10.0), Event(250.0)), (Event(10.0), Event(8.0))]
    assert device_wait_s(waits) == 0.24
    assert device_wait_s(waits[1:]) == 0.0
