"""The signals that are for a rank and not for its workers, nor for what starts the workers.

A scheduler sends them to every process of a job, and Ctrl-C reaches every process of a terminal.
Does not own: what a rank does at a signal (guard/stop.py), or workers (worker_pool.py).
"""

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker

SIGNALS_OF_THE_RANK = {signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}


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
