"""Work in a forked process, for tests that kill it, limit it or take its rights away.

    status = run_forked(lambda: store.write(...))     0, or what os._exit was called with

The child shares what pytest has imported, so it starts in milliseconds. It runs no tensor code that
needs threads: those of the parent are not in the child.
"""

import os
import traceback
from collections.abc import Callable

RAISED = 99


def run_forked(work: Callable[[], object]) -> int:
    """Run work in a child and return its exit status: 0, RAISED, or that of its os._exit."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(RAISED)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
