"""The end of a run: summary.json, and what to type next."""

import json
import logging
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, complete or not at all. A failure is a warning."""
    path = folder / "summary.json"
    aside = path.with_name(f".summary-{os.getpid()}.json")
    try:
        aside.write_text(json.dumps(dict(summary), indent=2) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        log.warning("summary.json can't be written: %s", error)


def closing_lines(
    folder: Path, *, status: str, test_accuracy: float | None, has_tensorboard: bool
) -> list[str]:
    """Say how the run ended and give the commands that go on from here."""
    shown = shlex.quote(os.path.relpath(folder))
    lines = [
        f"{status}: test accuracy {100 * test_accuracy:.2f}%"
        if test_accuracy is not None
        else f"{status}: no test was made",
        f"run folder:  {shown}",
        f"resume:      python ddp_training.py --resume {shown}",
        f"export:      python ddp_training.py export {shown}",
    ]
    if has_tensorboard:
        lines.insert(2, f"TensorBoard: tensorboard --logdir {shown}/tensorboard")
    return lines
