"""The signals that are for a rank and not for its workers, nor for what starts the workers.

A scheduler sends them to every process of a job, torchrun sends SIGTERM to every process that a
rank started, and Ctrl-C reaches every process of a terminal. Until it stops, a rank needs batches.
Does not own: what a rank does at a signal (guard/stop.py), or workers (worker_pool.py).
"""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess
from types import FrameType

SIGNALS_OF_THE_RANK = {signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}


@contextlib.contextmanager
def signals_of_rank_blocked() -> Iterator[None]:
    """Block them in the processes that this one starts inside; it gets its own after that.

    WHY: the fork server and spawned workers import torch for seconds before they could do so.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_THE_RANK)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_THE_RANK)  # its start unblocks SIGINT
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_rank() -> None:
    """Let them do nothing in this process, a worker.

    WHY a handler for SIGTERM: programs that the dataset starts would inherit a mask, and could not
    be ended by it.
    """
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_THE_RANK - {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def kill_at_exit(pool: object, workers: Sequence[BaseProcess]) -> None:
    """Kill what is in workers when pool is gone, or when this process ends.

    WHY: at the end of a process that left them, multiprocessing sends SIGTERM, and waits for them.
    """
    util.Finalize(pool, _kill, (workers,), exitpriority=0)


def _kill(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Take a signal."""
