"""Every call by which a checkpoint changes the disk, and who may write in a run's folder.

Owns: the calls that make, write, sync, rename and remove files, and the few ways we combine them
(Disk; tests pass another one, which stops the process at the k-th call); and RunLock.
What goes wrong here: files reach the disk later than the names that point to them. So: sync the
file, then its folder, and rename last; what is removed is renamed first, so that half of it never
looks like a checkpoint.
A job that was killed leaves its lock, which must not stop a restart; a live job must never lose it.
A dead process on this host is seen, whatever container it ran in. The lock of one on another host
is taken over if it is of the same job, or of this machine before a reboot, and its heartbeat
(ranks/process.py) stopped; if it never could count, by a later start of its own job only. A process
that was only stopped learns it before its next checkpoint. Locks of the file system are only used
between containers of one host, because between hosts many file systems don't keep them.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from hardened_ddp.errors import CheckpointError, RunFolderError
from hardened_ddp.ranks import process
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME
from hardened_ddp.settings.typed_command import look_at, shell_command

log = logging.getLogger(__name__)

DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Some network and user-space file systems can't sync a folder; we can't make their renames durable.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
# The name of a folder being written or dropped: its final or former name, the host, the process.
_ASIDE = re.compile(r"\.(?:partial|dropped)-.+-([0-9a-f]{12})-(\d+)-(\d*)")
# A leftover from another host counts as dead after this time: its writer can't be checked.
_FOREIGN_AGE_S = 3600
_FLUSH_BYTES = 8 * 2**20  # so much is written before it is sent to the disk
LOCK_NAME = "run.lock"
# W&B makes links of its own; a checkpoint that is a link is passed over, with the reason.
_MAY_HAVE_LINKS = ("wandb", CHECKPOINTS_NAME)
_MAX_LOCK_BYTES = 1 << 20  # it lists a key for each node of the job


class Disk:
    """The calls of the operating system that change the disk, and the ways we combine them.

    All raise OSError. Tests replace single calls.
    """

    write = staticmethod(os.write)
    close = staticmethod(os.close)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)

    # WHY not 0o777 and 0o666: under an umask of 0, as some containers have, every user could write
    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o775)

    def create(self, path: Path) -> int:
        """Create a file that must not exist yet, and return its descriptor."""
        # WHY O_NOFOLLOW beside O_EXCL: on some network file systems O_EXCL alone was not enough
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, 0o664)

    def flush_early(self, descriptor: int) -> None:
        """Start writing cached data to the disk and free its page cache. Only a hint."""
        # WHY: so large a file would push the dataset out of the page cache, and the sync at its end
        # would wait for all of it (measured: 4 times slower with cold memory)
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a folder with its content, or a file; never follow a link."""
        if is_real_folder(path):
            shutil.rmtree(path)
        else:
            self.unlink(path)

    def write_file(self, path: Path, content: bytes) -> None:
        """Write and sync a small new file; if that fails, it does not exist."""
        self.write_parts(path, [memoryview(content)])

    def write_parts(self, path: Path, parts: Iterable[memoryview]) -> str:
        """Write and sync a new file; return its sha256. If that fails, it does not exist."""
        digest, descriptor, unflushed = hashlib.sha256(), self.create(path), 0
        try:
            try:
                for part in parts:
                    digest.update(part)
                    while part.nbytes:
                        written = self.write(descriptor, part[:_FLUSH_BYTES])
                        part, unflushed = part[written:], unflushed + written
                        if unflushed >= _FLUSH_BYTES:
                            self.flush_early(descriptor)
                            unflushed = 0
                self.sync(descriptor)
            finally:
                self.close(descriptor)
        except OSError:
            with suppress(FileNotFoundError):
                self.unlink(path)
            raise
        return digest.hexdigest()

    def replace_file(self, path: Path, content: bytes) -> None:
        """Replace a small file atomically: a reader sees the old or the new content."""
        aside = path.with_name(f".{path.name}.new")
        with suppress(FileNotFoundError):  # left by a writer that died here
            self.unlink(aside)
        self.write_file(aside, content)
        self.rename(aside, path)
        self.sync_folder(path.parent)

    def sync_files(self, folder: Path, paths: Sequence[Path]) -> None:
        """Have on the disk what was written into files of a folder, and their names."""
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.sync(descriptor)
            finally:
                self.close(descriptor)
        self.sync_folder(folder)

    def make_folders(self, path: Path) -> None:
        """Make a folder and its missing parents."""
        if not path.is_dir():
            self.make_folders(path.parent)
            with suppress(FileExistsError):  # another job may have made it at the same time
                self.make_folder(path)
            self.sync_folder(path.parent)

    def drop_folder(self, path: Path) -> None:
        """Remove a checkpoint's folder atomically: it is renamed first."""
        aside = aside_path(path, what="dropped")
        if os.path.lexists(aside):
            self.remove(aside)
        self.rename(path, aside)
        self.remove(aside)

    def sweep(self, root: Path) -> None:
        """Remove what dead writers left, and what this process left when it failed."""
        for path in filter(_is_leftover, list(root.iterdir())):
            try:
                self.remove(path)
            except OSError as error:
                log.warning("%s, a leftover of a dead writer, can't be removed: %s", path, error)


def aside_path(path: Path, *, what: str) -> Path:
    """Return where this process keeps path while it writes ("partial") or drops it ("dropped")."""
    return path.with_name(f".{what}-{path.name}-{_suffix_of(os.getpid())}")


@cache
def _suffix_of(pid: int) -> str:
    here = process.this_process()  # of this pid: a fork is another one
    return f"{here.place}-{here.pid}-{here.started}"


def _is_leftover(path: Path) -> bool:
    match = _ASIDE.fullmatch(path.name)
    if match is None:
        return False
    here = process.this_process()
    if match[1] == here.place:
        return int(match[2]) == here.pid or process.is_pid_gone(int(match[2]), started=match[3])
    try:
        newest = max(entry.lstat().st_mtime for entry in [path, *path.iterdir()])
    except OSError:
        return False
    return time.time() - newest > _FOREIGN_AGE_S


def is_real_folder(path: Path) -> bool:
    """Return whether path is a folder itself, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def unusable_folder(folder: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"{folder} can't be used: {error.strerror or error} ({error.filename or folder}); "
        "checkpoints could not be written there",
        fix=f"give another output_dir, or look at it: {look_at(folder)}",
    )


def refuse_links(run: Path | None) -> None:
    """Raise RunFolderError if a link in a run folder leads out of it; None: a new run. Rank-local.

    WHY: what is written there goes to the file that whoever made the link has chosen.
    """
    if run is None:
        return
    for folder, folders, files in os.walk(run):  # what can't be read is told by who opens it
        names = ("", *sorted((*folders, *files)))  # the run's folder itself may be one, too
        links = (os.path.join(folder, name).rstrip("/") for name in names)
        if link := next(filter(os.path.islink, links), ""):
            raise RunFolderError(
                f"{link} is a symbolic link to {os.readlink(link)}: what the run writes there "
                "would change something outside of its folder",
                fix=f"look at it, and remove it: {shell_command('rm', link)}",
            )
        # what is looked into: the folders of the run, but not those in them
        is_run = folder == str(run)
        folders[:] = [name for name in folders if is_run and name not in _MAY_HAVE_LINKS]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Holder:
    """Who holds a lock."""

    mark: process.ProcessMark
    token: str  # of this lock alone

    # The keys by which launchers know the job; two attempts of one job share at least one.
    jobs: Sequence[str]
    restart: int
    beats: int = 0  # counted up by the holder; 0: it can't count in this file system


class RunLock:
    """The right to write into a run's folder, held until close or the end of the process."""

    def __init__(self, path: Path, *, token: str, descriptor: int) -> None:
        self.path = path
        self.token = token
        self._descriptor = descriptor
        self._heartbeat = process.LockHeartbeat(descriptor)

    @classmethod
    def acquire(
        cls,
        folder: Path,
        *,
        jobs: Collection[str] = (),
        restart: int = 0,
        silent_after_s: float = process.SILENT_AFTER_S,
    ) -> "RunLock":
        """Lock a run's folder. Rank-local: one rank calls it.

        jobs and restart: the keys of this job and its count of starts, if launchers have them.
        Waits at most 2 * silent_after_s, and only for a lock of this job, or of this machine before
        a reboot. Raises RunFolderError if another process holds the lock, with its host and pid.
        """
        path = folder / LOCK_NAME
        holder = _Holder(
            mark=process.this_process(), token=uuid.uuid4().hex, jobs=sorted(jobs), restart=restart
        )
        try:
            with _alone_in(folder):
                _take_over_lock(path, holder, silent_after_s=silent_after_s)
                Disk().write_file(path, _encode_lock(holder))
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise unusable_folder(folder, error) from error
        # WHY this too: see _is_dead. WHY flock: lockf's lock is lost when anything in this process
        # closes the file. WHY no error: a file system without locks is no reason to stop.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(path, token=holder.token, descriptor=descriptor)

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._descriptor < 0:
            return
        self._heartbeat.stop()
        if _is_held(self.path, self.token):
            with suppress(FileNotFoundError):
                Disk().unlink(self.path)
        os.close(self._descriptor)
        self._descriptor = -1


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes of this host out of acquire. Raises RunFolderError if one is there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken_now(folder) from None
        except OSError as error:  # then only the rename in _take_over_lock protects
            log.debug("%s has no locks: %s", folder, error)
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
    if _read_lock(path) is not None and not _is_held(path, token):
        raise CheckpointError(
            f"{folder} no longer belongs to this process: while it was stopped or its host could "
            "not write, another attempt took over the run",
            fix="end this one; the other one continues from the newest checkpoint",
        )


def _taken_now(folder: Path) -> RunFolderError:
    return RunFolderError(
        f"another job is locking {folder} at this moment",
        fix="give another run_name, or wait for that job",
    )


def _take_over_lock(path: Path, mine: _Holder, *, silent_after_s: float) -> None:
    """Remove a lock if its process is dead. Raises RunFolderError if that may be alive."""
    content = _read_lock(path)
    if content is None:
        return
    holder = _parse_lock(content)
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
        taken = _read_lock(aside)
        if taken != content:
            with suppress(FileExistsError):
                os.link(aside, path)
        Disk().unlink(aside)
        if taken != content:
            raise _taken_now(path.parent)


def _is_dead(path: Path, holder: _Holder, mine: _Holder, *, silent_after_s: float) -> bool:
    gone = process.is_gone(holder.mark)
    if gone is not None:
        return gone
    if holder.mark.boot == mine.mark.boot and holder.mark.boot:
        return not _is_locked(path)
    is_same_job = not {*map(str, holder.jobs)}.isdisjoint(mine.jobs)
    if not holder.beats:
        return is_same_job and holder.restart < mine.restart
    if not is_same_job and not process.is_earlier_boot(holder.mark, mine.mark):
        return False
    text = "%s is locked by process %d on host %s, an earlier attempt of this job: watching for "
    text += "%g s whether it still runs"
    log.warning(text, path.parent, holder.mark.pid, holder.mark.host, silent_after_s)
    return process.is_silent(lambda: _read_lock(path), silent_after_s=silent_after_s)


def _is_locked(path: Path) -> bool:
    """Ask the kernel, which releases a lock when its process ends."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _read_lock(path: Path) -> bytes | None:
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
    holder = _parse_lock(_read_lock(path) or b"")
    return holder is not None and holder.token == token


def _encode_lock(holder: _Holder) -> bytes:
    fields = asdict(holder)
    del fields["beats"]
    return process.with_count(json.dumps(fields).encode() + b"\n")


def _parse_lock(content: bytes) -> _Holder | None:
    try:
        body = json.loads(content)
        mark = process.ProcessMark(**body["mark"])
        return _Holder(**body | {"mark": mark, "beats": int(body["beats"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
