"""Calls of the user's code: what it raises becomes one of our errors, with its file and line.

Does not own: importing that code (data/foreign_code.py).
"""

import contextlib
import logging
from collections.abc import Iterator

from hardened_ddp.data.foreign_code import describe, line_of_user
from hardened_ddp.errors import ANY_FAILURE, HardenedError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def told_as(
    error: type[HardenedError], what: str, *, fix: str, passes: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise error for whatever the code inside raises: what failed, how, and in which line.

    Errors of ours pass as they are, and those of the types in passes.
    """
    try:
        yield
    except ANY_FAILURE as failure:  # WHY broad: it is the user's code
        if isinstance(failure, (HardenedError, *passes)):
            raise
        log.debug("%s", what, exc_info=True)
        raise error(f"{what}: {describe(failure)}{line_of_user(failure)}", fix=fix) from failure
