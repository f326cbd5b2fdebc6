"""The progress of a run: how far it is, and its best evaluations so far."""

import math
import sys
from dataclasses import dataclass, fields

from hardened_ddp.task.task import Metric

# The size of a stop_value while no evaluation had a finite one. WHY not inf: JSON has none.
NEVER_FINITE = sys.float_info.max


@dataclass(slots=True)
class Progress:
    """How far the run is. Equal on all ranks at every step boundary."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    cursor: int = 0  # samples of this epoch consumed so far, over all ranks

    # The metric that decides which checkpoint is best. Empty: none was compared yet.
    best_metric: str = ""
    best_value: float = 0.0  # that metric at its best so far

    # The metric that ends the run when it no longer improves. Empty: none was compared yet.
    stop_metric: str = ""
    stop_value: float = 0.0  # that metric at its best so far
    num_worse: int = 0  # evaluations since then
    evaluated_step: int = 0  # the step after which the test set was last measured
    num_errors: int = 0  # samples and steps left out so far

    # The limit of samples in a micro-batch, found when memory ran out. 0: no limit.
    max_micro_batch: int = 0

    def go_back_to(self, earlier: "Progress") -> None:
        """Take the values of an earlier state of the run. The limit max_micro_batch stays."""
        max_micro_batch = self.max_micro_batch
        for field in fields(self):
            setattr(self, field.name, getattr(earlier, field.name))
        self.max_micro_batch = max_micro_batch

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
        if self.stop_metric != metric.name:
            self.stop_metric, self.num_worse = metric.name, 0
            self.stop_value = -NEVER_FINITE if metric.is_higher_better else NEVER_FINITE
        is_other = math.isfinite(value) and value != self.stop_value
        if is_other and metric.is_better(value, than=self.stop_value):
            self.stop_value, self.num_worse = value, 0
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
