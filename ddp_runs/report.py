"""The command report: one HTML file of a run, or of several side by side.

Owns reading the runs and writing the file. Does not own: the page (report_page.py).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from ddp_runs.report_page import page_of
from ddp_runs.run_files import RunView, find_run_folder, read_run
from hardened_ddp.errors import MissingPackageError, RunFolderError
from hardened_ddp.settings.typed_command import pip_command
from hardened_ddp.settings.wording import as_typed

FILE_NAME = "report.html"


def run_report(options: Mapping[str, str], *, output: TextIO) -> int:
    """Write the report and say where it is. Raises RunFolderError, MissingPackageError."""
    names = options["run"].splitlines()
    folders = [find_run_folder(name, options["output_dir"]) for name in names]
    runs = name_runs([read_run(folder) for folder in folders])
    page = page_of(runs, read_plotly())
    if options["output"]:
        path = Path(options["output"])
    else:
        path = (folders[0] if len(folders) == 1 else Path(options["output_dir"])) / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(path, page)
    except OSError as error:
        raise RunFolderError(
            f"the report can't be written to {path}: {error.strerror}",
            fix="give another place: --output report.html",
        ) from error
    size = path.stat().st_size / 1e6
    output.write(f"{as_typed(path)}: {size:.1f} MB; open it in a browser, it needs no network\n")
    return 0


def write_aside(path: Path, text: str) -> None:
    """Write a file whole or not at all, so that a full disk keeps the one of before.

    Raises OSError.
    """
    if path.exists() and not path.is_file():  # WHY: a pipe or /dev/stdout must not be replaced
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def name_runs(runs: list[RunView]) -> dict[str, RunView]:
    """Give each run a name of its own: that of its folder, with a number if it comes twice."""
    found: dict[str, RunView] = {}
    for run in runs:
        name = run.folder.resolve().name
        number = 1
        while (unique := name if number == 1 else f"{name} ({number})") in found:
            number += 1
        found[unique] = run
    return found


def read_plotly() -> str:
    """Return Plotly's JavaScript, from its Python package. Raises MissingPackageError."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingPackageError(
            "the command report needs plotly, which is not installed",
            # WHY not the whole file: it may be another torch that is installed
            fix=pip_command("requirements.txt", "plotly"),
        ) from error
    return str(get_plotlyjs())
