"""Which checkpoints a run has, and which of them is used.

Owns: the names in a run's folder of checkpoints, the newest valid one, the best one, and what a
path that a user typed means.
Does not own: the check of one folder (verify.py), removing any (retention.py). Changes nothing.
What goes wrong here: the newest checkpoint can be broken. Then it is named, with the reason, and
the next older one is taken; the caller decides whether to go on from that one.
"""

import json
import logging
from pathlib import Path

from hardened_ddp.checkpoint.disk import is_real_folder
from hardened_ddp.checkpoint.manifest import MANIFEST_NAME, step_folder_name
from hardened_ddp.checkpoint.verify import Found, Rejected, verify_checkpoint
from hardened_ddp.errors import CheckpointError
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, STEP_FOLDER

BEST_NAME = "best.json"
_MAX_BEST_BYTES = 4096

log = logging.getLogger(__name__)


def list_steps(root: Path) -> list[int]:
    """Return the steps that have a folder under root, newest first, valid or not."""
    if not is_real_folder(root):
        return []
    matches = [STEP_FOLDER.fullmatch(path.name) for path in root.iterdir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def find_newest(root: Path, *, at_most: int | None = None) -> tuple[Found | None, list[Rejected]]:
    """Return the newest valid checkpoint under root, and those newer than it that are not.

    at_most: as if there were none of later steps.
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
    """Return the step that best.json names, or None if there is none that has a folder."""
    try:
        with (root / BEST_NAME).open("rb") as file:
            step = json.loads(file.read(_MAX_BEST_BYTES))["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # WHY in silence: no best checkpoint yet, or a pointer that the next better one replaces
        return None
    return step if type(step) is int and step in list_steps(root) else None


def open_checkpoint(path: Path, *, prefer_best: bool = False) -> Found:
    """Verify the checkpoint that a user's path means: its own folder, or a run's.

    A run's folder means its newest valid checkpoint, or with prefer_best the best one if that is
    valid. Raises CheckpointError with the reason for each one that can't be used.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no folder: there is no checkpoint",
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
        log.warning("the best checkpoint can't be used (%s): the newest one is taken", verdict)
    found, rejected = find_newest(root)
    if found is not None:
        return found
    reasons = "".join(f"\n  {verdict}" for verdict in rejected)
    raise CheckpointError(
        f"{path} has no checkpoint that can be used{reasons or ': none was written'}",
        fix="give another run, or train without --resume",
    )
