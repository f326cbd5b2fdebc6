"""The phases of a run, and the tracker: which phase this rank is in, and the time spent in each.

The tracker keeps the seconds of each phase per step (reports, slow ranks), the wall time of each
phase (goodput), and the heartbeat: memory that another process of this machine can read, even while
this one is stopped or native code holds the GIL. WHY no lock: it is written several times in each
step. A reader may see values that are a moment old, so nothing is decided from a single read.
"""

import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from time import monotonic_ns

log = logging.getLogger(__name__)

# Steps that compile, tune and allocate: their times say nothing about later steps.
NUM_FIRST_STEPS = 3


class Phase(IntEnum):
    """What the main thread does. From ALL_REDUCE on it only waits for other ranks."""

    START_UP = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    REPORT = 5
    CHECKPOINT = 6
    EVALUATION = 7
    ALL_REDUCE = 8
    BROADCAST = 9
    GATHER = 10
    AGREEMENT = 11

    @property
    def label(self) -> str:
        is_stop = self is Phase.AGREEMENT
        return "agreement on a stop" if is_stop else self.name.lower().replace("_", "-")


FIRST_WAIT = Phase.ALL_REDUCE
NUM_PHASES = len(Phase)

# The words of a heartbeat, 8 bytes each. LIMITS: how long each phase may take, in ns: one for each
# phase, written by the hang watch.
STEP, PHASE, SINCE, SAMPLE, HEART, LIMITS = range(6)
NUM_WORDS = LIMITS + NUM_PHASES


class Tracker:
    """Knows the phase of the main thread, which writes it; any thread may read."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(8 * NUM_WORDS)).cast("q")
        self.words[SINCE], self.words[SAMPLE] = monotonic_ns(), -1
        self.num_steps = 0
        self._work = int(Phase.START_UP)  # the last phase that was not only waiting
        self._wall_ns = [0] * NUM_PHASES  # by _work: a wait counts for the phase it interrupts
        self._spent_ns = [0] * NUM_PHASES  # a wait counts for itself
        self._read_ns, self._num_read = [0] * NUM_PHASES, 0  # at the last read_split
        # Each phase is passed on to it. WHY: a GPU runs the work later than the CPU queues it.
        self.follow: Callable[[int], None] | None = None
        self._part = ("starting", monotonic_ns())

    def begin(self, part: str) -> None:
        """Begin a part of the start, such as "opening the dataset"."""
        before, since = self._part
        now = monotonic_ns()
        log.debug("start: %s: %.2f s", before, (now - since) / 1e9)
        self._part = (part, now)

    def part_of_start(self) -> tuple[str, float]:
        """Return the part of the start, or of the first step, and its seconds."""
        part, since = self._part
        if self._work != Phase.START_UP:
            part, since = f"the first step, {self.phase.label}", self.words[SINCE]
        if self.words[PHASE] >= FIRST_WAIT:
            part, since = f"{part}, waiting for other ranks", self.words[SINCE]
        return part, (monotonic_ns() - since) / 1e9

    def enter(self, phase: int) -> int:
        """Begin phase now; return the phase that ends."""
        words = self.words
        now = monotonic_ns()
        before = words[PHASE]
        took = now - words[SINCE]
        # WHY this order: a reader in between sees the old phase as short, and never as hung.
        words[SINCE] = now
        words[PHASE] = phase
        self._spent_ns[before] += took
        self._wall_ns[self._work] += took
        if phase < FIRST_WAIT:
            self._work = phase
            if self.follow is not None:
                self.follow(phase)
        return before

    @contextmanager
    def within(self, phase: int) -> Iterator[None]:
        """Be in phase inside the context, and in the previous phase after it."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def end_step(self, step: int) -> None:
        """Note that step steps are done; the data phase of the next step begins."""
        self.enter(Phase.DATA)
        self.words[STEP] = step
        self.num_steps += 1

    def start_at(self, step: int) -> None:
        """Note that training continues after this step, as after a resume."""
        self.words[STEP] = step

    @property
    def phase(self) -> Phase:
        """The current phase; during a wait, the phase it interrupts."""
        return Phase(self._work)

    @property
    def is_warm(self) -> bool:
        """Whether the first steps are over, so that times are comparable."""
        return self.num_steps > NUM_FIRST_STEPS

    def read_split(self) -> dict[str, float]:
        """Return the mean seconds of each phase in the steps since the last call."""
        now_ns, then_ns = list(self._spent_ns), self._read_ns
        count = self.num_steps - self._num_read
        self._read_ns, self._num_read = now_ns, self.num_steps
        if not count:
            return {}
        spent = [now - then for now, then in zip(now_ns, then_ns, strict=True)]
        return {Phase(i).label: ns / 1e9 / count for i, ns in enumerate(spent) if ns}

    def wall_s(self) -> list[float]:
        """Return seconds by phase so far; a wait counts for what it interrupts."""
        found = [ns / 1e9 for ns in self._wall_ns]
        found[self._work] += (monotonic_ns() - self.words[SINCE]) / 1e9
        return found

    def spent_s(self) -> dict[str, float]:
        """Return seconds by phase so far; a wait counts for itself."""
        return {Phase(i).label: ns / 1e9 for i, ns in enumerate(self._spent_ns) if ns}

    def share(self) -> int:
        """Move the heartbeat to memory that other processes can map; return its descriptor.

        WHY memfd: it has no name that a killed process would leave in /dev/shm.
        """
        fd = os.memfd_create("heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(fd, 8 * NUM_WORDS)
        shared = memoryview(mmap.mmap(fd, 8 * NUM_WORDS)).cast("q")
        shared[:] = self.words
        self.words = shared
        return fd


def open_words(pid: int, fd: int) -> memoryview:
    """Map the shared words of another process of this machine. Raises OSError, ValueError."""
    with open(f"/proc/{pid}/fd/{fd}", "rb", buffering=0) as file:
        memory = mmap.mmap(file.fileno(), 8 * NUM_WORDS, prot=mmap.PROT_READ)
    return memoryview(memory).cast("q")
