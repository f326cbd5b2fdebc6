"""Every call that changes the disk, in one place.

Owns: the calls that make, write, sync, rename and remove files (Disk), and the few ways we combine
them: a file that is hashed while it is written, a small file that is replaced atomically, a folder
that is removed, what dead writers left behind. Tests pass another Disk, which stops the process at
the k-th call or slows it down.
Does not own: what a checkpoint is (files.py), whether one is valid (verify.py).
What goes wrong here: full disks (DISK_FULL_ERRORS), and files that reach the disk later than the
names that point to them. So: sync the file, then its folder, and rename last. A crash while a
folder is removed: it is renamed first, so that a partly removed folder never looks like a
checkpoint. And a folder that a live process is writing looks like a leftover; its name says which
process that is.
"""

import errno
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Protocol, TypeVar

from hardened_ddp.ranks.process import is_pid_gone, this_process

log = logging.getLogger(__name__)

DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Some network and user-space file systems can't sync a folder; we can't make their renames durable.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
# The name of a folder being written or dropped: its final or former name, the host, the process.
_ASIDE = re.compile(r"\.(?:partial|dropped)-.+-([0-9a-f]{12})-(\d+)-(\d*)")
# A leftover from another host counts as dead after this time: its writer can't be checked.
_FOREIGN_AGE_S = 3600

T = TypeVar("T")


class Disk:
    """The calls of the operating system that change the disk."""

    # WHY not 0o777 and 0o666: under an umask of 0, as some containers have, every user could write,
    # and a checkpoint that every user could have changed is not trusted (verify.py)
    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o775)

    def create(self, path: Path) -> int:
        """Create a file that must not exist yet, and return its descriptor."""
        # WHY O_NOFOLLOW beside O_EXCL: on some network file systems O_EXCL alone was not enough
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, 0o664)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write a part of data, at least one byte, and return the number of bytes."""
        return os.write(descriptor, data)

    def flush_early(self, descriptor: int) -> None:
        """Start writing cached data to the disk and free its page cache. Only a hint."""
        # WHY: so large a file would push the dataset out of the page cache, and the sync at its end
        # would wait for all of it (measured: 4 times slower with cold memory)
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


class Retry(Protocol):
    """Runs a call, and may run it a second time after making room on a full disk."""

    def __call__(self, act: Callable[[], T], /) -> T: ...


def run_once(act: Callable[[], T], /) -> T:
    """Run a call without a second try: the Retry of callers that can't make room."""
    return act()


class HashedFile:
    """A new file whose size and sha256 are known when it is closed."""

    def __init__(self, path: Path, *, disk: Disk, retry: Retry = run_once) -> None:
        self._disk = disk
        self._retry = retry
        self._hash = hashlib.sha256()
        self.size_bytes = 0
        self._descriptor = retry(lambda: disk.create(path))

    def write(self, data: memoryview) -> None:
        """Write all of data. Raises OSError."""
        self._hash.update(data)
        written = 0
        while written < data.nbytes:
            # WHY retry one call and not the file: what was written stays, so a source that can only
            # be read once survives a disk that is full for a moment
            rest = data[written:]
            written += self._retry(partial(self._disk.write, self._descriptor, rest))
        self.size_bytes += written

    def flush_early(self) -> None:
        """Start writing cached data to the disk."""
        self._disk.flush_early(self._descriptor)

    def sync_and_close(self) -> str:
        """Sync the file to the disk and return the sha256 of its content."""
        self._disk.sync(self._descriptor)
        self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close the file without a sync. A second call does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._disk.close(descriptor)


def write_file(path: Path, content: bytes, *, disk: Disk, retry: Retry = run_once) -> None:
    """Write and sync a small new file. Raises OSError; then the file does not exist."""
    file = HashedFile(path, disk=disk, retry=retry)
    try:
        file.write(memoryview(content))
        file.sync_and_close()
    except OSError:
        file.close()
        with suppress(FileNotFoundError):
            disk.unlink(path)
        raise


def replace_file(path: Path, content: bytes, *, disk: Disk) -> None:
    """Replace a small file atomically: a reader sees the old or the new content. Raises OSError."""
    aside = path.with_name(f".{path.name}.new")
    with suppress(FileNotFoundError):  # left by a writer that died here
        disk.unlink(aside)
    write_file(aside, content, disk=disk)
    disk.rename(aside, path)
    disk.sync_folder(path.parent)


def sync_files(folder: Path, paths: Sequence[Path], *, disk: Disk) -> None:
    """Have on the disk what was written into files of a folder, and their names. Raises OSError."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
    disk.sync_folder(folder)


def make_folders(path: Path, *, disk: Disk) -> None:
    """Make a folder and its missing parents. Raises OSError."""
    if not path.is_dir():
        make_folders(path.parent, disk=disk)
        try:
            disk.make_folder(path)
        except FileExistsError:
            if not path.is_dir():  # another job may have made it at the same time
                number = errno.ENOTDIR
                raise NotADirectoryError(number, os.strerror(number), str(path)) from None
        disk.sync_folder(path.parent)


def remove_tree(path: Path, *, disk: Disk) -> None:
    """Remove a folder and its content; never follow a link out of it. Raises OSError."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path), disk=disk)
        else:
            disk.unlink(Path(entry.path))
    disk.remove_folder(path)


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


def is_real_folder(path: Path) -> bool:
    """Return whether path is a folder itself, and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
