"""Regression: each sample has one or several numbers as its label.

The loss of a sample is the mean over its numbers; that of a step, the mean over its samples.
R2 of one number: 1 - sum((label - output)**2) / sum((label - mean label)**2), and of several the
mean of theirs, as in scikit-learn's r2_score. Labels that differ by less than 3 millionths of their
size count as equal, and have no R2: the sums of fp64 have no digits for them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.errors import ConfigError, ModelError
from hardened_ddp.task.output import described_labels, logits_of
from hardened_ddp.task.task import Figures, Metric, Score, Task, widened

_LOSSES: Mapping[str, Callable[..., torch.Tensor]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,
}
_NEED = "(num_samples, numbers of a label)"
_LEAST_SPREAD = 1e-11  # of labels, as a share of the sum of their squares


class Regression(Task):
    """A loss between outputs and labels: (N,), (N, 1) or (N, ...) floating point, both alike."""

    metrics = (
        Metric("rmse", form=".5g", is_higher_better=False),
        Metric("mae", form=".5g", is_higher_better=False),
        Metric("r2"),
    )
    counts_samples = True

    def __init__(self, *, loss: str = "mse", num_outputs: int = 1) -> None:
        """num_outputs: the numbers of one label."""
        if loss not in _LOSSES:
            raise ConfigError(
                f"task_args: regression has no loss {loss!r}",
                fix=f"--task_args '{{loss: {' | '.join(_LOSSES)}}}'",
            )
        self.loss = loss
        self.num_outputs = num_outputs

    @property
    def sums(self) -> Mapping[str, torch.Tensor]:
        names = ("squared_error", "absolute_error", "label", "squared_label")
        return {name: torch.zeros(self.num_outputs, dtype=torch.float64) for name in names}

    def score(self, output: Any, batch: Batch) -> Score:
        """Compare outputs with labels, number by number."""
        # WHY reshaped: (N, 1) - (N,) would be broadcast to (N, N), silently.
        outputs = widened(logits_of(output, need=_NEED)).reshape(-1, self.num_outputs)
        labels = batch.targets.to(outputs.dtype).reshape(-1, self.num_outputs)
        loss_sum = _LOSSES[self.loss](outputs, labels, reduction="none").mean(1).sum()
        found, wanted = outputs.detach().double(), labels.double()
        error = found - wanted
        sums = {
            "squared_error": error.square().sum(0),
            "absolute_error": error.abs().sum(0),
            "label": wanted.sum(0),
            "squared_label": wanted.square().sum(0),
        }
        return Score(loss_sum, len(labels), sums)

    def check(self, output: Any, batch: Batch) -> None:
        """Raise ModelError if outputs and labels have different sizes, or labels are NaN."""
        targets = batch.targets
        outputs = logits_of(output, need=_NEED)
        size = outputs[0].numel(), len(outputs)
        if not isinstance(targets, torch.Tensor) or (targets[0].numel(), len(targets)) != size:
            raise ModelError(
                f"the model gives outputs of shape {tuple(outputs.shape)} for labels of "
                f"{described_labels(targets)}; regression needs one output for each number",
                fix="give the model's last layer one output for each number of a label, which is "
                "a tensor",
            )
        numbers = targets.reshape(len(targets), -1)
        is_wrong = ~numbers.isfinite().all(1)
        if bool(is_wrong.any()):
            raise ModelError(
                f"the label of sample {int(batch.indices[is_wrong][0])} is NaN or infinite",
                fix="fill in or leave out such samples in the dataset",
            )

    def figures(self, sums: Mapping[str, Any], count: float) -> Figures:
        """Return RMSE and MAE over all numbers, and the mean R2 of those that vary."""
        columns = zip(sums["squared_error"], sums["label"], sums["squared_label"], strict=True)
        scores = []
        for error, total, squares in columns:
            spread = squares - total * total / count
            if spread > _LEAST_SPREAD * max(squares, 1e-300):
                scores.append(1 - error / spread)
        num_numbers = count * self.num_outputs
        return {
            "rmse": (sum(sums["squared_error"]) / num_numbers) ** 0.5,
            "mae": sum(sums["absolute_error"]) / num_numbers,
            "r2": sum(scores) / len(scores) if scores else float("nan"),
        }

    def report(self, sums: Mapping[str, Any], count: float) -> dict[str, Any]:
        """Return a row for each number of a label."""
        single = Regression()
        rows = []
        for index in range(self.num_outputs):
            own = {name: [sums[name][index]] for name in self.sums}
            rows.append({"name": f"output {index}", **single.figures(own, count)})
        return {"rows": rows}
