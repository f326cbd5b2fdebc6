"""Which checkpoints are kept, and how the others go away.

Owns: the choice of what to drop, the way a folder is dropped, and the removal of what dead writers
left behind.
Does not own: when that happens (files.py).
What goes wrong here: a crash while a folder is removed. It is renamed first, so that a half-removed
one never looks like a checkpoint. And a folder that another live process is writing looks like a
leftover; its name says which process that is.
"""

import logging
import os
import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from hardened_ddp.checkpoint.disk import Disk, is_real_folder, remove_tree
from hardened_ddp.ranks.process import is_pid_gone, this_process

# The name of a folder being written or dropped: what it will be or was, where and by whom.
_ASIDE = re.compile(r"\.(?:partial|dropped)-.+-([0-9a-f]{12})-(\d+)-(\d*)")
# A leftover from another host is taken for dead after this time; its writer can't be seen.
_FOREIGN_AGE_S = 3600
_DISCARDED = "discarded-"

log = logging.getLogger(__name__)


def choose_drops(
    steps: Sequence[int], *, keep_last: int, protected: Collection[int | None]
) -> list[int]:
    """Return which of the steps, newest first, go: neither among the newest nor protected."""
    return [step for step in steps[keep_last:] if step not in protected]


def aside_path(path: Path, *, what: str) -> Path:
    """Return where this process keeps path while it writes ("partial") or drops it ("dropped")."""
    mark = this_process()
    return path.with_name(f".{what}-{path.name}-{mark.place}-{mark.pid}-{mark.started}")


def drop_folder(path: Path, *, disk: Disk) -> None:
    """Remove a checkpoint's folder, which is gone as a whole or not at all. Raises OSError."""
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
    """Remove a folder that no reader looks at. Raises OSError."""
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
