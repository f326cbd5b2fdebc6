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
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any, NamedTuple

Foreign = Any  # Any: an object of the observed program, or of its torch
MAX_ERRORS = 4
FREQUENT = frozenset(("step", "batch"))
FLUSH_S, MAX_WAITING = 0.25, 64
"""WHY: to encode a record alone takes three times as long as among others of its kind."""

TIMES = ("own_s", "wait_s", "forward_s", "backward_s", "collective_s")
"""The observer itself; waits for data; DDP's forwards; backwards; collectives of the program."""

_HERE = os.path.dirname(os.path.abspath(__file__))
_PATHS = sysconfig.get_paths()
_LIBRARIES = (*{_PATHS[k] for k in ("stdlib", "purelib", "platlib")}, _HERE, "<")


@functools.cache
def is_library(filename: str) -> bool:
    """Whether a file belongs to Python, to an installed package, or to the observer."""
    return filename.startswith(_LIBRARIES) or "-packages/" in filename


def _codes_of(handler: Foreign) -> set[Foreign]:
    """Collect the code of a signal's handler: a function, a method, a partial, an object."""
    handler = getattr(handler, "func", handler)
    functions = (handler, vars(type(handler)).get("__call__"))
    return {getattr(function, "__code__", None) for function in functions} - {None}


def user_frames(frame: FrameType | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield FILE:LINE of each frame outside libraries, innermost first; of a package, if all are.

    With the name of the frame's function, and of the one that it calls: how a library was entered.
    A program that is installed as a package (python -m package.train) has no other frames.
    """
    fallback, inner, is_found = "", "", False
    for at in _stack(frame):
        name, function = at.f_code.co_filename, at.f_code.co_name
        if not is_library(name):
            is_found = True
            yield f"{name}:{at.f_lineno}", function, inner
        if not fallback and "-packages/" in name and "/torch/" not in name:
            fallback = f"{name}:{at.f_lineno}"
        inner = inner if name.startswith(_HERE) else function
    if not is_found:
        yield fallback, "", ""


def user_line(frame: FrameType | None = None) -> str:
    """Give FILE:LINE of the innermost frame outside libraries."""
    return next(user_frames(frame or sys._getframe(1)))[0]


def given_numbers() -> Iterator[tuple[str, list[float]]]:
    """Yield FILE:LINE of each frame outside libraries, and the numbers that its function got."""
    for frame in _stack():
        code = frame.f_code
        if not is_library(code.co_filename):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = [frame.f_locals.get(name) for name in names]
            numbers = [value for value in values if isinstance(value, int | float)]
            numbers = [value for value in numbers if not isinstance(value, bool)]
            yield f"{code.co_filename}:{frame.f_lineno}", numbers


def model_line() -> str:
    """Give FILE:LINE where the user calls the model that the current line is inside of."""
    calls = [f for f in _stack() if f.f_code.co_name in ("_wrapped_call_impl", "_call_impl")]
    return user_line(calls[-1].f_back if calls else None) or user_line()


def is_called_by_user() -> bool:
    """Whether the function that asks was called by the user's own line, not by a library."""
    names = (frame.f_code.co_filename for frame in _stack())
    outside = (n for n in names if not n.startswith(_HERE) and "/torch/" not in n)
    return not is_library(next(outside, "<"))


def is_called_from(file: str) -> bool:
    """Whether a file whose path ends like this has called the current line."""
    return any(frame.f_code.co_filename.endswith(file) for frame in _stack())


def _stack(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yield a frame, or that of the caller, and all that called it."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class Hook(NamedTuple):
    """A function of a module, as its dotted name there, and what runs before and after it."""

    module: str
    name: str
    before: Callable[..., Foreign] | None = None
    after: Callable[..., Foreign] | None = None


@dataclass(slots=True)
class Window:
    """What the process did since its last optimizer step. All parts of the observer fill it in."""

    is_sampled: bool = True
    """Its gradients, weights and losses are looked at."""

    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    batches: Counter[int] = field(default_factory=Counter)
    """By loader."""

    backwards: Counter[str] = field(default_factory=Counter)
    """By what DDP does in them."""

    backward_lines: Counter[str] = field(default_factory=Counter)
    inputs: list[Foreign] = field(default_factory=list)
    """Fingerprints of what DDP's forwards got."""

    trains: bool | None = None
    """The mode of the model in the newest forward with gradients; None: it has no modes."""

    factors: list[tuple[float, str]] = field(default_factory=list)
    """Of each loss."""

    reduced: dict[Foreign, list[Foreign]] = field(default_factory=dict)
    """Nodes of losses that were all-reduced, with the user's frames."""

    reduced_line: str = ""
    drawn: str = ""


class Recorder:
    """The file of one process, and the state that all parts of the observer share."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.progress = 0
        """Counts whatever shows that the main thread gets on: the watch for hangs reads it."""

        self.window = Window()
        self.is_rank = False
        """A process that trains: it made a process group, a loader or an optimizer step."""

        self.is_over = False
        self._pid = 0
        """Of the process that the file tells of."""

        self._statistics: int | None = None
        self._asked_at = self._waited_s = 0.0
        self._num_errors = 0
        self._waiting: list[dict[str, Foreign]] = []
        self._flushed_at = 0.0
        # WHY reentrant: a handler of a signal runs amid a flush, and may do what is recorded
        self._lock = threading.RLock()
        self._handlers: set[Foreign] = set()
        """Code of handlers of signals, also of those that are no longer set when they raise."""

    def emit(self, kind: str, **fields: Foreign) -> None:
        """Append a record; a frequent one may wait for flush()."""
        if self._pid != os.getpid():
            self._pid, env = os.getpid(), os.environ
            self.emit(
                "process",
                pid=self._pid,
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
        """Write what waits. From any thread.

        WHY the file is opened each time: a program may close all descriptors, and get the number
        of ours for a file of its own.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._flushed_at = time.monotonic()
            if waiting:
                text = "".join(json.dumps(record) + "\n" for record in waiting)
                path, flags = f"{self.folder}/p{self._pid}.jsonl", os.O_WRONLY | os.O_APPEND
                descriptor = os.open(path, flags | os.O_CREAT, 0o644)
                try:
                    os.write(descriptor, text.encode())
                finally:
                    os.close(descriptor)

    def clock(self) -> float:
        """Give a time that stands still while the main thread waits for a CPU.

        WHY: on a busy machine the clock on the wall shows what other programs do. The kernel is not
        asked again within 50 us: who had to wait for a CPU waited longer.
        """
        now = time.perf_counter()
        if now - self._asked_at < 50e-6:
            return now - self._waited_s
        self._asked_at = now
        try:
            if self._statistics is None:
                path = f"/proc/self/task/{os.getpid()}/schedstat"
                self._statistics = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if self._statistics >= 0:
                self._waited_s = 1e-9 * int(os.pread(self._statistics, 80, 0).split()[1])
        except (OSError, ValueError, IndexError) as error:  # not Linux, or the file was closed
            if self._is_of_signal(error):
                raise
            self._statistics = -1
        return time.perf_counter() - self._waited_s

    def watch_signals(self) -> None:
        """Remember all handlers of signals: what one raises within a hook is the program's."""
        self.wrap(signal, "signal", before=self._note_handler)

    def _note_handler(self, number: Foreign, handler: Foreign) -> None:
        self._handlers |= _codes_of(handler)

    def _is_of_signal(self, error: BaseException) -> bool:
        """Whether a handler of a signal raised it, which happened to run in a hook.

        As torch's of SIGCHLD does, when a worker of a DataLoader has died.
        """
        now = [_codes_of(signal.getsignal(number)) for number in signal.valid_signals()]
        codes = self._handlers.union(*now)
        return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))

    def guarded(self, function: Callable[..., Foreign]) -> Callable[..., Foreign]:
        """Give a function that records an exception of its own instead of raising it.

        Code that torch.compile traces gets nothing of it. WHY no global name before that question:
        the compiler would import this module for it, by a name that the program does not know.
        """
        torch = sys.modules.get("torch")

        @functools.wraps(function)
        def call(*args: Foreign, **kwargs: Foreign) -> Foreign:
            try:
                if torch is not None and torch.compiler.is_compiling():
                    return None
                return function(*args, **kwargs)
            except Exception as error:
                if self._is_of_signal(error):
                    raise
                self._num_errors += 1
                # WHY not after an OSError: the disk is full, or the folder is gone
                if self._num_errors <= MAX_ERRORS and not isinstance(error, OSError):
                    where = getattr(function, "__qualname__", str(function))
                    self.emit("error", where=where, what=repr(error)[:300])
                return None

        return call

    def install(self, hook: Hook, module: Foreign) -> None:
        """Wrap what a hook names, in its module."""
        *owners, name = hook.name.split(".")
        owner = functools.reduce(getattr, owners, module)
        self.wrap(owner, name, before=hook.before, after=hook.after)

    def line_as(self, kind: str) -> Callable[..., None]:
        """Give a hook that records the user's line as a record of this kind."""
        return lambda *args, **kwargs: self.emit(kind, line=user_line())

    def wrap(
        self,
        owner: Foreign,
        name: str,
        *,
        before: Callable[..., Foreign] | None = None,
        after: Callable[..., Foreign] | None = None,
        always: Callable[..., Foreign] | None = None,
    ) -> None:
        """Replace a function: before(*args) gives a token for after(token, result, args[0]).

        always(token): runs if it fails, too.
        """
        original = getattr(owner, name)
        first = self.guarded(before) if before else None
        last = self.guarded(after) if after else None
        ending = self.guarded(always) if always else None

        @functools.wraps(original)
        def patched(*args: Foreign, **kwargs: Foreign) -> Foreign:
            token = first(*args, **kwargs) if first else None
            try:
                result = original(*args, **kwargs)
            finally:
                if ending:
                    ending(token)
            if last:
                last(token, result, *args[:1])
            return result

        call: Foreign = patched
        if code := getattr(original, "__code__", None):
            # WHY: torch.compile decides by the file whether it looks into a function, and looks for
            # global names, as TorchScript does, in those of torch's module
            code = call.__code__.replace(co_filename=code.co_filename, co_name=name)
            call = FunctionType(code, original.__globals__, name, None, call.__closure__)
            functools.update_wrapper(call, original)
        setattr(owner, name, call)

    def forget(self) -> None:
        """Begin anew in a forked child: it has a file of its own."""
        self._waiting, self._lock, self._statistics = [], threading.RLock(), None
        self.is_rank, self.is_over, self.window, self._asked_at = False, False, Window(), 0.0
