"""The report of the command evaluate: a JSON file, and the same as text.

Does not own: what a task adds to it, such as a table of classes (task/).
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from hardened_ddp.errors import RunFolderError
from hardened_ddp.reporting.sinks import write_text
from hardened_ddp.settings.wording import printable

READER_HAS_GONE = 141
"""The exit status then: what a shell gives for SIGPIPE."""


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report, complete or not at all. Raises RunFolderError."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(aside, json.dumps(report, indent=1) + "\n")
        aside.replace(path)
    except OSError as error:
        raise RunFolderError(
            f"the report can't be written to {path}: {error}",
            fix="choose another place: --output FILE",
        ) from error


def print_report(
    report: Mapping[str, Any], *, metrics: str, table: Sequence[str], place: Path, output: TextIO
) -> bool:
    """Print the report; return False if whoever read the output has gone, as in: ... | head.

    metrics: one line; table: the task's part; place: where the file is.
    """
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
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # for what is not sent yet
        return False
    return True
