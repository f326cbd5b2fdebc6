"""Stacks of a rank that is alone on its machine, when native code holds its GIL.

Its own watch can't run then, and no other rank is there to look. So such a rank starts this module
as a small process beside it: if the heartbeat of the watch stops, it writes the rank's stacks to a
file and says so on stderr.
WHY a process, not faulthandler.dump_traceback_later: its timer reads the stacks of threads that may
be running, for it also fires when a stopped job continues; that can crash the process it watches.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hardened_ddp.ranks.phase import HEART, LIMITS, PHASE, STEP, Phase, open_words
from hardened_ddp.ranks.process import stat_fields
from hardened_ddp.ranks.stacks import ask_for_stacks
from hardened_ddp.ranks.threads import AwakeTime
from hardened_ddp.reporting.sinks import write_text

_MAX_TICKS = 3


def start_outside_view(
    file: Path, *, heartbeat_fd: int, token: int, stacks_fd: int, tick_s: float
) -> "subprocess.Popen[bytes]":
    """Start the process that writes this process's stacks to file once its watch is silent."""
    numbers = [os.getpid(), heartbeat_fd, token, stacks_fd]
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from {__name__} import main; main()"
    argv = [sys.executable, "-S", "-c", code, *map(str, numbers), str(file), str(tick_s)]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def main() -> None:
    """Watch the process that the arguments name, until it ends."""
    # WHY: Ctrl-C and a scheduler's signals are for the rank, which ends this process.
    theirs = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, theirs)
    pid, heartbeat_fd, token, stacks_fd = map(int, sys.argv[1:5])
    file, tick_s = Path(sys.argv[5]), float(sys.argv[6])
    words = open_words(pid, heartbeat_fd, token)
    # Only time in which both processes could run counts.
    awake, heart, seen_s, is_told = AwakeTime(_MAX_TICKS * tick_s), -1, 0.0, False
    while words is not None and os.getppid() == pid:
        time.sleep(tick_s)
        now_s = awake.passed_s()
        if words[HEART] != heart and is_told:
            file.unlink(missing_ok=True)
            is_told = False
        if words[HEART] != heart or stat_fields(pid)[:1] in (["T"], ["t"]):
            heart, seen_s = words[HEART], now_s
        silent_s = now_s - seen_s
        if silent_s > 2 * words[LIMITS + words[PHASE]] / 1e9 > 0 and not is_told:
            is_told = True
            where = f"{Phase(words[PHASE]).label} of step {words[STEP]}"
            stacks = ask_for_stacks(pid, stacks_fd)
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, stacks or "no stacks: the process does not answer\n")
            sys.stderr.write(
                f"the process makes no progress in {where}: native code holds the GIL for "
                f"{silent_s:.0f} s; its stacks: {file}\n"
            )
            sys.stderr.flush()
