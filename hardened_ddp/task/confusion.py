"""The confusion matrix, and the precision, recall and F1 of each class.

Owns the counting and the report made from it. Rows are labels, columns are predictions. The counts
are integers, so they are the same on any number of ranks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.task.task import Score

MAX_ROWS = 20  # classes in the printed table; the file has all
MAX_COLUMNS = 20  # classes in the printed matrix: a wider one does not fit on a line
_NAME_WIDTH = 20


class ConfusionMatrix:
    """Counts how often each class was predicted for each label."""

    def __init__(
        self, num_classes: int, *, names: Sequence[str] = (), device: torch.device
    ) -> None:
        # The last column is for outputs beyond the classes: a model may have more of them.
        self.sums = torch.zeros(num_classes, num_classes + 1, dtype=torch.int64, device=device)
        self.names = names

    def add(self, score: Score, batch: Batch) -> None:
        """Count the predictions of one forward; each target is one of the classes."""
        num_classes, width = self.sums.shape
        places = batch.targets * width + score.predictions.clamp(max=num_classes)
        self.sums += torch.bincount(places, minlength=self.sums.numel()).view_as(self.sums)

    def report(self) -> dict[str, Any]:  # Any: JSON
        """Return the matrix and the figures of each class."""
        return {
            "classes": class_figures(self.sums.tolist(), names=self.names),
            "confusion": self.sums[:, :-1].tolist(),
            "predicted_no_class": int(self.sums[:, -1].sum()),
        }

    def lines(self, report: Mapping[str, Any]) -> list[str]:
        """Format the result of report as lines of text."""
        return confusion_lines(report)


def class_figures(
    counts: Sequence[Sequence[int]], *, names: Sequence[str]
) -> list[dict[str, str | int | float | None]]:
    """Return samples, precision, recall and F1 of each class; None where the divisor is 0.

    counts: a row for each class; columns beyond the classes count outputs that are no class.
    """
    figures: list[dict[str, str | int | float | None]] = []
    for index, row in enumerate(counts):
        correct, num_samples = row[index], sum(row)
        num_predicted = sum(other[index] for other in counts)
        figures.append(
            {
                "name": names[index] if index < len(names) else str(index),
                "samples": num_samples,
                "predicted": num_predicted,
                "precision": _ratio(correct, num_predicted),
                "recall": _ratio(correct, num_samples),
                "f1": _ratio(2 * correct, num_samples + num_predicted),
            }
        )
    return figures


def confusion_lines(report: Mapping[str, Any]) -> list[str]:
    """Format a table of the classes, and the matrix if it is small enough to be read."""
    lines = []
    if report["predicted_no_class"]:
        lines.append(f"predicted as no class of the data: {report['predicted_no_class']} samples")
    lines += ["", *_class_table(report["classes"])]
    if len(report["classes"]) <= MAX_COLUMNS:
        lines += ["", *_matrix(report["classes"], report["confusion"])]
    return lines


def _class_table(classes: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"{'class':<{_NAME_WIDTH}}  samples  precision  recall      F1"]
    shown = sorted(classes, key=lambda entry: entry["f1"] or 0.0)[:MAX_ROWS]
    if len(shown) < len(classes):
        lines.insert(0, f"the {len(shown)} worst of {len(classes)} classes:")
    else:
        shown = list(classes)
    lines += [
        f"{entry['name'][:_NAME_WIDTH]:<{_NAME_WIDTH}}  {entry['samples']:>7}"
        f"  {_share(entry['precision']):>9}  {_share(entry['recall']):>6}  {_share(entry['f1']):>6}"
        for entry in shown
    ]
    return lines


def _matrix(classes: Sequence[Mapping[str, Any]], counts: Sequence[Sequence[int]]) -> list[str]:
    names = [entry["name"][:6] for entry in classes]
    width = max(len(str(max(map(max, counts)))), *(len(name) for name in names)) + 1
    lines = ["confusion matrix: a row for each label, a column for each prediction"]
    lines.append(f"{'':8}" + "".join(f"{name:>{width}}" for name in names))
    for name, row in zip(names, counts, strict=True):
        lines.append(f"{name:<8}" + "".join(f"{count or '.':>{width}}" for count in row))
    return lines


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
