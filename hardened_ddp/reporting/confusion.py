"""The report of the command evaluate: figures of each class, a table, a JSON file.

Owns what is made of a confusion matrix. Rows are labels, columns are predictions.
Does not own: counting it (training/evaluate_run.py).
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from hardened_ddp.errors import RunFolderError

MOST_ROWS = 50  # classes in the printed table; the file has all
MOST_COLUMNS = 20  # classes in the printed matrix: more do not fit beside each other
_NAME_WIDTH = 20


def class_figures(
    counts: Sequence[Sequence[int]], *, names: Sequence[str]
) -> list[dict[str, str | int | float | None]]:
    """Give samples, precision, recall and F1 of each class; None where nothing is divided by.

    counts: a row for each class; columns beyond the classes hold predictions of none of them.
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


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report, complete or not at all. Raises RunFolderError."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise RunFolderError(
            f"the report can't be written to {path}: {error}",
            fix="choose another place: --output FILE",
        ) from error


def print_report(report: Mapping[str, Any], *, place: Path, output: TextIO) -> None:
    """Print the report as a table."""
    lines = [
        f"checkpoint {report['checkpoint']} (step {report['step']})",
        f"test set of {report['dataset']}: {report['num_samples']} samples, each once",
        f"loss {report['loss']:.4f}  accuracy {report['accuracy']:.2%}",
    ]
    if not report["is_data_of_training"]:
        lines.append("note: this is not the data of the training")
    if report["left_out"]:
        lines.append(f"left out, as they can't be read: {len(report['left_out'])} samples")
    if report["predicted_no_class"]:
        lines.append(f"predicted as no class of the data: {report['predicted_no_class']} samples")
    lines += ["", *_class_table(report["classes"])]
    if len(report["classes"]) <= MOST_COLUMNS:
        lines += ["", *_matrix(report["classes"], report["confusion"])]
    lines += ["", f"all of it: {place}"]
    for line in lines:
        print(line.encode("ascii", "backslashreplace").decode("ascii"), file=output)


def _class_table(classes: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"{'class':<{_NAME_WIDTH}}  samples  precision  recall      F1"]
    shown = sorted(classes, key=lambda entry: entry["f1"] or 0.0)[:MOST_ROWS]
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
