"""The tables that the command evaluate prints: of classes, labels, tokens or output numbers.

Does not own: the counting (Task.in_detail), and what is reported (Task.report).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hardened_ddp.task.task import number_text

MAX_ROWS = 20  # of a printed table: of more, single ones say little, and the file has all
MAX_COLUMNS = 20  # classes in the printed matrix: a wider one does not fit on a line
_NAME_WIDTH = 20
_SHARES = ("precision", "recall", "f1")

Report = Mapping[str, Any]  # Any: JSON; text, numbers, None where a divisor is 0


def report_lines(report: Report) -> list[str]:
    """Format what a task reports, as lines of text."""
    rows = report.get("classes") or report.get("rows", [])
    lines = []
    if count := report.get("predicted_no_class"):
        lines.append(f"predicted as no class of the data: {count} samples")
    lines += _row_lines(rows, shares=_SHARES if "classes" in report else ())
    if "confusion" in report and len(rows) <= MAX_COLUMNS:
        lines += ["", *_matrix_lines(rows, report["confusion"])]
    return lines


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


def _row_lines(rows: Sequence[Report], *, shares: Sequence[str]) -> list[str]:
    """Format rows with equal keys as a table; of many the worst, or where they are.

    shares: the keys of what is shown in percent.
    """
    if not rows:
        return []
    columns = [name for name in rows[0] if name != "name"]
    lines = [""]
    if len(rows) > MAX_ROWS:
        if "f1" not in columns:
            return [f"{', '.join(columns)} of each of {len(rows)}: in the full report"]
        lines.append(f"the {MAX_ROWS} worst of {len(rows)}:")
        rows = sorted(rows, key=lambda row: row["f1"] or 0.0)[:MAX_ROWS]
    width = 2 + max(map(len, [*columns, "123456789"]))
    lines.append(" " * _NAME_WIDTH + "".join(f"{name:>{width}}" for name in columns))
    for row in rows:
        cells = "".join(f"{_shown(row[name], name in shares):>{width}}" for name in columns)
        lines.append(f"{str(row['name'])[:_NAME_WIDTH]:<{_NAME_WIDTH}}{cells}")
    return lines


def _matrix_lines(classes: Sequence[Report], counts: Sequence[Sequence[int]]) -> list[str]:
    names = [entry["name"][:6] for entry in classes]
    width = max(len(str(max(map(max, counts)))), *(len(name) for name in names)) + 1
    lines = ["confusion matrix: a row for each label, a column for each prediction"]
    lines.append(f"{'':8}" + "".join(f"{name:>{width}}" for name in names))
    for name, row in zip(names, counts, strict=True):
        lines.append(f"{name:<8}" + "".join(f"{count or '.':>{width}}" for count in row))
    return lines


def _shown(value: Any, is_share: bool) -> str:
    if value is None:
        return "-"
    if is_share:
        return f"{value:.2%}"
    return number_text(value) if isinstance(value, float) else str(value)
