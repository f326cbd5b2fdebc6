"""Multilabel classification: each sample has a 0 or 1 for each of several labels.

The loss of a sample is the mean binary cross-entropy over the labels. F1 of one label is
2 TP / (2 TP + FP + FN); the metric is the mean over the labels that occur or are predicted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.errors import ModelError
from hardened_ddp.task.output import described_labels, logits_of
from hardened_ddp.task.task import Figures, Metric, Score, Task, name_of, shares_of, widened

_NEED = "(num_samples, num_labels)"


class Multilabel(Task):
    """Binary cross-entropy of logits (N, num_labels) and labels of the same shape, 0 or 1.

    A single label may also be (N,), as in binary classification with one output.
    """

    metrics = (Metric("f1", form=".2%"), Metric("exact_match", form=".2%"))
    counts_samples = True
    learns = ("num_labels",)

    def __init__(self, *, num_labels: int, class_names: Sequence[str] = ()) -> None:
        self.num_labels = num_labels
        self.class_names = class_names

    @property
    def sums(self) -> Mapping[str, torch.Tensor]:
        counts = torch.zeros(self.num_labels, dtype=torch.int64)
        return {
            "true_positive": counts,
            "predicted": counts,
            "positive": counts,
            "exact": torch.zeros((), dtype=torch.int64),
        }

    def score(self, output: Any, batch: Batch) -> Score:
        """Compare each logit with its label; a logit above 0 predicts the label."""
        logits, targets = _alike(logits_of(output, need=_NEED), batch.targets)
        wide = widened(logits)
        losses = binary_cross_entropy_with_logits(wide, targets.to(wide.dtype), reduction="none")
        predictions, labels = logits.detach() > 0, targets > 0
        sums = {
            "true_positive": (predictions & labels).sum(0),
            "predicted": predictions.sum(0),
            "positive": labels.sum(0),
            "exact": predictions.eq(labels).all(1).sum(),
        }
        return Score(losses.mean(1).sum(), len(labels), sums)

    def check(self, output: Any, batch: Batch) -> None:
        """Raise ModelError if logits and labels differ in shape, or a label is not 0 or 1."""
        targets = batch.targets
        logits = logits_of(output, need=_NEED)
        is_labelled = isinstance(targets, torch.Tensor)
        pair = _alike(logits, targets) if is_labelled else (logits, targets)
        if not is_labelled or pair[0].dim() != 2 or pair[0].shape != pair[1].shape:
            raise ModelError(
                f"the model gives logits of shape {tuple(logits.shape)} for labels of "
                f"{described_labels(targets)}; multilabel needs both alike: {_NEED}",
                fix="give the model's last layer one output for each label",
            )
        self.num_labels = pair[0].shape[1]
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise ModelError(
                "multilabel needs labels that are 0 or 1, and one is "
                f"{targets[(targets != 0) & (targets != 1)][0].item()}",
                fix="give 0 or 1 for each label; for numbers: --task regression",
            )

    def figures(self, sums: Mapping[str, Any], count: float) -> Figures:
        """Return the mean F1 of the labels, and the share of samples with every label right."""
        scores = [entry["f1"] for entry in self._label_figures(sums) if entry["f1"] is not None]
        return {
            "f1": sum(scores) / len(scores) if scores else 0.0,
            "exact_match": sums["exact"] / count,
        }

    def report(self, sums: Mapping[str, Any], count: float) -> dict[str, Any]:
        """Return a row for each label."""
        return {"rows": self._label_figures(sums)}

    def _label_figures(self, sums: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return precision, recall and F1 of each label; None where the divisor is 0."""
        columns = zip(sums["true_positive"], sums["predicted"], sums["positive"], strict=True)
        return [
            {
                "name": name_of(index, self.class_names),
                "samples": int(labelled),
                **shares_of(hit, predicted=predicted, labelled=labelled),
            }
            for index, (hit, predicted, labelled) in enumerate(columns)
        ]


def _alike(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both with a column for each label; other shapes stay."""
    columns = [part.unsqueeze(1) if part.dim() == 1 else part for part in (logits, targets)]
    return columns[0], columns[1]
