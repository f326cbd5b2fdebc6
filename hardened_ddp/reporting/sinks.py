"""Files of a run whose failures never raise, and the thread that writes them.

A sink counts what it has to drop, and remembers why. WHY not Python's own streams: a stream keeps
what it could not write, raises the error again at the next write, and once more when Python exits,
which turns the exit status into 120.
"""

import contextlib
import logging
import os
import queue
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

from hardened_ddp.ranks.threads import HelperThread
from hardened_ddp.settings.wording import printable

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 10.0
_QUIET_S, _FINISH_S = 2.0, 30.0
_MAX_WAITING = 10_000


def open_no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of a run folder, but not through a link; an opener for open(). Raises OSError.

    WHY: who prepared the folder, or may write to it, would choose the file that is written.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_text(path: Path, text: str, *, mode: str = "w") -> None:
    """Write a text file of a run folder, but not through a link."""
    with open(path, mode, encoding="utf-8", opener=open_no_link) as file:
        file.write(text)


def write_whole(path: Path, text: str) -> None:
    """Write a file complete or not at all: a full disk keeps the one of before."""
    if path.exists() and not path.is_file():  # WHY: a pipe must not be replaced
        path.write_text(text, encoding="utf-8")
        return
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(aside, "w", encoding="utf-8", opener=open_no_link) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


class _PrintableOutput:
    """A stream that gets only text that can't steer a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:  # Any: whatever else a stream has
        return getattr(self._stream, name)


def printed(stream: TextIO) -> TextIO:
    """Give a stream for text that comes from files, names and exceptions."""
    return cast(TextIO, _PrintableOutput(stream))


class FileSink:
    """A file of ours to which records are appended. What fails is kept and retried."""

    def __init__(self, path: Path, *, keep_bytes: int, has_lines: bool = True) -> None:
        """path: it is opened by the first flush, and may be set until then.

        keep_bytes: how much waits at most, also while the disk is full; older records are dropped.
        has_lines: begin on a new line, even if a killed process left an unfinished one.
        """
        self.path = path
        self.num_lost = 0  # records that were dropped
        self.error: OSError | None = None  # of the last flush that failed
        self.is_failing = False  # the last flush did
        self._keep_bytes = keep_bytes
        self._has_lines = has_lines
        self._waiting: deque[bytes] = deque()
        self._size = 0  # of what waits
        self._rest = b""  # of a record that was written in part
        self._fd: int | None = None

    def add(self, record: bytes) -> None:
        self._waiting.append(record)
        self._size += len(record)
        while self._size > self._keep_bytes and len(self._waiting) > 1:
            self._size -= len(self._waiting.popleft())
            self.num_lost += 1

    def flush(self) -> bool:
        """Write the queued records; return whether all are written. Never raises OSError."""
        try:
            fd = self._open() if self._fd is None else self._fd
            while self._rest or self._waiting:
                record = self._rest or self._waiting[0]
                num_written = os.write(fd, record)
                if not self._rest:
                    self._size -= len(self._waiting.popleft())
                self._rest = record[num_written:]
        except OSError as error:
            self.error, self.is_failing = error, True
            # WHY: after a lost mount the old descriptor stays dead; the path may come back.
            self._close_fd()
            return False
        self.is_failing = False
        return True

    def close(self) -> bool:
        is_written = self.flush()
        self.num_lost += len(self._waiting) + bool(self._rest)
        self._waiting.clear()
        self._size, self._rest = 0, b""
        self._close_fd()
        return is_written

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = self._fd = open_no_link(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(fd).st_size
        if self._has_lines and size and not self._rest and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")
        return fd

    def _close_fd(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # nothing is left to write
                os.close(self._fd)
            self._fd = None


class ReportWriter:
    """Runs jobs in a daemon thread, and flushes after each; drops what is too much for it."""

    def __init__(self, *, flush: Callable[[], bool], name: str) -> None:
        """flush: writes what the jobs buffered; returns whether all of it is written."""
        self._flush = flush
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: HelperThread | None = None
        self.num_refused = 0

    def do(self, job: Callable[[], None]) -> bool:
        """Queue a job; return False if it is dropped, because too many wait."""
        if self._thread is None:
            self._thread = HelperThread(self._run, name=self._name)
            self._thread.start()
        if self._jobs.qsize() >= _MAX_WAITING:
            self.num_refused += 1
            return False
        self._jobs.put(job)
        return True

    def close(
        self, who: str, *, limit_s: float | None = None, last: Callable[[], None] | None = None
    ) -> bool:
        """Run the queued jobs, flush and end the thread; False if it takes longer than limit_s.

        who: for whom it waits, which is told if it takes long. last: a job that is never dropped,
        if there was any other.
        """
        if self._thread is None:
            return True
        for job in (last, None) if last else (None,):
            self._jobs.put(job)
        limit_s = _FINISH_S if limit_s is None else limit_s
        self._thread.join(min(_QUIET_S, limit_s))
        if self._thread.is_alive():
            log.info("waiting for %s, %.0f s at most", who, limit_s)
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s: float | None = None
        is_over = False
        while not is_over:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=wait_s)
                is_over = job is None
                if job is not None:
                    self._do(job)
            # WHY again without a job: the disk may have room by then
            wait_s = None if self._do(self._flush) else _RETRY_AFTER_S

    def _do(self, work: Callable[[], object]) -> object:
        try:
            return work()
        except Exception:  # WHY broad: it would end the thread, and all later reports with it
            log.warning("a report failed and is skipped, training continues", exc_info=True)
            return None
