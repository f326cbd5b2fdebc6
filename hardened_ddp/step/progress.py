"""The progress of a run, and the sums of its scores since the last report.

Sums are kept on the device, so that adding to them never waits for it. WHY in place: small tensors
that outlive a step fragment the memory that the step frees, so the next step's large tensors do not
fit there: memory grew by 200 MiB for a 2 MiB model.
"""

import math
import sys
from dataclasses import dataclass, fields
from typing import Any

import torch

from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.ranks.group import Group
from hardened_ddp.task.task import LOSS, Metric, Score, Task

Mark = tuple[torch.Tensor | float, list[torch.Tensor | float], int]
"""The loss, the sums of the metrics and the number of samples at one moment."""

COUNT = "count"
"""The sum of what the loss is a mean over, among the sums of a task that does not count samples."""

NEVER_FINITE = sys.float_info.max
"""The size of a stop_value while no evaluation had a finite one. WHY not inf: JSON has none."""


@dataclass(slots=True)
class Progress:
    """How far the run is. Equal on all ranks at every step boundary."""

    step: int = 0
    """Optimizer steps done."""

    epoch: int = 0
    cursor: int = 0
    """Samples of this epoch consumed so far, over all ranks."""

    best_metric: str = ""
    """The metric that decides which checkpoint is best. Empty: none was compared yet."""

    best_value: float = 0.0
    """That metric at its best so far."""

    stop_metric: str = ""
    """The metric that ends the run when it no longer improves. Empty: none was compared yet."""

    stop_value: float = 0.0
    """That metric at its best so far."""

    num_worse: int = 0
    """Evaluations since then."""

    num_errors: int = 0
    """Samples and steps left out so far."""

    max_micro_batch: int = 0
    """The limit of samples in a micro-batch, found when memory ran out. 0: no limit."""

    def commit(self, window: Window) -> None:
        """Count the step over window as done."""
        self.step, self.cursor = self.step + 1, window.start + window.size

    def take_back(self, window: Window) -> None:
        """Count the last step, that over window, as not done."""
        self.step, self.cursor = self.step - 1, window.start

    def go_back_to(self, earlier: "Progress") -> None:
        """Take the values of an earlier state of the run. The limit max_micro_batch stays."""
        max_micro_batch = self.max_micro_batch
        for field in fields(self):
            setattr(self, field.name, getattr(earlier, field.name))
        self.max_micro_batch = max_micro_batch

    def limit_micro_batches(self, max_micro_batch: int) -> None:
        """Limit micro-batches to max_micro_batch from now on."""
        self.max_micro_batch = max_micro_batch

    def count_errors(self, count: int) -> None:
        """Count samples or steps that were left out."""
        self.num_errors += count

    def note_best(self, metric: Metric, value: float) -> bool:
        """Record an evaluation; return whether it is the best so far. NaN is never the best."""
        is_first = self.best_metric != metric.name
        if math.isnan(value) or not (is_first or metric.is_better(value, than=self.best_value)):
            return False
        self.best_metric, self.best_value = metric.name, value
        return True

    def note_for_stop(self, metric: Metric, value: float) -> None:
        """Record an evaluation for early stopping.

        NaN and infinity are never better, nor is the same value again; so a metric that is NaN
        from the first evaluation on counts as not improving.
        """
        is_first, is_finite = self.stop_metric != metric.name, math.isfinite(value)
        is_other = value != self.stop_value
        is_better = is_first or (is_other and metric.is_better(value, than=self.stop_value))
        if is_finite and is_better:
            self.stop_metric, self.stop_value, self.num_worse = metric.name, value, 0
        elif is_first:
            worst = -NEVER_FINITE if metric.is_higher_better else NEVER_FINITE
            self.stop_metric, self.stop_value, self.num_worse = metric.name, worst, 1
        else:
            self.num_worse += 1

    def end_epoch(self, end: int) -> None:
        """Go to the start of the next epoch if the cursor is at the end of this one."""
        if self.cursor >= end:
            self.epoch, self.cursor = self.epoch + 1, 0

    def reopen_epoch(self, end: int) -> None:
        """Undo end_epoch: the work after an epoch's last step is still to be done."""
        if self.cursor == 0:
            self.epoch, self.cursor = self.epoch - 1, end


class Totals:
    """Loss, sums of the task's metrics, and their count, since the last reading."""

    def __init__(
        self, task: Task, device: torch.device, *, loss_dtype: torch.dtype = torch.float32
    ) -> None:
        self.task = task
        self.loss_sum = torch.zeros((), dtype=loss_dtype, device=device)
        zeros = dict(task.sums)
        if not task.counts_samples:
            zeros[COUNT] = torch.zeros((), dtype=torch.float64)
        self.sums = {name: torch.zeros_like(zero, device=device) for name, zero in zeros.items()}
        self.num_samples = 0
        self.grad_norm: torch.Tensor | None = None
        """The gradient's norm in the last reported step."""

        self.num_steps = 0
        """Steps since the last reading, also those that were left out. The same on all ranks."""

    def add(self, score: Score, num_samples: int) -> None:
        """Add the score of one forward on num_samples samples."""
        with torch.no_grad():
            self.loss_sum += score.loss_sum
        for name, value in self.task.sums_of(score).items():
            self.sums[name] += value
        if COUNT in self.sums:
            self.sums[COUNT] += score.count
        self.num_samples += num_samples

    def reset(self) -> None:
        """Begin again at zero."""
        for total in (self.loss_sum, *self.sums.values()):
            total.zero_()
        self.num_samples = self.num_steps = 0

    def mark(self) -> Mark:
        """Copy the current sums, for go_back or a comparison. On the CPU without new scalars."""
        is_cpu, sums = self.loss_sum.is_cpu, self.sums.values()
        copies = [total.item() if is_cpu and not total.dim() else total.clone() for total in sums]
        return self.loss_sum.item() if is_cpu else self.loss_sum.clone(), copies, self.num_samples

    def go_back(self, mark: Mark) -> None:
        """Restore the sums of mark."""
        loss_sum, sums, self.num_samples = mark
        for total, before in zip(
            (self.loss_sum, *self.sums.values()), (loss_sum, *sums), strict=True
        ):
            if isinstance(before, torch.Tensor):
                total.copy_(before)
            else:
                total.fill_(before)

    def loss(self) -> float:
        """Return the sum of the losses. Waits for the device."""
        return float(self.loss_sum)

    def loss_since(self, mark: Mark) -> float:
        """Return the loss added since mark. Waits for the device."""
        return self.loss() - float(mark[0])

    def read(self, group: Group) -> dict[str, float]:
        """Return the mean loss, each metric and the samples over all ranks. Collective."""
        sums, count = self.gather(group)  # collective
        figures = self.task.figures(sums, count)
        return {LOSS: sums[LOSS] / count, **figures, "samples": sums["samples"]}

    def gather(self, group: Group) -> tuple[dict[str, Any], float]:  # Any: numbers, nested lists
        """Return the sums by name and what the loss is a mean over, of all ranks. Collective."""
        device = self.loss_sum.device
        totals = [self.loss_sum, *self.sums.values()]
        # WHY full: a tensor made of a list would be copied to the device, which waits for it
        num_samples = torch.full((1,), self.num_samples, dtype=torch.float64, device=device)
        flat = torch.cat([*(total.double().reshape(-1) for total in totals), num_samples])
        values = group.sum_(flat).tolist()  # collective
        samples, position, sums = values.pop(), 0, []
        for total in totals:
            part = values[position : position + total.numel()]
            position += total.numel()
            sums.append(torch.tensor(part, dtype=torch.float64).view(total.shape).tolist())
        named: dict[str, Any] = dict(zip((LOSS, *self.sums), sums, strict=True))
        return {**named, "samples": samples}, max(1.0, named.get(COUNT, samples))
