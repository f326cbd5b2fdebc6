"""Work in a fork of pytest: to kill it, limit it or take its rights away."""

import ctypes
import os
import sys
import traceback
from collections.abc import Callable

_CAPABILITIES_OF_64_BITS = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of <linux/capability.h>


def run_forked(work: Callable[[], object]) -> int:
    """Run work in a fork of pytest.

    Gives 0, 99 if it raises, or what it ends with. It must use no tensor code with threads.
    """
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
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def give_up_privileges() -> None:
    """Have this process obey the rights of files, even as root.

    WHY not as another user: nobody else may get to where pytest's temporary folders are.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_OF_64_BITS, 0)
    if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError("capset is not allowed")
