"""The phases of a run, and the heartbeat: shared memory that says what a rank does at the moment.

Owns the heartbeat's layout, and how another process of this machine maps it, which works even while
this process is stopped or native code holds the GIL. WHY no lock and no message: it is written
several times in each step. A reader may see values that are a moment old, so nothing is decided
from a single read.
"""

import mmap
import os
import secrets
from enum import IntEnum


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
        """Its name in messages and reports."""
        return _LABELS.get(self) or self.name.lower().replace("_", "-")


_LABELS = {Phase.AGREEMENT: "agreement on a stop"}
FIRST_WAIT = Phase.ALL_REDUCE
NUM_PHASES = len(Phase)

# The words: 8 bytes each. LIMITS: how long each phase may take, in ns. ALARM: how
# many alarms of the hang watch this rank has seen. Both are written by the hang watch.
TOKEN, STEP, PHASE, SINCE, SAMPLE, HEART, ALARM, LIMITS = range(8)
NUM_WORDS = LIMITS + NUM_PHASES


def new_words() -> memoryview:
    """Allocate words that only this process can read."""
    words = memoryview(bytearray(8 * NUM_WORDS)).cast("q")
    words[SAMPLE] = -1
    return words


def share_words(words: memoryview) -> tuple[memoryview, int]:
    """Copy words to memory that other processes can map; return it and its descriptor.

    Without memfd: return the same words, and -1. WHY memfd: it has no name that a killed process
    would leave behind in /dev/shm.
    """
    if not hasattr(os, "memfd_create"):
        return words, -1
    fd = os.memfd_create("heartbeat", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8 * NUM_WORDS)
    shared = memoryview(mmap.mmap(fd, 8 * NUM_WORDS)).cast("q")
    shared[:] = words
    shared[TOKEN] = secrets.randbits(62)
    return shared, fd


def open_words(pid: int, fd: int, token: int) -> memoryview | None:
    """Map the shared words of another process of this machine; None if they can't be."""
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
