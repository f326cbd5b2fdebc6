"""What the command evaluate shows of a task besides its metrics: tables.

Owns the counting per label, class, token or output number, and the reports made from it. Counts are
sums of integers or of the task's own sums, so they are the same on any number of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.task.task import Score, number_text

MAX_ROWS = 20  # of a printed table: of more, single ones say little, and the file has all
MAX_COLUMNS = 20  # classes in the printed matrix: a wider one does not fit on a line
_NAME_WIDTH = 20

Row = Mapping[str, Any]  # Any: text, numbers, None where a divisor is 0


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
        """Return the matrix and the figures of each class; None where the divisor is 0."""
        counts = self.sums.tolist()
        classes = []
        for index, row in enumerate(counts):
            num_samples, num_predicted = sum(row), sum(other[index] for other in counts)
            classes.append(
                {
                    "name": name_of(index, self.names),
                    "samples": num_samples,
                    "predicted": num_predicted,
                    **shares_of(row[index], predicted=num_predicted, labelled=num_samples),
                }
            )
        return {
            "classes": classes,
            "confusion": self.sums[:, :-1].tolist(),
            "predicted_no_class": int(self.sums[:, -1].sum()),
        }

    def lines(self, report: Mapping[str, Any]) -> list[str]:
        """Format a table of the classes, and the matrix if it is small enough to be read."""
        lines = []
        if report["predicted_no_class"]:
            count = report["predicted_no_class"]
            lines.append(f"predicted as no class of the data: {count} samples")
        lines += ["", *_class_table(report["classes"])]
        if len(report["classes"]) <= MAX_COLUMNS:
            lines += ["", *_matrix(report["classes"], report["confusion"])]
        return lines


class SumsTable:
    """A table made from some sums of the task's own metrics, and the number of samples."""

    def __init__(
        self,
        zeros: Mapping[str, torch.Tensor],
        rows: Callable[[Mapping[str, Any], float], Sequence[Row]],
        *,
        device: torch.device,
    ) -> None:
        """zeros: the task's sums. rows: makes the rows of the sums over the whole test set."""
        self._shapes = {name: zero.shape for name, zero in zeros.items()}
        self._rows = rows
        size = sum(zero.numel() for zero in zeros.values())
        self.sums = torch.zeros(size + 1, dtype=torch.float64, device=device)

    def add(self, score: Score, batch: Batch) -> None:
        """Add the sums of one forward."""
        parts = [score.metrics[name].double().reshape(-1) for name in self._shapes]
        self.sums[:-1] += torch.cat(parts)
        self.sums[-1] += batch.num_samples

    def report(self) -> dict[str, Any]:  # Any: JSON
        """Return the rows."""
        values, position, named = self.sums.cpu(), 0, {}
        for name, shape in self._shapes.items():
            part = values[position : position + shape.numel()].view(shape)
            named[name], position = part.tolist(), position + shape.numel()
        return {"rows": list(self._rows(named, float(values[-1])))}

    def lines(self, report: Mapping[str, Any]) -> list[str]:
        """Format the rows as a table."""
        return row_lines(report["rows"])


class TokenTable:
    """How often each token occurs among the labels, and how often it is predicted right."""

    def __init__(
        self,
        vocabulary: int,
        aligned: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        *,
        device: torch.device,
    ) -> None:
        """aligned: returns predictions and labels of the positions that count, both flat."""
        self.sums = torch.zeros(2, vocabulary, dtype=torch.int64, device=device)
        self._aligned = aligned

    def add(self, score: Score, batch: Batch) -> None:
        """Count the labels of one forward."""
        predictions, labels = self._aligned(score.predictions, batch.targets)
        vocabulary = self.sums.shape[1]
        self.sums[0] += torch.bincount(labels, minlength=vocabulary)
        self.sums[1] += torch.bincount(labels[predictions == labels], minlength=vocabulary)

    def report(self) -> dict[str, Any]:  # Any: JSON
        """Return a row for each token that occurs, the most frequent first."""
        counts, correct = self.sums.tolist()
        order = sorted(range(len(counts)), key=lambda token: -counts[token])
        return {
            "rows": [
                {
                    "name": str(token),
                    "labels": counts[token],
                    "accuracy": correct[token] / counts[token],
                }
                for token in order
                if counts[token]
            ]
        }

    def lines(self, report: Mapping[str, Any]) -> list[str]:
        """Format the tokens as a table, if they are few."""
        return row_lines(report["rows"])


def shares_of(hit: float, *, predicted: float, labelled: float) -> dict[str, float | None]:
    """Return precision, recall and F1 of one class from its counts; None where the divisor is 0."""
    return {
        "precision": hit / predicted if predicted else None,
        "recall": hit / labelled if labelled else None,
        "f1": 2 * hit / (predicted + labelled) if predicted + labelled else None,
    }


def name_of(index: int, names: Sequence[str]) -> str:
    """Return the name of a class; a model may have more outputs than there are names."""
    return names[index] if index < len(names) else str(index)


def row_lines(rows: Sequence[Row]) -> list[str]:
    """Format rows with equal keys as a table; of many, say where they are."""
    if not rows:
        return []
    if len(rows) > MAX_ROWS:
        told = ", ".join(name for name in rows[0] if name != "name")
        return [f"{told} of each of {len(rows)}: in the full report"]
    columns = [name for name in rows[0] if name != "name"]
    lines = ["", f"{'':<{_NAME_WIDTH}}" + "".join(f"{name:>16}" for name in columns)]
    lines += [
        f"{str(row['name'])[:_NAME_WIDTH]:<{_NAME_WIDTH}}"
        + "".join(f"{_shown(row[name]):>16}" for name in columns)
        for row in rows
    ]
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


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return number_text(value) if isinstance(value, float) else str(value)
