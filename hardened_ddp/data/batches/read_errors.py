"""Read errors of samples: which ones are transient, and how they are retried and reported.

Transient is a network disk that is busy, or a connection that broke.
Does not own: reading (fetch.py, streams/block_reader.py), workers that die (loader.py).
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import Subset

from hardened_ddp.data.batches.batch import BadSample
from hardened_ddp.data.foreign_code import describe
from hardened_ddp.errors import ANY_FAILURE, LoaderError

log = logging.getLogger(__name__)

T = TypeVar("T")

# Waits before the second, third and fourth try, in which a busy disk often recovers.
WAITS_S = (0.1, 0.5, 2.0)

_TRANSIENT = {
    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.EINTR),
    *(errno.ENOLCK, errno.ECOMM, errno.EPROTO, errno.ETIMEDOUT, errno.ETIME, errno.ECONNRESET),
    *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ENOTCONN, errno.EPIPE, errno.ENETDOWN),
    *(errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ESHUTDOWN),
    *(errno.ENOLINK, errno.ENOBUFS, errno.ENFILE, errno.EMFILE, errno.ENOMEM),
}
# The same read will certainly fail again.
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_MOST_CAUSES = 8  # how many errors of a chain are checked
# Samples of a batch, or of a block. If more can't be reached, the storage is the cause.
_MOST_UNREACHABLE = 3
_FILE_LISTS = ("samples", "imgs", "files", "paths")


def is_transient(error: BaseException) -> bool:
    """Return whether the error is transient: the same read may succeed a moment later.

    WHY its causes too: libraries wrap a socket's error in their own class.
    """
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        is_lost = isinstance(cause, TimeoutError | ConnectionError)
        if is_lost or (isinstance(cause, OSError) and cause.errno in _TRANSIENT):
            return True
        cause = cause and (cause.__cause__ or cause.__context__)
    return False


def retry_read(read: Callable[[], T], error: BaseException, troubles: list[str]) -> T:
    """Retry read while its errors are transient, waiting 2.6 s at most; after another one, once.

    error: what the first try raised. Adds transient errors to troubles. Raises the last error.
    """
    if isinstance(error, MemoryError):
        raise error
    if not is_transient(error):
        if isinstance(error, _PERMANENT):
            raise error
        return read()  # WHY: a file that was read while incomplete may be complete now
    for wait_s in WAITS_S:
        if not is_transient(error):
            break
        troubles.append(describe(error))
        time.sleep(wait_s)
        try:
            return read()
        except ANY_FAILURE as next_error:  # WHY broad: the user's code; raised below, or retried
            error = next_error
    raise error


class BadSamples(list[BadSample]):
    """The samples of a batch or a block that can't be read."""

    num_unreachable = 0

    def add(self, index: int, error: BaseException, place: str) -> None:
        """Add one. Raises its error if no sample is to blame, LoaderError if the storage is gone.

        WHY SystemExit is one: a sample must not end the rank, and torch would end the worker
        without a message.
        """
        if isinstance(error, MemoryError | KeyboardInterrupt):
            raise error
        self.append(BadSample(index, describe(error), place))
        self.num_unreachable += is_transient(error)
        if self.num_unreachable > _MOST_UNREACHABLE:
            raise LoaderError(
                f"{self.num_unreachable} samples of one batch could not be reached, each tried for "
                f"some seconds; the last, {self[-1].name}: {self[-1].error}",
                fix="check the storage of this node, then --resume the run",
            ) from error


def file_of(dataset: Any, index: int, error: BaseException | None = None) -> str:
    """Return the file of a sample if the error or the dataset knows it (as ImageFolder does)."""
    if isinstance(error, OSError) and isinstance(error.filename, str):
        return error.filename
    if callable(own := getattr(dataset, "name_of_sample", None)):
        return str(own(index))
    try:
        while isinstance(dataset, Subset):
            dataset, index = dataset.dataset, int(dataset.indices[index])
        for name in _FILE_LISTS:
            row = getattr(dataset, name, None)
            entry = None if row is None else row[index]
            path = entry[0] if isinstance(entry, tuple | list) else entry
            # WHY check: a sample may itself be text
            if isinstance(path, str | os.PathLike) and os.path.exists(path):
                return os.fspath(path)
    except Exception:  # WHY broad: these lists may be anything, and this is only a hint
        log.debug("the file of sample %d is not known", index, exc_info=True)
    return ""
