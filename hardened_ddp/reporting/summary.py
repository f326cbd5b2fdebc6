"""The end of a run: summary.json, and what to type next."""

import json
import logging
import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_NAME = "summary.json"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, complete or not at all. A failure is a warning."""
    path = folder / _NAME
    aside = path.with_name(f".summary-{os.getpid()}.json")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        log.warning("summary.json can't be written: %s", error)
        _remove(aside)


def finished_at(folder: Path) -> int | None:
    """Give the step at which a run came to its end; None: it did not, or can't be read."""
    try:
        summary = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        step = summary["step"] if summary["status"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # none yet, or no summary
        return None
    return step if type(step) is int else None


def withdraw_summary(folder: Path) -> None:
    """Remove the summary of an earlier start. WHY: it must not speak for the one that begins."""
    _remove(folder / _NAME)


def closing_lines(folder: Path, *, status: str, result: str, has_tensorboard: bool) -> list[str]:
    """Say how the run ended and give the commands that go on from here.

    result: what the last evaluation gave; empty if none was made.
    """
    shown = _show(folder)
    run = shlex.quote(shown)
    lines = [
        f"{status}: {result or 'no test was made'}",
        f"run folder:  {run}",
    ]
    if has_tensorboard:
        board = shlex.quote(os.path.join(shown, "tensorboard"))
        lines.append(f"TensorBoard: {program('tensorboard')} --logdir {board}")
    return [
        *lines,
        f"resume:      {program('python')} ddp_training.py --resume {run}",
        f"evaluate:    {program('python')} ddp_training.py evaluate {run}",
        f"export:      {program('python')} ddp_training.py export {run}",
    ]


def program(name: str) -> str:
    """Name a program of this Python's environment as it is typed here.

    WHY not just its name: in a new shell the environment of setup.sh is not active, and another
    Python would be found, without torch.
    """
    ours = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not ours.exists() or (found is not None and Path(found).parent == ours.parent):
        return name
    return shlex.quote(_show(ours))


def _show(folder: Path) -> str:
    """Name folder as it is typed from here: relative below the working folder, else in full."""
    try:
        full = os.path.abspath(folder)
        shown = os.path.relpath(full)
    except OSError:  # the working folder was removed meanwhile
        return str(folder)
    return full if shown.startswith(os.pardir) else shown


def _plain(value: Any) -> Any:  # Any: JSON
    """Turn what json can't write into what it can: NaN and infinity to null, the rest to text."""
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
