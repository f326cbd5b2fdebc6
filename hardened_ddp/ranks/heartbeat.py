"""Where this rank is: a few words of memory that its main thread writes and others may read.

Owns the phases of a run and the beacon that shows the one under way: its step, its phase, and since
when. The main thread writes; a thread of its own or, once the memory is shared, any process of this
machine reads, even while this process is stopped or some native code holds Python's lock.
WHY no lock, no message: this is written several times in each step. It costs a look at the clock
and a few stores; what is read may be a moment old, and nothing is decided by a single look.

Does not own: what follows from being somewhere for too long (guard/hang.py).
"""

import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import monotonic_ns
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

START_UP, DATA, FORWARD, BACKWARD, OPTIMIZER, REPORT, CHECKPOINT, EVALUATION = range(8)
# In these a rank does nothing but wait for others.
ALL_REDUCE, BROADCAST, GATHER, AGREEMENT = range(8, 12)
NAMES = (
    *("start-up", "data", "forward", "backward", "optimizer", "report", "checkpoint"),
    *("evaluation", "all-reduce", "broadcast", "gather", "agreement on a stop"),
)
NUM_PHASES = len(NAMES)
FIRST_WAIT = ALL_REDUCE

NUM_FIRST_STEPS = 3
"""Steps that compile, tune and allocate: how long they take says nothing about the others."""

# The words: 8 bytes each. LIMITS: how long each phase may take, in ns, written by the watch.
TOKEN, STEP, PHASE, SINCE, SAMPLE, HEART, LIMITS = range(7)
NUM_WORDS = LIMITS + NUM_PHASES


class Heartbeat:
    """Shows where the main thread of this rank is."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(8 * NUM_WORDS)).cast("q")
        self.words[SINCE] = monotonic_ns()
        self.words[SAMPLE] = -1
        self.num_steps = 0
        """Steps done by this process."""

        self.longest_ns = [0] * NUM_PHASES
        """The longest that each phase took, first steps aside."""

        self._spent_ns = [0] * NUM_PHASES
        self._num_counted = 0

    def enter(self, phase: int) -> int:
        """Show that phase begins now; give the one that ends. Main thread."""
        words = self.words
        now = monotonic_ns()
        before = words[PHASE]
        took = now - words[SINCE]
        # WHY in this order: who reads in between takes the old phase for a short one.
        words[SINCE] = now
        words[PHASE] = phase
        self._spent_ns[before] += took
        if took > self.longest_ns[before]:
            self.longest_ns[before] = took
        return before

    @contextmanager
    def within(self, phase: int) -> Iterator[None]:
        """Show phase inside, and after it what was shown before. Main thread."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def end_step(self, step: int) -> None:
        """Show that the data of step comes now. Main thread."""
        self.enter(DATA)
        self.words[STEP] = step
        self.num_steps += 1
        self._num_counted += 1
        if self.num_steps <= NUM_FIRST_STEPS:
            self.longest_ns = [0] * NUM_PHASES

    def read_split(self) -> dict[str, float]:
        """Give the mean seconds of each phase in the steps since the last call. Main thread."""
        count, spent = self._num_counted, self._spent_ns
        self._num_counted, self._spent_ns = 0, [0] * NUM_PHASES
        if not count:
            return {}
        return {name: ns / 1e9 / count for name, ns in zip(NAMES, spent, strict=True) if ns}

    @property
    def is_warm(self) -> bool:
        """Whether the first steps are over, and times can be told from others."""
        return self.num_steps > NUM_FIRST_STEPS

    def share(self) -> int:
        """Move to memory that other processes can open; give its descriptor, -1 without it.

        WHY memfd: it has no name that a killed process would leave behind in /dev/shm.
        """
        if not hasattr(os, "memfd_create"):
            return -1
        fd = os.memfd_create("heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(fd, 8 * NUM_WORDS)
        words = memoryview(mmap.mmap(fd, 8 * NUM_WORDS)).cast("q")
        words[:] = self.words
        words[TOKEN] = secrets.randbits(62)
        self.words = words
        return fd


class _Shows(Protocol):
    heartbeat: Heartbeat


S = TypeVar("S", bound=_Shows)


def waits_in(
    phase: int,
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Make a method whose object has a beacon show phase while it runs."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def shown(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            before = self.heartbeat.enter(phase)
            try:
                return method(self, *args, **kwargs)
            finally:
                self.heartbeat.enter(before)

        return shown

    return decorate


def open_words(pid: int, fd: int, token: int) -> memoryview | None:
    """Map the shared beacon of another process of this machine; None if it can't be."""
    try:
        other = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        memory = mmap.mmap(other, 8 * NUM_WORDS, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(other)
    words = memoryview(memory).cast("q")
    return words if words[TOKEN] == token else None
