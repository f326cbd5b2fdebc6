"""The threads beside the main thread. Each works on the GPU of the rank that it belongs to.

WHY one place: CUDA's current device belongs to a thread and is 0 at first. A thread of rank 5 that
only waits for an event would take 500 MiB on GPU 0, and fail if that GPU is full or lost.
"""

import contextlib
import sys
import threading
from collections.abc import Callable


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
