"""The check whether a folder is a complete checkpoint that only we could have written.

Owns: the check of one folder before anything in it is used: type, owner, mode, manifest, size and
sha256. The result is Found, or Rejected with the reason. From that: the newest checkpoint that is
valid, the one that a user's path means, and its tensors. Also probe_folder, which shows at the
start of a run, and not after an hour, that its folder can't be written.
Does not own: writing and removing (files.py).
What goes wrong here: the newest checkpoint can be broken. Then it is returned with the reason, and
the next older one is used; the caller decides whether to continue from that one. And a check that
is too strict starts a run from the beginning although its checkpoints are valid. Some mounts give
every file the same foreign owner or mode 777; so before a folder is rejected for these, a new
folder shows whether this mount does that.
"""

import hashlib
import io
import logging
import os
import stat
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hardened_ddp.checkpoint.disk import Disk, make_folders, write_file
from hardened_ddp.checkpoint.manifest import (
    JSON,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    STATE_NAME,
    Manifest,
    decode_manifest,
    list_steps,
    read_best_step,
    step_folder_name,
)
from hardened_ddp.checkpoint.tensors import differences, read_tensors, specs_of
from hardened_ddp.errors import CheckpointError, RunFolderError
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, STEP_FOLDER
from hardened_ddp.settings.typed_command import look_at

log = logging.getLogger(__name__)

_PROBE_BYTES = b"can this folder be written?\n" * 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A checkpoint that was verified: every byte is as it was written."""

    path: Path
    manifest: Manifest
    stamp: tuple[int, int, int]
    """Inode, size and modification time of the verified file, to detect a later change."""

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state_path(self) -> Path:
        return self.path / STATE_NAME


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A folder that looks like a checkpoint but can't be used."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def verify_checkpoint(path: Path) -> Found | Rejected:
    """Check a checkpoint's folder and every byte in it. Rank-local; reads the whole state."""
    try:
        _check_trust(path, os.lstat(path), wants_folder=True)
        with _open_regular(path / MANIFEST_NAME) as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ValueError(f"{MANIFEST_NAME} has more than {MAX_MANIFEST_BYTES} bytes")
        manifest = decode_manifest(raw)
        if path.name.startswith("step-") and path.name != step_folder_name(manifest.step):
            raise ValueError(f"{MANIFEST_NAME} belongs to step {manifest.step}")
        with _open_regular(path / STATE_NAME) as file:
            _check_content(file, manifest)
            stamp = stamp_of(os.fstat(file.fileno()))
    except FileNotFoundError as error:
        name = Path(error.filename).name
        why = ": its writing was not finished" if name == MANIFEST_NAME else ""
        return Rejected(path=path, reason=f"{name} is missing{why}")
    except OSError as error:
        return Rejected(path=path, reason=f"can't be read: {error}")
    except (ValueError, RecursionError) as error:
        return Rejected(path=path, reason=str(error))
    return Found(path=path, manifest=manifest, stamp=stamp)


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


def open_checkpoint(path: Path, *, prefer_best: bool = False) -> Found:
    """Verify the checkpoint that a user's path means: the path of a checkpoint, or of a run.

    A run's folder means its newest valid checkpoint, or with prefer_best the best one if that is
    valid. Raises CheckpointError with the reason for each one that can't be used.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder, so it holds no checkpoint",
            fix="give the folder of a run, or of a checkpoint in its folder checkpoints",
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


def load_checkpoint(
    found: Found, *, device: torch.device | str = "cpu", names: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """Read a verified checkpoint: tensors that own their memory, and meta.

    names: only these tensors. Rank-local. Raises CheckpointError if the file changed since it was
    verified.
    """
    try:
        is_same = stamp_of(found.state_path.lstat()) == found.stamp
    except OSError:
        is_same = False
    if not is_same:
        raise CheckpointError(f"{found.state_path} changed since it was verified")
    tensors = read_tensors(found.state_path, device=device, names=names)
    expected = found.manifest.tensors
    if names is not None:
        expected = {name: expected[name] for name in names}
    lines = differences(expected, specs_of(tensors))
    if lines:
        text = "\n  ".join(lines)
        raise CheckpointError(f"{found.path}: its file and its manifest differ\n  {text}")
    return tensors, found.manifest.meta


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return what distinguishes two versions of a file without reading it."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _open_regular(path: Path) -> io.BufferedReader:
    # WHY O_NONBLOCK: opening a named pipe would wait forever for its writer
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_symlink():
        raise ValueError(f"{path.name} is a symbolic link")
    descriptor = os.open(path, flags)
    try:
        _check_trust(path, os.fstat(descriptor), wants_folder=False)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check_content(file: io.BufferedReader, manifest: Manifest) -> None:
    size_bytes, wanted = os.fstat(file.fileno()).st_size, manifest.state.size_bytes
    if size_bytes < wanted:
        raise ValueError(f"{STATE_NAME} is truncated: {size_bytes} of {wanted} bytes")
    if size_bytes > wanted:
        raise ValueError(f"{STATE_NAME} has {size_bytes} bytes, and its manifest says {wanted}")
    if hashlib.file_digest(file, "sha256").hexdigest() != manifest.state.sha256:
        raise ValueError(f"the sha256 of {STATE_NAME} differs: it changed after it was written")


def _check_trust(path: Path, status: os.stat_result, *, wants_folder: bool) -> None:
    """Raise ValueError if path has the wrong type, or if another user could have changed it."""
    if stat.S_ISLNK(status.st_mode):
        raise ValueError("is a symbolic link")
    if wants_folder and not stat.S_ISDIR(status.st_mode):
        raise ValueError("is not a folder")
    if not wants_folder and not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    # WHY that owner too: whoever owns the run may have written what is in it
    run = (path if wants_folder else path.parent).absolute().parent.parent
    is_foreign = status.st_uid not in (0, os.geteuid(), run.stat().st_uid)
    is_open = bool(status.st_mode & stat.S_IWOTH)
    if not is_foreign and not is_open:
        return
    usual = _status_of_new_folder(path.parent if wants_folder else path.parent.parent)
    what = "the folder" if wants_folder else path.name
    if is_foreign and (usual is None or status.st_uid != usual.st_uid):
        raise ValueError(
            f"{what} belongs to user {status.st_uid} and not to you ({os.geteuid()}): "
            "copy the checkpoint if you trust it"
        )
    if is_open and (usual is None or not usual.st_mode & stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(
            f"every user may write to {what} (mode {mode:o}): chmod o-w if you trust it"
        )


def probe_folder(folder: Path) -> None:
    """Try every operation that a checkpoint needs: create, write, sync, rename, remove.

    Creates the folder if it is missing. Rank-local. Raises RunFolderError.
    """
    disk = Disk()
    first = folder / f".probe-{uuid.uuid4().hex}"
    second = first.with_name(f"{first.name}-renamed")
    if os.path.islink(folder):  # WHY not of Path: that raises where a folder above is locked
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
        fix=f"give another output_dir, or look at it: {look_at(folder)}",
    )


def _status_of_new_folder(parent: Path) -> os.stat_result | None:
    """Return the status that this mount gives to a private new folder; None if it can't be made."""
    probe = parent / f".probe-{uuid.uuid4().hex}"
    try:
        probe.mkdir(mode=0o700)
        try:
            return probe.lstat()
        finally:
            probe.rmdir()
    except OSError:
        return None
