"""The progress of a run, and the sums of its scores since the last report.

Sums are kept on the device, so that adding to them never waits for it. WHY in place: small tensors
that outlive a step fragment the memory that the step frees, so the next step's large tensors do not
fit there: memory grew by 200 MiB for a 2 MiB model.
"""

from dataclasses import dataclass, fields

import torch

from hardened_ddp.data.sampler import Window
from hardened_ddp.ranks.group import Group
from hardened_ddp.task.task import Metric, Score, Task

NOT_EVALUATED = -1.0
"""best_accuracy before the first evaluation. A metric of just this value is beaten by any other."""

Mark = tuple[torch.Tensor | float, list[torch.Tensor] | list[float], int]
"""The loss, the sums of the metrics and the count at one moment."""


@dataclass(slots=True)
class Progress:
    """How far the run is. Equal on all ranks at every step boundary."""

    step: int = 0
    """Optimizer steps done."""

    epoch: int = 0
    cursor: int = 0
    """Samples of this epoch consumed so far, over all ranks."""

    best_accuracy: float = NOT_EVALUATED
    """The task's first metric at its best; called so in checkpoints, whatever the metric is."""

    num_errors: int = 0
    """Samples and steps left out so far."""

    most_samples: int = 0
    """The limit of samples in a micro-batch, found when memory ran out. 0: no limit."""

    def commit(self, window: Window) -> None:
        """Count the step over window as done."""
        self.step, self.cursor = self.step + 1, window.start + window.size

    def take_back(self, window: Window) -> None:
        """Count the last step, that over window, as not done."""
        self.step, self.cursor = self.step - 1, window.start

    def go_back_to(self, earlier: "Progress") -> None:
        """Take the values of an earlier state of the run. The limit most_samples stays."""
        most_samples = self.most_samples
        for field in fields(self):
            setattr(self, field.name, getattr(earlier, field.name))
        self.most_samples = most_samples

    def limit_micro_batches(self, most_samples: int) -> None:
        """Limit micro-batches to most_samples from now on."""
        self.most_samples = most_samples

    def count_errors(self, count: int) -> None:
        """Count samples or steps that were left out."""
        self.num_errors += count

    def note_best(self, metric: Metric, value: float) -> bool:
        """Record an evaluation; return whether it is the best so far."""
        is_first = self.best_accuracy == NOT_EVALUATED
        if not is_first and not metric.is_better(value, than=self.best_accuracy):
            return False
        self.best_accuracy = value
        return True

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
        self.sums = {
            name: torch.zeros((), dtype=dtype, device=device) for name, dtype in task.sums.items()
        }
        self.count = 0

    def add(self, score: Score) -> None:
        """Add the score of one forward."""
        self.loss_sum += score.loss_sum.detach()
        for name, total in self.sums.items():
            total += score.metrics[name]
        self.count += score.count

    def mark(self) -> Mark:
        """Copy the current sums, for go_back or a comparison. On the CPU without new tensors."""
        if self.loss_sum.is_cpu:
            return self.loss_sum.item(), [total.item() for total in self.sums.values()], self.count
        return self.loss_sum.clone(), [total.clone() for total in self.sums.values()], self.count

    def go_back(self, mark: Mark) -> None:
        """Restore the sums of mark."""
        loss_sum, sums, self.count = mark
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
        device = self.loss_sum.device
        sums = torch.stack(
            [
                self.loss_sum.double(),
                *(total.double() for total in self.sums.values()),
                torch.tensor(float(self.count), dtype=torch.float64).to(device),
            ]
        )
        loss, *values, samples = group.sum_(sums).tolist()  # collective
        count = max(1.0, samples)
        figures = self.task.figures(dict(zip(self.sums, values, strict=True)), count)
        return {"loss": loss / count, **figures, "samples": samples}
