"""A call with a time limit, for calls that may never return.

Owns the thread that makes the call. What goes wrong here: a device behind an all-reduce that never
ends, or a store whose server hangs. The call can't be cancelled: its thread stays until the process
ends.
"""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def ask_within(question: Callable[[], T], limit_s: float) -> T:
    """Call question; return its result or raise what it raises. Rank-local.

    Raises TimeoutError if it takes longer than limit_s.
    """
    answers: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((question(),))
        except Exception as error:  # WHY broad: raised again in the thread that waits
            answers.put(error)

    threading.Thread(target=ask, name="ask-within", daemon=True).start()
    try:
        answer = answers.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer for {limit_s:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer[0]
