"""The folder of a run.

Owns: making one under the output folder; and probe_folder, which shows at the start, and not after
an hour, that the folder can't be written.
Does not own: the lock in it (run_lock.py), the files of other layers in it.
What goes wrong here: a name with a path in it that leads out of the output folder, two jobs that
start in the same second, a link where a folder is expected, a full or read-only disk.
"""

import os
import re
import uuid
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from hardened_ddp.checkpoint.disk import Disk, make_folders, write_file
from hardened_ddp.errors import RunFolderError
from hardened_ddp.settings.run import FOLDER_NAME

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.]+")
# Suffixes that are tried for a name that is taken.
_MAX_SUFFIX = 1000
_PROBE_BYTES = b"can this folder be written?\n" * 200


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


def probe_folder(folder: Path) -> None:
    """Try every operation that a checkpoint needs: create, write, sync, rename, remove.

    Creates the folder if it is missing. Rank-local. Raises RunFolderError.
    """
    disk = Disk()
    first = folder / f".probe-{uuid.uuid4().hex}"
    second = first.with_name(f"{first.name}-renamed")
    if folder.is_symlink():
        raise RunFolderError(
            f"{folder} is a symbolic link, which could be changed to another folder during the run",
            fix=f"use the folder itself: {os.path.realpath(folder)}",
        )
    try:
        make_folders(folder, disk=disk)
        write_file(first, _PROBE_BYTES, disk=disk)
        disk.rename(first, second)
        disk.sync_folder(folder)
        owners = {0, os.geteuid(), second.stat().st_uid}
        owner = folder.stat().st_uid
    except OSError as error:
        raise unusable_folder(folder, error) from error
    finally:
        for path in (first, second):
            with suppress(OSError):  # missing, or the folder is unusable, which was reported
                disk.unlink(path)
    if owner not in owners:
        raise RunFolderError(
            f"{folder} belongs to user {owner} and not to you ({os.geteuid()}), who could change "
            "checkpoints in it",
            fix="give another output_dir, or have the folder's owner changed: chown",
        )


def unusable_folder(folder: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"{folder} can't be used: {error.strerror or error} ({error.filename or folder}); "
        "checkpoints could not be written there",
        fix=f"give another output_dir, or look at it: ls -ld {folder}; df -h {folder}",
    )


def _as_name(text: str) -> str:
    """Turn a model's or dataset's name or import path into a part of a folder's name."""
    return _NOT_IN_NAMES.sub("-", text).strip("-.")[:30] or "run"
