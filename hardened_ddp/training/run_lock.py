"""One writer per run folder.

Owns: RunLock, a file in the run's folder that says which process writes there.
Does not own: how a process is recognised (process.py), the folder itself (run_folder.py), the
heartbeat in the lock (process.py).
What goes wrong here: a job that was killed leaves its lock, which must not stop a restart; a live
job must never lose it. A dead process on this host is recognised, whatever container it ran in. One
on another host can't be seen. Its lock is taken over if it belongs to an earlier attempt of the
same job, or to this machine before a reboot, and if its heartbeat stopped. A process that was only
stopped finds out before it commits a checkpoint. Locks of the file system are only used between
containers of one host, because between hosts many file systems don't keep them.
"""

import errno
import fcntl
import json
import logging
import os
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from hardened_ddp.checkpoint.disk import Disk, write_file
from hardened_ddp.errors import CheckpointError, RunFolderError
from hardened_ddp.ranks.process import (
    SILENT_AFTER_S,
    LockHeartbeat,
    ProcessMark,
    is_earlier_boot,
    is_gone,
    is_silent,
    this_process,
    with_count,
)
from hardened_ddp.settings.typed_command import look_at, shell_command

log = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
_MAX_LOCK_BYTES = 1 << 20  # it lists a key for each node of the job


@dataclass(frozen=True, kw_only=True, slots=True)
class _Holder:
    """Who holds a lock."""

    mark: ProcessMark
    token: str
    """Of this lock alone."""

    jobs: tuple[str, ...]
    """The keys by which launchers know the job; two attempts of one job share at least one."""

    restart: int
    beats: int = 0
    """Counted up by the holder; 0: it can't count in this file system."""


class RunLock:
    """The right to write into a run's folder, held until release or the end of the process."""

    def __init__(self, path: Path, *, token: str, descriptor: int) -> None:
        self.path = path
        self.token = token
        self._descriptor = descriptor
        self._heartbeat = LockHeartbeat(descriptor)

    @classmethod
    def acquire(
        cls,
        folder: Path,
        *,
        jobs: Collection[str] = (),
        restart: int = 0,
        silent_after_s: float = SILENT_AFTER_S,
    ) -> "RunLock":
        """Lock a run's folder. Rank-local: one rank calls it.

        jobs and restart: the keys of this job and its count of starts, if launchers have them.
        Waits at most 2 * silent_after_s, and only for a lock of this job, or of this machine before
        a reboot. Raises RunFolderError if another process holds the lock, with its host and pid.
        """
        path = folder / LOCK_NAME
        holder = _Holder(
            mark=this_process(), token=uuid.uuid4().hex, jobs=tuple(sorted(jobs)), restart=restart
        )
        try:
            with _alone_in(folder):
                try:
                    write_file(path, _encode(holder), disk=Disk())
                except FileExistsError:
                    _take_over(path, holder, silent_after_s=silent_after_s)
                    write_file(path, _encode(holder), disk=Disk())
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise RunFolderError(
                f"{path} can't be written: {error}",
                fix=f"look at it: {look_at(folder)}",
            ) from error
        # WHY this too: see _is_dead. WHY flock: lockf's lock is lost when anything in this process
        # closes the file. WHY no error: a file system without locks is no reason to stop.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(path, token=holder.token, descriptor=descriptor)

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._descriptor < 0:
            return
        self._heartbeat.stop()
        if _is_held(self.path, self.token):
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


def check_held(folder: Path, token: str) -> None:
    """Raise CheckpointError if another attempt holds the run's lock. Any rank.

    WHY: this job may have been stopped (SIGSTOP, a suspended machine) for so long that a restart
    of it took the lock over. WHY no lock at all is fine: a surviving rank may save while the rank
    that held the lock has already left.
    """
    path = folder / LOCK_NAME
    if _read(path) is not None and not _is_held(path, token):
        raise CheckpointError(
            f"{folder} no longer belongs to this process: while it was stopped or its host could "
            "not write, another attempt took over the run",
            fix="end this one; the other one continues from the newest checkpoint",
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


def _take_over(path: Path, mine: _Holder, *, silent_after_s: float) -> None:
    """Remove a dead process's lock. Raises RunFolderError if its process may be alive."""
    content = _read(path)
    if content is None:
        return
    holder = _parse(content)
    if holder is None:
        raise RunFolderError(
            f"{path} can't be read as a lock: another job may be writing to {path.parent}",
            fix=f"if no job uses this folder: {shell_command('rm', path)}",
        )
    if not _is_dead(path, holder, mine, silent_after_s=silent_after_s):
        mark = holder.mark
        raise RunFolderError(
            f"{path.parent} is in use by process {mark.pid} on host {mark.host}; two jobs in one "
            "folder would overwrite each other's checkpoints",
            fix="wait for it or give another run_name; if that process is gone: "
            + shell_command("rm", path),
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


def _is_dead(path: Path, holder: _Holder, mine: _Holder, *, silent_after_s: float) -> bool:
    gone = is_gone(holder.mark)
    if gone is not None:
        return gone
    if holder.mark.boot == mine.mark.boot and holder.mark.boot:
        return not _is_locked(path)
    is_same_job = not {*holder.jobs}.isdisjoint(mine.jobs)
    if not holder.beats:
        return is_same_job and holder.restart < mine.restart
    if not is_same_job and not is_earlier_boot(holder.mark, mine.mark):
        return False
    log.warning(
        "%s is locked by process %d on host %s, an earlier attempt of this job: watching for %g s "
        "whether it still runs",
        path.parent,
        holder.mark.pid,
        holder.mark.host,
        silent_after_s,
    )
    return is_silent(lambda: _read(path), silent_after_s=silent_after_s)


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


def _is_held(path: Path, token: str) -> bool:
    holder = _parse(_read(path) or b"")
    return holder is not None and holder.token == token


def _encode(holder: _Holder) -> bytes:
    fields = asdict(holder)
    del fields["beats"]
    return with_count(json.dumps(fields).encode() + b"\n")


def _parse(content: bytes) -> _Holder | None:
    try:
        body = json.loads(content)
        return _Holder(
            mark=ProcessMark(**body["mark"]),
            token=str(body["token"]),
            jobs=tuple(map(str, body["jobs"])),
            restart=int(body["restart"]),
            beats=int(body["beats"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
