"""What it means that a sample can't be read: whose fault it is, and whether to try again.

Owns which errors pass by themselves (a network disk that is busy, a connection that broke), how
long that is waited for, and how it is told: reads that went well in the end are summed up in one
line a minute, not one line each.
Does not own: reading (fetch.py), workers that die (stream.py).
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch.utils.data import Subset

log = logging.getLogger(__name__)

T = TypeVar("T")

WAITS_S = (0.1, 0.5, 2.0)
"""Before the second, third and fourth try. A disk often answers then; a broken file never does."""

REPORT_EVERY_S = 60.0

_PASSING = {
    getattr(errno, name)
    for name in (
        *("EIO", "EREMOTEIO", "ESTALE", "EBUSY", "EAGAIN", "EINTR", "ENOLCK", "ECOMM", "EPROTO"),
        *("ETIMEDOUT", "ETIME", "ECONNRESET", "ECONNABORTED", "ECONNREFUSED", "ENOTCONN", "EPIPE"),
        *("ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH", "ESHUTDOWN"),
        *("ENOLINK", "ENOBUFS", "ENFILE", "EMFILE", "ENOMEM"),
    )
    if hasattr(errno, name)
}
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_MOST_CAUSES = 8  # errors behind an error to look at
_MAX_TEXT = 400  # characters of a foreign error; one may quote a whole file
_FILE_LISTS = ("samples", "imgs", "files", "paths")


def describe(error: BaseException) -> str:
    """Return type and text of an exception, short, and whatever its __str__ does."""
    try:
        text = str(error)
    except Exception as second:  # WHY broad: the user's code, and it must not hide the first error
        text = f"(its text can't be had: {type(second).__name__})"
    return f"{type(error).__name__}: {text}"[:_MAX_TEXT]


def may_pass(error: BaseException) -> bool:
    """Return whether the same read may go well a moment later.

    WHY the errors behind it too: libraries wrap what a socket raised in a class of their own.
    """
    return any(
        isinstance(cause, TimeoutError | ConnectionError)
        or (isinstance(cause, OSError) and cause.errno in _PASSING)
        for cause in _causes(error)
    )


def will_stay(error: BaseException) -> bool:
    """Return whether the same read will surely fail again: no such file, no right to read it."""
    return isinstance(error, _LASTING)


def read_again(read: Callable[[], T], error: Exception, troubles: list[str]) -> T:
    """Call read until it goes well, as long as its errors may pass. Waits 2.6 s at most.

    error: what the first try raised. Adds to troubles what is tried again. Raises the last error.
    """
    for wait_s in WAITS_S:
        if not may_pass(error):
            break
        troubles.append(describe(error))
        time.sleep(wait_s)
        try:
            return read()
        except Exception as next_error:  # WHY broad: the user's code; raised below, or tried again
            error = next_error
    raise error


def file_of(dataset: Any, index: int, error: BaseException | None = None) -> str:
    """Return the file of a sample if the error or the dataset knows it (as ImageFolder does)."""
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return error.filename
    try:
        while isinstance(dataset, Subset):
            dataset, index = dataset.dataset, int(dataset.indices[index])
        for name in _FILE_LISTS:
            row = getattr(dataset, name, None)
            entry = None if row is None else row[index]
            path = entry[0] if isinstance(entry, tuple | list) else entry
            # WHY look: a sample may be text itself
            if isinstance(path, str | os.PathLike) and os.path.exists(path):
                return os.fspath(path)
    except Exception:  # WHY broad: these lists may be anything, and only a hint is wanted
        log.debug("the file of sample %d is not known", index, exc_info=True)
    return ""


class StumbleReport:
    """Tells of reads that were tried again: the first at once, the next ones once a minute."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_at = -REPORT_EVERY_S
        self._num_new = 0
        self._text = ""

    def note(self, troubles: Sequence[str]) -> None:
        """Take in what one batch met."""
        self._num_new += len(troubles)
        self._text = troubles[-1]
        if self._clock() - self._last_at >= REPORT_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Log what was not told yet."""
        if self._num_new:
            log.warning(
                "the storage stumbled: %d reads were tried again, the last one after %s",
                self._num_new,
                self._text,
            )
            self._num_new, self._last_at = 0, self._clock()


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those behind it."""
    following: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if following is None:
            return
        yield following
        reason = getattr(following, "reason", None)  # urllib's way
        is_error = isinstance(reason, BaseException)
        following = reason if is_error else following.__cause__ or following.__context__
