"""The process that started this one, and what happens when it ends.

Owns the thread that waits for that. WHY not the kernel's PR_SET_PDEATHSIG: it sends its signal when
the thread that started the process ends. A thread pool, a notebook or Ray starts processes from
threads that end long before the launcher does.
"""

import os
import select
import signal
import threading


def end_with_parent() -> None:
    """Send this process SIGTERM when its parent process has ended. Rank-local, on Linux."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:  # not visible from this container, or not supported: then nothing is sent
        return

    def wait() -> None:
        poller = select.poll()
        poller.register(parent, select.POLLIN)
        poller.poll()
        os.close(parent)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
