"""The end of a run: summary.json, and the commands to continue with."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardened_ddp.reporting.sinks import open_no_link
from hardened_ddp.settings.typed_command import own_command, python_command, shell_command

log = logging.getLogger(__name__)

_NAME = "summary.json"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, complete or not at all. A failure is a warning."""
    path = folder / _NAME
    aside = path.with_name(f".summary-{os.getpid()}.json")
    try:
        with open(aside, "w", encoding="utf-8", opener=open_no_link) as file:
            file.write(json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        log.warning("summary.json can't be written: %s", error)
        _remove(aside)


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
    _remove(folder / _NAME)


def closing_lines(
    folder: Path, *, status: str, result: str, resume: str, has_tensorboard: bool
) -> list[str]:
    """Return lines that say how the run ended, and the commands to continue with.

    result: the result of the last evaluation; empty if there was none. resume: the command.
    """
    lines = [
        f"{status}: {result or 'no evaluation'}",
        f"run folder:  {shell_command(folder)}",
    ]
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


def _plain(value: Any) -> Any:  # Any: JSON
    """Convert what json can't write: NaN and infinity to null, other types to text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s can't be removed: %s", path, error)
