"""Writes what a process does, one JSON object a line, and keeps errors of the observer inside it.

Owns: the file of this process, wrapping functions of torch, the user's line in a call stack.
Does not own: what is worth a record. Records go to a file opened for appending, all at once but
for those of each step and batch: these wait for others, FLUSH_S at most. If the process is killed,
no more than that is lost.
"""

import functools
import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

Foreign = Any  # Any: an object of the observed program, or of its torch
MAX_ERRORS = 4
FREQUENT = frozenset(("step", "batch"))
FLUSH_S, MAX_WAITING = 0.25, 64
"""WHY: to encode a record alone takes three times as long as among others of its kind."""

_HERE = os.path.dirname(os.path.abspath(__file__))
_PATHS = sysconfig.get_paths()
_LIBRARIES = (*{_PATHS[k] for k in ("stdlib", "purelib", "platlib")}, _HERE, "<")


@functools.cache
def is_library(filename: str) -> bool:
    """Whether a file belongs to Python, to an installed package, or to the observer."""
    return filename.startswith(_LIBRARIES) or "-packages/" in filename


def _is_of_signal(error: BaseException) -> bool:
    """Whether the program's handler of a signal raised it, which happened to run in a hook.

    As torch's of SIGCHLD does, when a worker of a DataLoader has died.
    """
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    handlers = [getattr(handler, "func", handler) for handler in handlers]  # of a partial
    functions = [vars(type(handler)).get("__call__", handler) for handler in handlers]
    codes = {getattr(function, "__code__", None) for function in (*handlers, *functions)}
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code in codes for frame, _ in frames)


def user_line(frame: FrameType | None = None) -> str:
    """Give FILE:LINE of the innermost frame outside libraries; of a package, if all are in one.

    A program that is installed as a package (python -m package.train) has no other frames.
    """
    frame = frame or sys._getframe(1)
    fallback = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name):
            return f"{name}:{frame.f_lineno}"
        if not fallback and "-packages/" in name and "/torch/" not in name:
            fallback = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback


def model_line() -> str:
    """Give FILE:LINE where the user calls the model that the current line is inside of."""
    frame: FrameType | None = sys._getframe(1)
    outermost: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_name in ("_wrapped_call_impl", "_call_impl"):
            outermost = frame
        frame = frame.f_back
    return user_line(outermost.f_back if outermost else None) or user_line()


def is_called_by_user() -> bool:
    """Whether the function that asks was called by the user's own line, not by a library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_code.co_filename)


class Recorder:
    """The file of one process, and the state that all parts of the observer share."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.progress = 0
        """Counts whatever shows that the main thread gets on: the watch for hangs reads it."""

        self.own_s = 0.0
        """Seconds that the observer took since the last optimizer step."""

        self.is_rank = False
        """A process that trains: it made a process group, a loader or an optimizer step."""

        self.is_over = False
        self._descriptor: int | None = None
        self._num_errors = 0
        self._waiting: list[dict[str, Foreign]] = []
        self._flushed_at = 0.0
        self._lock = threading.Lock()

    def emit(self, kind: str, **fields: Foreign) -> None:
        """Append a record; a frequent one may wait for flush()."""
        if self._descriptor is None:
            path = f"{self.folder}/p{os.getpid()}.jsonl"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            env = os.environ
            self.emit(
                "process",
                pid=os.getpid(),
                parent=os.getppid(),
                host=socket.gethostname(),
                rank=env.get("RANK"),
                world=env.get("WORLD_SIZE"),
                local_world=env.get("LOCAL_WORLD_SIZE"),
            )
        with self._lock:
            self._waiting.append({"k": kind, "t": round(time.time(), 4), **fields})
        is_early = time.monotonic() - self._flushed_at < FLUSH_S
        if kind not in FREQUENT or not is_early or len(self._waiting) >= MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write what waits. From any thread."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._flushed_at = time.monotonic()
            if waiting and self._descriptor is not None:
                text = "".join(json.dumps(record) + "\n" for record in waiting)
                os.write(self._descriptor, text.encode())

    def guarded(self, function: Callable[..., Foreign]) -> Callable[..., Foreign]:
        """Give a function that records an exception of its own instead of raising it."""

        @functools.wraps(function)
        def call(*args: Foreign, **kwargs: Foreign) -> Foreign:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if _is_of_signal(error):
                    raise
                self._num_errors += 1
                if self._num_errors <= MAX_ERRORS:
                    self.emit("error", where=function.__qualname__, what=repr(error)[:300])
                return None

        return call

    def wrap(
        self,
        owner: Foreign,
        name: str,
        *,
        before: Callable[..., Foreign] | None = None,
        after: Callable[..., Foreign] | None = None,
    ) -> None:
        """Replace a function: before(*args) gives a token for after(token, result, *args)."""
        original = getattr(owner, name)
        first = self.guarded(before) if before else None
        last = self.guarded(after) if after else None

        @functools.wraps(original)
        def patched(*args: Foreign, **kwargs: Foreign) -> Foreign:
            token = first(*args, **kwargs) if first else None
            result = original(*args, **kwargs)
            if last:
                last(token, result, *args, **kwargs)
            return result

        code = getattr(original, "__code__", None)
        call: Foreign = patched
        if code is not None:
            # WHY: torch.compile decides by the file whether it looks into a function.
            call.__code__ = call.__code__.replace(co_filename=code.co_filename)
        setattr(owner, name, call)

    def forget(self) -> None:
        """Begin anew in a forked child: it has a file of its own."""
        self._descriptor, self._waiting, self._lock = None, [], threading.Lock()
        self.is_rank = False
        self.is_over = False
