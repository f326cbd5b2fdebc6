"""The Python stacks of a process, requested by another process on this machine.

The signal's handler is C code (faulthandler), which works even while native code holds the GIL. A
stopped process answers only when it continues, and one in an uninterruptible call when that ends.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback

# Added to SIGRTMIN: schedulers, torchrun and NCCL use the signals that have names.
SIGNAL_OFFSET = 1
_NAME = "stacks-of-python"
_POLL_S, _LIMIT_S = 0.02, 1.0
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py")


def offer_stacks() -> int:
    """Make the signal write all threads' stacks to memory; return its descriptor."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    faulthandler.register(signal.SIGRTMIN + SIGNAL_OFFSET, file=fd, all_threads=True)
    return fd


def withdraw_stacks(fd: int) -> None:
    """Close the memory; the signal then writes to stderr."""
    if fd >= 0:
        # WHY not the default action: it would kill the process if somebody still asks.
        faulthandler.register(signal.SIGRTMIN + SIGNAL_OFFSET, file=2, all_threads=True)
        os.close(fd)


def ask_for_stacks(pid: int, fd: int) -> str:
    """Return the stacks of a process that offers them; empty if it does not answer."""
    place = f"/proc/{pid}/fd/{fd}"
    # WHY check: any other process would be killed by this signal.
    with contextlib.suppress(OSError):
        if _NAME not in os.readlink(place):
            return ""
        with open(place, encoding="utf-8", errors="replace") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, signal.SIGRTMIN + SIGNAL_OFFSET)
            return _read_until_quiet(file.fileno(), file.tell())
    return ""


def is_debugged(thread: int) -> bool:
    """Return whether a thread of this process is in a Python debugger."""
    frames = traceback.walk_stack(sys._current_frames()[thread])
    return any(frame.f_code.co_filename.endswith(_DEBUGGERS) for frame, _ in frames)


def _read_until_quiet(fd: int, start: int) -> str:
    """Read what is written from start on, until the file stops growing."""
    end, size = time.monotonic() + _LIMIT_S, start
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        last, size = size, os.fstat(fd).st_size
        if start < size == last:
            break
    return os.pread(fd, size - start, start).decode("utf-8", errors="replace")
