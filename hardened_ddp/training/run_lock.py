"""One writer per run folder, and a folder that can be written.

Owns: RunLock, a file in the run's folder that says which process writes there; and probe_folder,
which shows at the start, and not after an hour, that the folder can't be written.
Does not own: how a process is recognised (process.py), the folder itself (run_folder.py).
What goes wrong here: a job that was killed leaves its lock, which must not stop a restart; a live
job must never lose it. A dead process on this host is recognised, whatever container it ran in. One
on another host can't be seen: its lock is taken over only if the scheduler says that the same job
was started again. Locks of the file system are only used between containers of one host, because
between hosts many file systems don't keep them.
"""

import errno
import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from hardened_ddp.checkpoint.disk import Disk, make_folders, write_file
from hardened_ddp.errors import RunFolderError
from hardened_ddp.ranks.process import ProcessMark, is_gone, this_process

LOCK_NAME = "run.lock"
_MAX_LOCK_BYTES = 4096
_PROBE_BYTES = b"can this folder be written?\n" * 200


@dataclass(frozen=True, kw_only=True, slots=True)
class _Holder:
    """Who holds a lock."""

    mark: ProcessMark
    job: str
    restart: int


class RunLock:
    """The right to write into a run's folder, held until release or the end of the process."""

    def __init__(self, path: Path, *, content: bytes, descriptor: int) -> None:
        self.path = path
        self._content = content
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, folder: Path, *, job: str = "", restart: int = 0) -> "RunLock":
        """Lock a run's folder. Rank-local: one rank calls it.

        job and restart are the scheduler's id and count of starts, if it has them. Raises
        RunFolderError if another process holds the lock, with its host and pid.
        """
        path = folder / LOCK_NAME
        holder = _Holder(mark=this_process(), job=job, restart=restart)
        content = (json.dumps(asdict(holder)) + "\n").encode()
        try:
            with _alone_in(folder):
                try:
                    write_file(path, content, disk=Disk())
                except FileExistsError:
                    _take_over(path, holder)
                    write_file(path, content, disk=Disk())
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise RunFolderError(
                f"{path} can't be written: {error}", fix=f"look at it: ls -l {folder}"
            ) from error
        # WHY this too: see _is_dead. WHY flock: lockf's lock is lost when anything in this process
        # closes the file. WHY no error: a file system without locks is no reason to stop.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(path, content=content, descriptor=descriptor)

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._descriptor < 0:
            return
        if _read(self.path) == self._content:
            with suppress(FileNotFoundError):
                Disk().unlink(self.path)
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes of this host out of acquire. Raises RunFolderError if one is there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _is_busy(descriptor):
            raise _taken_now(folder)
        yield
    finally:
        os.close(descriptor)


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


def _is_busy(descriptor: int) -> bool:
    """Try to lock an open file; False also on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # WHY only this one: without locks, only the rename in _take_over protects
        return isinstance(error, BlockingIOError)
    return False


def _taken_now(folder: Path) -> RunFolderError:
    return RunFolderError(
        f"another job is locking {folder} at this moment",
        fix="give another run_name, or wait for that job",
    )


def _take_over(path: Path, mine: _Holder) -> None:
    """Remove a dead process's lock. Raises RunFolderError if its process may be alive."""
    content = _read(path)
    if content is None:
        return
    holder = _parse(content)
    if holder is None:
        raise RunFolderError(
            f"{path} can't be read as a lock: another job may be writing to {path.parent}",
            fix=f"if no job uses this folder: rm {path}",
        )
    if not _is_dead(path, holder, mine):
        mark = holder.mark
        raise RunFolderError(
            f"{path.parent} is in use by process {mark.pid} on host {mark.host}; two jobs in one "
            "folder would overwrite each other's checkpoints",
            fix=f"wait for it or give another run_name; if that process is gone: rm {path}",
        )
    # WHY rename and read again: of two processes that found the same dead lock, the second one
    # would otherwise remove the new lock of the first
    aside = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        Disk().rename(path, aside)
        taken = _read(aside)
        if taken != content:
            with suppress(FileExistsError):
                os.link(aside, path)
        Disk().unlink(aside)
        if taken != content:
            raise _taken_now(path.parent)


def _is_dead(path: Path, holder: _Holder, mine: _Holder) -> bool:
    gone = is_gone(holder.mark)
    if gone is not None:
        return gone
    if holder.mark.boot == mine.mark.boot and holder.mark.boot:
        return not _is_locked(path)
    return bool(mine.job) and holder.job == mine.job and holder.restart < mine.restart


def _is_locked(path: Path) -> bool:
    """Ask the kernel, which releases a lock when its process ends."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes | None:
    """Return a lock's content; None if it is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return b"symbolic link"
        raise
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_MAX_LOCK_BYTES)


def _parse(content: bytes) -> _Holder | None:
    try:
        body = json.loads(content)
        return _Holder(
            mark=ProcessMark(**body["mark"]), job=str(body["job"]), restart=int(body["restart"])
        )
    except (ValueError, TypeError, KeyError):
        return None
