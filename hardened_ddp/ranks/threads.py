"""The threads beside the main thread, and limits on waits: a call that may never return.

Each thread works on the GPU of the rank that it belongs to. WHY one place: CUDA's current device
belongs to a thread and is 0 at first. A thread of rank 5 that only waits for an event would take
500 MiB on GPU 0, and fail if that GPU is full or lost.

A call to a device or a store that hangs can't be cancelled: its thread stays to the end.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
Jobs = SimpleQueue[Callable[[], None] | None]
_ready: list[Jobs] = []  # of the threads that wait for a question about the GPU; None ends them
os.register_at_fork(after_in_child=_ready.clear)


class HelperThread(threading.Thread):
    """Does work on the GPU of the thread that makes it. The process ends without waiting for it.

    uses_gpu: False if the work never does. WHY: to set the GPU may wait, and torch keeps the GIL
    meanwhile, if the main thread is stuck in the driver.
    """

    def __init__(self, work: Callable[[], object], *, name: str, uses_gpu: bool = True) -> None:
        super().__init__(target=work, name=name, daemon=True)
        torch = sys.modules.get("torch")  # WHY not import: tools that use no GPU start at once
        self._set_gpu: Callable[[], None] = lambda: None
        if torch and uses_gpu and torch.cuda.is_initialized():
            with contextlib.suppress(RuntimeError):
                index = torch.cuda.current_device()
                self._set_gpu = lambda: torch.cuda.set_device(index)

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the GPU failed, which the work may have to tell
            self._set_gpu()
        super().run()


def call_within(question: Callable[[], T], limit_s: float, *, uses_gpu: bool = True) -> T:
    """Return what question returns, or raise its error; TimeoutError after limit_s. Rank-local."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:  # WHY broad: raised again in the thread that waits
            answer.set_exception(error)

    jobs: Jobs | None = None
    if uses_gpu:
        with contextlib.suppress(IndexError):  # none is ready: others ask at the same time
            jobs = _ready.pop()
    if jobs is not None:
        jobs.put(ask)
    else:
        HelperThread(ask, name="ask-within", uses_gpu=uses_gpu).start()
    if not wait([answer], limit_s).done:
        raise TimeoutError(f"no answer for {limit_s:g} s")
    return answer.result()


def keep_ready(number: int) -> Callable[[], None]:
    """Start threads for call_within: while a device is stuck, to start one may wait.

    Returns what ends them.
    """
    for _ in range(number):
        jobs: Jobs = SimpleQueue()
        _ready.append(jobs)
        HelperThread(partial(_answer, jobs), name="ask-within").start()

    def end() -> None:
        while _ready:
            _ready.pop().put(None)

    return end


def _answer(jobs: Jobs) -> None:
    while (question := jobs.get()) is not None:
        question()
        _ready.append(jobs)


@contextlib.contextmanager
def repeating(act: Callable[[], object], *, every_s: float) -> Iterator[None]:
    """Call act again and again, on another thread, while the work inside goes on. Rank-local."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            act()

    thread = HelperThread(repeat, name="repeating", uses_gpu=False)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # WHY: after the work inside act is not called any more


class AwakeTime:
    """Adds up the time between calls of passed_s; a gap counts for at most longest_gap_s.

    WHY not the clock: a job that was stopped as a whole for an hour (SIGSTOP, Slurm's suspend, a
    laptop that sleeps) has not waited for an hour.
    """

    def __init__(self, longest_gap_s: float) -> None:
        """longest_gap_s: a few times the planned interval between two calls."""
        self._longest_gap_s = longest_gap_s
        self._last = time.monotonic()
        self._passed_s = 0.0

    def passed_s(self) -> float:
        now = time.monotonic()
        self._passed_s += min(now - self._last, self._longest_gap_s)
        self._last = now
        return self._passed_s
