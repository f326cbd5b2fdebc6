"""The results of a run: summary.json and the commands to continue with; the report of evaluate."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from hardened_ddp.errors import RunFolderError
from hardened_ddp.reporting.sinks import write_whole
from hardened_ddp.settings.typed_command import own_command, python_command, shell_command
from hardened_ddp.settings.wording import printable

log = logging.getLogger(__name__)

_NAME = "summary.json"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, complete or not at all. A failure is a warning."""
    try:
        text = json.dumps(summary, default=str)
        plain = json.loads(text, parse_constant=lambda _: None)  # NaN and infinity are no JSON
        write_whole(folder / _NAME, json.dumps(plain, indent=2) + "\n")
    except OSError as error:
        log.warning("summary.json can't be written: %s", error)


def finished_at(folder: Path) -> int | None:
    """Return the step at which a run finished; None if it did not, or its summary is unreadable."""
    try:
        summary = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        step = summary["step"] if summary["status"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # none yet, or no summary
        return None
    return step if type(step) is int else None


def withdraw_summary(folder: Path) -> None:
    """Remove the summary of an earlier start. WHY: it says nothing about the one that begins."""
    try:
        (folder / _NAME).unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s can't be removed: %s", folder / _NAME, error)


def closing_lines(
    folder: Path, *, status: str, result: str, resume: str, has_tensorboard: bool
) -> list[str]:
    """Return lines that say how the run ended, and the commands to continue with."""
    lines = [f"{status}: {result or 'no evaluation'}", f"run folder:  {shell_command(folder)}"]
    if has_tensorboard:
        # WHY not the program tensorboard: its first line breaks when the environment is moved.
        command = python_command("-m", "tensorboard.main", "--logdir", folder / "tensorboard")
        lines.append(f"TensorBoard: {command}")
    return [
        *lines,
        f"resume:      {resume}",
        f"evaluate:    {own_command('evaluate', folder)}",
        f"export:      {own_command('export', folder)}",
    ]


def tell_report(
    report: Mapping[str, Any], *, metrics: str, table: Sequence[str], place: Path, output: TextIO
) -> None:
    """Write the report to place, complete or not at all, and print it. Raises RunFolderError."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        told = f"the report can't be written to {place}: {error}"
        raise RunFolderError(told, fix="choose another place: --output FILE") from error
    lines = [
        f"checkpoint {report['checkpoint']} (step {report['step']})",
        f"test set of {report['dataset']}: {report['num_samples']} samples, each once",
        metrics,
    ]
    if not report["is_data_of_training"]:
        lines.append("note: this is not the data of the training")
    if report["left_out"]:
        lines.append(f"left out, because they can't be read: {len(report['left_out'])} samples")
    lines += [*table, "", f"full report: {place}"]
    text = "".join(f"{line}\n" for line in lines)
    try:
        output.write(printable(text).encode("ascii", "backslashreplace").decode("ascii"))
        output.flush()
    except BrokenPipeError:  # whoever read the output has gone, as in: ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # for what is not sent yet
