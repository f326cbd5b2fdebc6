"""The check whether a folder is a complete checkpoint that only we could have written.

Owns: the check of one folder before anything in it is used: type, owner, mode, manifest, size and
sha256. The result is Found, or Rejected with the reason.
Does not own: which checkpoint is used (files.py); it never reads tensors.
What goes wrong here: a check that is too strict starts a run from the beginning although its
checkpoints are valid. Some mounts give every file the same foreign owner or mode 777; so before a
folder is rejected for these, a new folder shows whether this mount does that.
"""

import hashlib
import io
import os
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

from hardened_ddp.checkpoint.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    STATE_NAME,
    Manifest,
    decode_manifest,
    step_folder_name,
)


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
    is_foreign = status.st_uid not in (0, os.geteuid())
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
