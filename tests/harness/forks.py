"""Work in a forked process, for tests that kill it, limit it or take its rights away.

    status = run_forked(lambda: store.write(...))     0, or what os._exit was called with

The child shares what pytest has imported, so it starts in milliseconds. It runs no tensor code that
needs threads: those of the parent are not in the child.
"""

import ctypes
import os
import sys
import traceback
from collections.abc import Callable

RAISED = 99
_CAPABILITIES_OF_64_BITS = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of <linux/capability.h>


def run_forked(work: Callable[[], object]) -> int:
    """Run work in a child and return its exit status: 0, RAISED, or that of its os._exit."""
    pid = os.fork()
    if pid == 0:
        try:
            if (torch := sys.modules.get("torch")) is not None:
                # WHY: the threads of a parallel operation of the parent are not in this child,
                # which would wait for them for ever
                torch.set_num_threads(1)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(RAISED)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def give_up_privileges() -> None:
    """Have this process obey the rights of files, even as root.

    WHY not as another user: nobody else may get to where pytest's temporary folders are.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_OF_64_BITS, 0)
    nothing = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")
