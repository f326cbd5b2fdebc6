"""The end of a rank that failed: what the log says, and torch elastic's error file.

Owns the file's format. torchrun's last block shows what it says; without it that block has
`error_file: <N/A>`, below our own message.
Does not own: who failed first; torchrun takes the rank with the earliest time.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from hardened_ddp.errors import CrashLoopError, HardenedError, PeerLostError
from hardened_ddp.ranks.launch import Launch, environment, stop_launcher
from hardened_ddp.settings.wording import printable

log = logging.getLogger(__name__)

_NAME = "TORCHELASTIC_ERROR_FILE"


def leave_failed(error: Exception, launch: Launch) -> int:
    """Tell the launcher of a rank why it ends; return the exit status. Rank-local."""
    write_error_file(error, environment())
    if isinstance(error, CrashLoopError):
        stop_launcher(launch)
    return error.exit_status if isinstance(error, HardenedError) else HardenedError.exit_status


def log_failure(error: Exception) -> None:
    """Log why this rank ends: in a few lines, or with a traceback if that is not known."""
    if not isinstance(error, HardenedError):
        log.error("[DDP-X01] an unexpected error; its traceback:", exc_info=error)
        return
    log.error("%s", error)
    for raised in (error, error.__cause__):
        for note in getattr(raised, "__notes__", ()):
            log.error("%s", note)


def write_error_file(error: BaseException, env: Mapping[str, str]) -> None:
    """Write the error of this rank for torchrun, if that is what started it. Rank-local.

    A rank that only lost another one writes none: torchrun would call it the cause.
    """
    path = env.get(_NAME, "")
    if not path or isinstance(error, PeerLostError) or Path(path).exists():
        return
    text = printable(f"{type(error).__name__}: {error}")
    info = {"py_callstack": text, "timestamp": str(int(time.time()))}
    entry = {"message": {"message": text, "extraInfo": info}}
    try:
        # WHY renamed: torchrun's agent reads it at any moment, and fails on half of one
        partial = Path(f"{path}.{os.getpid()}")
        partial.write_text(json.dumps(entry), encoding="utf-8")
        partial.replace(path)
    except OSError as problem:
        log.warning("torchrun's error file can't be written: %s", problem)


def is_told_by_another_rank(env: Mapping[str, str]) -> bool:
    """Say whether rank 0 of this node, too, is started by torchrun and makes the same mistake."""
    return "TORCHELASTIC_RUN_ID" in env and env.get("LOCAL_RANK", "0") != "0"
