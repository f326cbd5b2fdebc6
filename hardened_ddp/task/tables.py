"""What the command evaluate prints of a task besides its metrics: one row for each part of it.

Owns the counting per label, class, token or output number, and the report made from it. Counts are
sums, so they are the same on any number of ranks. The table of classification is in confusion.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.task.task import Score, number_text

MAX_ROWS = 20  # of a printed table: of more, single ones say little, and the file has all
_NAME_WIDTH = 20

Row = Mapping[str, Any]  # Any: text, numbers, None where a divisor is 0


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


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return number_text(value) if isinstance(value, float) else str(value)
