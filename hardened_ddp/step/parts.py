"""The parts of a run, built once and passed on; each is owned by its layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hardened_ddp.data.batches.loader import EvalLoader
from hardened_ddp.data.batches.sampler import RunLength
from hardened_ddp.data.loader_setup import AnyLoader, AnySampler
from hardened_ddp.data.sources.datasets import TaskData
from hardened_ddp.gradients.sums import GradientSum
from hardened_ddp.model.average import WeightAverage
from hardened_ddp.model.optimizer import skips_by_flag
from hardened_ddp.model.precision import Precision
from hardened_ddp.model.replica import Replica
from hardened_ddp.model.schedule import Schedule
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import PHASE
from hardened_ddp.reporting.events import Events
from hardened_ddp.settings.config import Config
from hardened_ddp.task.task import Task

ASYNC_DEVICES = ("cuda",)  # device types where reading a number waits for all work before it


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of one run on this rank."""

    config: Config
    group: Group
    device: torch.device
    data: TaskData
    sampler: AnySampler
    train_loader: AnyLoader
    eval_loader: EvalLoader | None
    replica: Replica
    gradients: GradientSum  # sums them over the ranks
    task: Task
    precision: Precision
    optimizer: torch.optim.Optimizer
    schedule: Schedule  # the learning rate of the optimizer
    global_batch: int  # samples of one step, over all ranks
    average: WeightAverage | None = None  # of the weights: --ema

    # The frozen weights that checkpoints leave out, and where they come from.
    base: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    length: RunLength  # optimizer steps of the whole run, which of a stream may be known only later
    events: Events = field(default_factory=Events)  # tells the user's command what happens

    @property
    def checks_loss(self) -> bool:
        """Check that each step is finite. WHY not on a GPU: that would wait for the device."""
        loop = self.config.loop
        is_cheap = not self.is_async_device
        return is_cheap and (loop.step_retry == "on" or loop.continue_on_error)

    @property
    def checks_one_step_late(self) -> bool:
        """Read a step later whether a gradient was good: async_device.py. The same on all ranks."""
        loop = self.config.loop
        if not self.is_async_device or loop.step_retry == "off" or loop.continue_on_error:
            return False
        return skips_by_flag(self.optimizer) and self.gradients.tells_of_failures

    @property
    def is_async_device(self) -> bool:
        """The host only queues the work of a step, and goes on: see async_device.py."""
        return self.device.type in ASYNC_DEVICES

    @property
    def compares_every(self) -> int:
        """Steps from one comparison of the replicas to the next; 0: never."""
        return self.config.loop.check_replicas_every if self.group.world_size > 1 else 0

    def close(self) -> None:
        """End the loaders' workers, and free DDP while the process group still lives."""
        self.gradients.release()
        self.train_loader.close()
        if self.eval_loader is not None:
            self.eval_loader.close()

    def call_after_workers_start(self, call: Callable[[], None]) -> None:
        """Run call each time that the loaders have started workers."""
        tracker = self.group.tracker

        def has_started() -> None:
            # WHY: restarts its clock; replacing workers is no hang
            tracker.enter(tracker.words[PHASE])
            call()

        self.train_loader.reader.call_after_start(has_started)
        if self.eval_loader is not None:
            self.eval_loader.reader.call_after_start(has_started)
