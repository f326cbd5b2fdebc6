"""Which checkpoints a run has, which of them is used, and how the others are removed.

Owns: the names in a run's folder of checkpoints, the newest valid one, the best one, and the
checkpoint that a user's path means; the choice of what to drop, the removal of a folder, and the
removal of what dead writers left behind.
Does not own: the check of one folder (verify.py), when something is dropped (files.py).
What goes wrong here: the newest checkpoint can be broken. Then it is returned with the reason, and
the next older one is used; the caller decides whether to continue from that one. A crash while a
folder is removed: it is renamed first, so that a partly removed folder never looks like a
checkpoint. And a folder that a live process is writing looks like a leftover; its name says which
process that is.
"""

import json
import logging
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hardened_ddp.checkpoint.disk import Disk, is_real_folder, remove_tree
from hardened_ddp.checkpoint.manifest import MANIFEST_NAME, step_folder_name
from hardened_ddp.checkpoint.verify import Found, Rejected, verify_checkpoint
from hardened_ddp.errors import CheckpointError
from hardened_ddp.ranks.process import is_pid_gone, this_process
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, STEP_FOLDER

BEST_NAME = "best.json"
_MAX_BEST_BYTES = 4096
# The name of a folder being written or dropped: its final or former name, the host, the process.
_ASIDE = re.compile(r"\.(?:partial|dropped)-.+-([0-9a-f]{12})-(\d+)-(\d*)")
# A leftover from another host counts as dead after this time: its writer can't be checked.
_FOREIGN_AGE_S = 3600
_DISCARDED = "discarded-"

Best = Mapping[str, Any]
"""What best.json says besides the step: metric, value, direction."""

log = logging.getLogger(__name__)


def list_steps(root: Path) -> list[int]:
    """Return the steps that have a folder under root, newest first, valid or not."""
    if not is_real_folder(root):
        return []
    matches = [STEP_FOLDER.fullmatch(path.name) for path in root.iterdir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def find_newest(root: Path, *, at_most: int | None = None) -> tuple[Found | None, list[Rejected]]:
    """Return the newest valid checkpoint under root, and the newer ones that are not valid.

    at_most: ignore checkpoints of later steps.
    """
    rejected: list[Rejected] = []
    if root.is_symlink():
        return None, [Rejected(path=root, reason="is a symbolic link")]
    for step in list_steps(root):
        if at_most is not None and step > at_most:
            continue
        verdict = verify_checkpoint(root / step_folder_name(step))
        if isinstance(verdict, Found):
            return verdict, rejected
        rejected.append(verdict)
    return None, rejected


def read_best_step(root: Path) -> int | None:
    """Return the step that best.json names if it has a folder, else None."""
    try:
        with (root / BEST_NAME).open("rb") as file:
            step = json.loads(file.read(_MAX_BEST_BYTES))["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # WHY no warning: there is no best checkpoint yet, or the next better one replaces the file
        return None
    return step if type(step) is int and step in list_steps(root) else None


def open_checkpoint(path: Path, *, prefer_best: bool = False) -> Found:
    """Verify the checkpoint that a user's path means: the path of a checkpoint, or of a run.

    A run's folder means its newest valid checkpoint, or with prefer_best the best one if that is
    valid. Raises CheckpointError with the reason for each one that can't be used.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder, so it holds no checkpoint",
            fix="give the folder of a run (runs/NAME) or of a checkpoint (.../step-000000123)",
        )
    if (path / MANIFEST_NAME).is_file() or STEP_FOLDER.fullmatch(path.name):
        verdict = verify_checkpoint(path)
        if isinstance(verdict, Found):
            return verdict
        raise CheckpointError(
            f"the checkpoint can't be used. {verdict}",
            fix=f"give the run's folder to use its newest valid one: {path.parent.parent}",
        )
    root = path if path.name == CHECKPOINTS_NAME else path / CHECKPOINTS_NAME
    best = read_best_step(root) if prefer_best else None
    if best is not None:
        verdict = verify_checkpoint(root / step_folder_name(best))
        if isinstance(verdict, Found):
            return verdict
        log.warning("the best checkpoint can't be used (%s): the newest one is used", verdict)
    found, rejected = find_newest(root)
    if found is not None:
        return found
    reasons = "".join(f"\n  {verdict}" for verdict in rejected)
    raise CheckpointError(
        f"{path} has no checkpoint that can be used{reasons or ': none was written'}",
        fix="give another run, or train without --resume",
    )


def choose_drops(
    steps: Sequence[int], *, keep_last: int, protected: Collection[int | None]
) -> list[int]:
    """Return which of the steps, newest first, to drop: not among the newest, not protected."""
    return [step for step in steps[keep_last:] if step not in protected]


def aside_path(path: Path, *, what: str) -> Path:
    """Return where this process keeps path while it writes ("partial") or drops it ("dropped")."""
    return path.with_name(f".{what}-{path.name}-{_suffix_of(os.getpid())}")


def drop_folder(path: Path, *, disk: Disk) -> None:
    """Remove a checkpoint's folder atomically: it is renamed first. Raises OSError."""
    aside = aside_path(path, what="dropped")
    if os.path.lexists(aside):
        remove_aside(aside, disk=disk)
    disk.rename(path, aside)
    remove_aside(aside, disk=disk)


def discard_folder(path: Path, *, disk: Disk) -> None:
    """Rename a checkpoint's folder so that no start finds it, but a person can. Raises OSError."""
    target = path.with_name(f"{_DISCARDED}{path.name}")
    if os.path.lexists(target):
        drop_folder(target, disk=disk)
    disk.rename(path, target)
    disk.sync_folder(path.parent)


def list_discarded(root: Path) -> list[Path]:
    """Return what discard_folder left under root, oldest step first."""
    return sorted(path for path in root.iterdir() if path.name.startswith(_DISCARDED))


def remove_aside(path: Path, *, disk: Disk) -> None:
    """Remove a folder under a temporary name. Raises OSError."""
    if is_real_folder(path):
        remove_tree(path, disk=disk)
    else:
        disk.unlink(path)


def sweep_leftovers(root: Path, *, disk: Disk) -> None:
    """Remove what dead writers left, and what this process left when it failed."""
    for path in list(root.iterdir()):
        if not _is_leftover(path):
            continue
        try:
            remove_aside(path, disk=disk)
        except OSError as error:
            log.warning("%s, a leftover of a dead writer, can't be removed: %s", path, error)


def _is_leftover(path: Path) -> bool:
    match = _ASIDE.fullmatch(path.name)
    if match is None:
        return False
    here = this_process()
    if match[1] == here.place:
        return int(match[2]) == here.pid or is_pid_gone(int(match[2]), started=match[3])
    try:
        newest = max(entry.lstat().st_mtime for entry in [path, *path.iterdir()])
    except OSError:
        return False
    return time.time() - newest > _FOREIGN_AGE_S


@cache
def _suffix_of(pid: int) -> str:
    """Give the end of a name that says which process, that of pid, works there."""
    mark = this_process()
    return f"{mark.place}-{pid}-{mark.started}"
