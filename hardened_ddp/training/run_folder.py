"""The folder of a run.

Owns: making one under the output folder.
Does not own: the lock in it (run_lock.py), the files of other layers in it.
What goes wrong here: a name with a path in it that leads out of the output folder, two jobs that
start in the same second, a link where a folder is expected, a full or read-only disk.
"""

import re
from datetime import datetime
from pathlib import Path

from hardened_ddp.checkpoint.disk import Disk, make_folders
from hardened_ddp.checkpoint.folder import unusable_folder
from hardened_ddp.errors import RunFolderError
from hardened_ddp.settings.config import FOLDER_NAME

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.]+")
# Suffixes that are tried for a name that is taken.
_MAX_SUFFIX = 1000


def create_run_folder(
    output_dir: Path,
    *,
    model: str,
    dataset: str,
    run_name: str = "",
    now: datetime | None = None,
) -> Path:
    """Create a new folder for a run and return its path. Rank-local: one rank calls it.

    Without run_name the name consists of the time, the model and the dataset; a name that is taken
    gets a number. Raises RunFolderError.
    """
    if not run_name:
        started = (datetime.now() if now is None else now).strftime("%Y%m%d-%H%M%S")
        run_name = f"{started}-{_as_name(model)}-{_as_name(dataset)}"
    if not re.fullmatch(FOLDER_NAME.pattern, run_name):
        raise RunFolderError(
            f"run_name {run_name!r:.120} can't be the name of a folder in {output_dir}",
            fix=f"use {FOLDER_NAME.words}",
        )
    disk = Disk()
    try:
        make_folders(output_dir, disk=disk)
        # WHY resolved: the output folder may be a link to a bigger disk; a run folder may not
        root = output_dir.resolve(strict=True)
        for number in range(1, _MAX_SUFFIX):
            folder = root / (run_name if number == 1 else f"{run_name}-{number}")
            try:
                disk.make_folder(folder)
            except FileExistsError:
                continue
            disk.sync_folder(root)
            return folder
    except OSError as error:
        raise unusable_folder(output_dir, error) from error
    raise RunFolderError(f"{output_dir} has {_MAX_SUFFIX} runs named {run_name}")


def _as_name(text: str) -> str:
    """Turn a model's or dataset's name or import path into a part of a folder's name."""
    return _NOT_IN_NAMES.sub("-", text).strip("-.")[:30] or "run"
