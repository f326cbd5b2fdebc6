"""torch elastic's error file: torchrun's last block shows what it says.

Owns the file's format. Without it that block says `error_file: <N/A>`, below our own message.
Does not own: who failed first; torchrun takes the rank with the earliest time.
"""

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from hardened_ddp.errors import PeerLostError

log = logging.getLogger(__name__)

_NAME = "TORCHELASTIC_ERROR_FILE"


def write_error_file(error: BaseException, env: Mapping[str, str]) -> None:
    """Write the error of this rank for torchrun, if that is what started it. Rank-local.

    A rank that only lost another one writes none: torchrun would call it the cause.
    """
    path = env.get(_NAME, "")
    if not path or isinstance(error, PeerLostError) or Path(path).exists():
        return
    text = f"{type(error).__name__}: {error}"
    info = {"py_callstack": text, "timestamp": str(int(time.time()))}
    entry = {"message": {"message": text, "extraInfo": info}}
    try:
        Path(path).write_text(json.dumps(entry), encoding="utf-8")
    except OSError as problem:
        log.warning("torchrun's error file can't be written: %s", problem)


def is_told_by_another_rank(env: Mapping[str, str]) -> bool:
    """Say whether rank 0 of this node, too, is started by torchrun and makes the same mistake."""
    return "TORCHELASTIC_RUN_ID" in env and env.get("LOCAL_RANK", "0") != "0"
