"""The table that the command evaluate prints: of classes, labels, tokens or output numbers.

Does not own: the counting (Task.in_detail), and what is reported (Task.report).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hardened_ddp.task.task import number_text

MAX_ROWS = 20  # of more, single ones say little, and the file has all
_NAME_WIDTH, _WIDTH = 20, 11

Report = Mapping[str, Any]  # Any: JSON; text, numbers, None where a divisor is 0


def report_lines(report: Report) -> list[str]:
    """Format the rows that a task reports, which have equal keys, as a table if they are few."""
    rows = report.get("classes") or report.get("rows")
    if not rows:
        return []
    names = [name for name in rows[0] if name != "name"]
    if len(rows) > MAX_ROWS:
        return [f"{', '.join(names)} of each of {len(rows)}: in the full report"]
    table = [["", *names]]
    table += [[str(row["name"]), *(_shown(row[name]) for name in names)] for row in rows]
    lines = []
    for first, *cells in table:
        columns = "".join(f"{cell:>{_WIDTH}}" for cell in cells)
        lines.append(f"{first[:_NAME_WIDTH]:<{_NAME_WIDTH}}{columns}")
    return ["", *lines]


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


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return number_text(value) if isinstance(value, float) else str(value)
