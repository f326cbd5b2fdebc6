"""Where text and records go: a terminal or a file that may fail, and never raises for it.

Owns the writing. A sink takes what it is given, counts what it has to drop, and remembers why.
WHY not Python's own streams: a stream keeps what it could not write, raises it again at the next
write, and once more when Python ends, which then turns the exit status into 120.

Does not own: what is written, and who tells a person that something was lost (log.py, metrics.py).
"""

import contextlib
import io
import os
import select
from collections import deque
from pathlib import Path
from typing import TextIO

_PATIENCE_S = 0.5
"""How long a terminal that takes nothing just now is waited for. Only non-blocking ones say so."""


class TextSink:
    """A terminal, pipe or file that belongs to somebody else. tqdm can write to it, too."""

    encoding = "ascii"

    def __init__(self, stream: TextIO | None) -> None:
        """stream None: Python found no stderr when it started; everything is lost."""
        self._stream = stream
        self._fd = _fd_of(stream)
        self.num_lost = 0
        """Writes that failed since the counter was last set to 0."""

        self.error: BaseException | None = None
        """Why the last write that failed did."""

    def write(self, text: str) -> bool:
        """Write text at once, or count it as lost; say which."""
        try:
            self._write(text.encode("ascii", "backslashreplace"))
        except (OSError, ValueError) as error:  # ValueError: somebody closed the stream
            self.num_lost += 1
            self.error = error
            return False
        return True

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def fileno(self) -> int:
        """Give the descriptor, for asking a terminal how wide it is. Raises OSError without one."""
        if self._fd is None:
            raise OSError("this stream has no file descriptor")
        return self._fd

    def isatty(self) -> bool:
        return self._fd is not None and os.isatty(self._fd)

    def _write(self, data: bytes) -> None:
        if self._stream is None or self._stream.closed:
            raise ValueError("the stream is closed")
        if self._fd is None:
            self._stream.write(data.decode("ascii"))
            self._stream.flush()
            return
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                if not select.select([], [self._fd], [], _PATIENCE_S)[1]:
                    raise


class FileSink:
    """A file of our own that records are appended to. What fails is kept and tried again."""

    def __init__(self, path: Path, *, keep_bytes: int, has_lines: bool = True) -> None:
        """keep_bytes: how much may wait for a disk that is full; older records are dropped.

        has_lines: begin on a new line, also where a killed process left half of one.
        """
        self.path = path
        self.num_lost = 0
        """Records that were dropped since the counter was last set to 0."""

        self.error: OSError | None = None
        """Why the last flush that failed did; None if none failed yet."""

        self._keep_bytes = keep_bytes
        self._has_lines = has_lines
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._done_of_first = 0
        self._fd: int | None = None

    def add(self, record: bytes) -> None:
        """Take a record, to be written with the next flush."""
        self._waiting.append(record)
        self._size += len(record)

    def flush(self) -> bool:
        """Write what waits; say whether nothing is left. Never raises for the disk."""
        try:
            if self._fd is None:
                self._open()
            while self._waiting:
                self._write_first()
        except OSError as error:
            self.error = error
            # WHY: after a lost mount the old descriptor stays dead; the path may come back.
            self._close_fd()
            self._drop_oldest()
            return False
        return True

    def close(self) -> bool:
        """Write what waits and close; say whether all of it was written."""
        is_written = self.flush()
        self.num_lost += len(self._waiting)
        self._waiting.clear()
        self._size = self._done_of_first = 0
        self._close_fd()
        return is_written

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o666)
        size = os.fstat(self._fd).st_size
        is_begun = self._done_of_first > 0
        if self._has_lines and size and not is_begun and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def _write_first(self) -> None:
        """Write the oldest record, or as much of it as the disk takes."""
        assert self._fd is not None
        first = self._waiting[0]
        self._done_of_first += os.write(self._fd, first[self._done_of_first :])
        if self._done_of_first == len(first):
            self._waiting.popleft()
            self._size -= len(first)
            self._done_of_first = 0

    def _drop_oldest(self) -> None:
        """Drop what is too much, but never a record whose beginning is in the file already."""
        begun = [self._waiting.popleft()] if self._done_of_first else []
        while self._waiting and self._size > self._keep_bytes:
            self._size -= len(self._waiting.popleft())
            self.num_lost += 1
        self._waiting.extendleft(begun)

    def _close_fd(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # nothing is left to be written by a close
                os.close(self._fd)
            self._fd = None


def _fd_of(stream: TextIO | None) -> int | None:
    """Find the descriptor behind a stream; None for one that lives in memory or is closed."""
    if stream is None:
        return None
    with contextlib.suppress(OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return stream.fileno()
    return None
