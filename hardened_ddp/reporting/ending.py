"""How a process ends: what it tells torchrun, a launcher of ours, a scheduler and a pod.

0: finished. 3: stopped, and to be continued. 2: a mistake of the user. 75: try again. 1: any other
failure. torchrun makes 1 of them all, and loses them if it got a signal itself; a rank that ends
with 3 it would start again. So ranks note their status in a file of the launcher
(hardened_ddp_command.py, launchers/), end with 0 after a stop, and the launcher ends with what they
noted. Starts that get no further than those before are counted: at MOST_STARTS the status is 1, so
that no scheduler repeats for ever.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hardened_ddp.errors import CrashLoopError, HardenedError, PeerLostError
from hardened_ddp.ranks.launch import Launch, environment
from hardened_ddp.ranks.launchers_env import MARK
from hardened_ddp.reporting.goodput import num_without_progress, read_attempts
from hardened_ddp.reporting.run_json import Json, read_lines
from hardened_ddp.reporting.sinks import write_text, write_whole
from hardened_ddp.settings.wording import printable

log = logging.getLogger(__name__)

STOPPED, TRY_AGAIN, MISTAKE, FAILURE = 3, 75, 2, 1
MOST_STARTS = 5
# Set by a launcher of ours: the file in which its ranks note how they end.
RECORD = "HARDENED_DDP_ENDINGS"

# The run folder, once it is known: for the commands of on_event, and for the count of starts.
RUN = "HDDP_RUN"
_TERMINATION_LOG = "HARDENED_DDP_TERMINATION_LOG"  # the pod's terminationMessagePath, if set there
_MOST_BYTES = 4000  # the kubelet keeps 4096
_WORST_FIRST = (MISTAKE, FAILURE, TRY_AGAIN, STOPPED, 0)


def stop_status(setting: int | None, env: Mapping[str, str]) -> int:
    """Return the status of a run that was stopped: stop_status, or by where it runs.

    WHY 3 in a pod: Kubernetes counts one that ends with 0 as done, also if it was evicted.
    """
    if setting is not None:
        return setting
    return STOPPED if is_pod(env) else 0


def is_pod(env: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in env


def settle(status: int, env: Mapping[str, str]) -> int:
    """Note the status of this process, and return the one to exit with. Rank-local."""
    folder = env.get(RUN, "")
    if RECORD not in env and env.get("RANK", "0") == "0":  # else the launcher counts
        status = limited(status, folder)
    _note({"status": status, "run": folder}, env)
    is_torchruns = "TORCHELASTIC_RUN_ID" in env
    if status != STOPPED or not (is_torchruns or env.get(MARK) == "spawn"):
        return status
    if is_torchruns and RECORD not in env and env.get("LOCAL_RANK") == "0":
        log.warning("stopped, but torchrun ends with 0, as if finished: use hardened-ddp instead")
    return 0


def limited(status: int, folder: str) -> int:
    """Return the status, or FAILURE if a scheduler would repeat what gets no further."""
    if status not in (STOPPED, TRY_AGAIN) or not folder:
        return status
    num_starts = num_without_progress(read_attempts(Path(folder)))
    if num_starts < MOST_STARTS:
        return status
    text = "%d starts of %s got no further: the status is 1 and not %d, so that it ends here"
    log.error(text, num_starts, folder, status)
    return FAILURE


def leave_failed(error: Exception, launch: Launch) -> int:
    """Tell the launcher of a rank why it ends; return the exit status. Rank-local."""
    write_error_file(error, environment())
    is_torchruns = launch.launcher == "torchrun" and launch.is_local_main
    if isinstance(error, CrashLoopError) and is_torchruns:
        os.kill(os.getppid(), signal.SIGTERM)  # WHY: torchrun must not start it again
    return error.exit_status if isinstance(error, HardenedError) else HardenedError.exit_status


def write_error_file(error: BaseException, env: Mapping[str, str]) -> None:
    """Write the error of this rank for whoever started it. Rank-local.

    For torchrun, a rank that only lost another one writes none: it would be called the cause.
    """
    text = printable(f"{type(error).__name__}: {error}")
    _note({"error": text, "is_peer": isinstance(error, PeerLostError)}, env)
    path = env.get("TORCHELASTIC_ERROR_FILE", "")
    if not path and RECORD not in env:
        write_termination_log(text, env)
    if not path or isinstance(error, PeerLostError) or Path(path).exists():
        return
    info = {"py_callstack": text, "timestamp": str(int(time.time()))}
    entry = {"message": {"message": text, "extraInfo": info}}
    try:
        # WHY whole: torchrun's agent reads it at any moment, and fails on half of one
        write_whole(Path(path), json.dumps(entry))
    except OSError as problem:
        log.warning("torchrun's error file can't be written: %s", problem)


def is_told_by_another_rank(env: Mapping[str, str]) -> bool:
    """Say whether rank 0 of this node, too, is started by torchrun and makes the same mistake."""
    return "TORCHELASTIC_RUN_ID" in env and env.get("LOCAL_RANK", "0") != "0"


def read_endings(path: Path) -> tuple[int | None, str]:
    """Read what the ranks of a launcher noted in their last attempt.

    Returns the status to end with, None if no rank noted one; and the error of the cause if any.
    """
    lines = read_lines(path, [])
    attempt = max((line["attempt"] for line in lines), default=0)
    newest = [line for line in lines if line["attempt"] == attempt]
    noted = {line["status"] for line in newest if "status" in line}
    known = [status for status in _WORST_FIRST if status in noted]
    status = next(iter([*known, *sorted(noted)]), None)
    if status is not None:
        status = limited(status, next((line["run"] for line in newest if line.get("run")), ""))
    errors = sorted((line for line in newest if "error" in line), key=lambda line: line["is_peer"])
    return status, errors[0]["error"] if errors else ""


def main() -> None:
    """Print the status that the ranks noted in the file that is named; nothing if they did not."""
    status, _ = read_endings(Path(sys.argv[1]))
    sys.stdout.write("" if status is None else f"{status}\n")


def write_termination_log(text: str, env: Mapping[str, str]) -> None:
    """Write an error to the termination log of this container, which `kubectl describe` shows."""
    path = Path(env.get(_TERMINATION_LOG, "/dev/termination-log"))
    if not is_pod(env) or not os.access(path, os.W_OK):
        return
    try:
        path.write_bytes(text.encode()[:_MOST_BYTES])
    except OSError as error:
        log.warning("%s can't be written: %s", path, error)


def _note(entry: Json, env: Mapping[str, str]) -> None:
    if not (path := env.get(RECORD)):
        return
    line = {"attempt": int(env.get("TORCHELASTIC_RESTART_COUNT", "0")), **entry}
    try:
        write_text(Path(path), json.dumps(line) + "\n", mode="a")
    except OSError as error:
        log.warning("%s can't be written: %s", path, error)


if __name__ == "__main__":
    main()
