"""What a rank asks of its interpreter, its C library and its system: garbage, memory, open files.

Importing torch makes 600,000 objects, and none of them is garbage. With Python's own thresholds,
searching for it takes a quarter of the CPU time of a short run.
"""

import contextlib
import ctypes
import gc
import resource

_USUAL = gc.get_threshold()
_WHILE_IMPORTING = 50_000

# Names and numbers of <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Larger blocks than this still come from the kernel and go back to it.
_LARGEST_KEPT_BYTES = 1 << 30

_WANTED = 65536


def collect_rarely() -> None:
    """Collect once per so many new objects, up to collect_as_usual(): for the imports."""
    gc.set_threshold(_WHILE_IMPORTING)


def keep_imported() -> None:
    """Never look again at what exists now: modules, before anything of a run is made."""
    gc.freeze()


def collect_as_usual() -> None:
    """Collect as Python does by itself: the loop of a run makes garbage that may be large."""
    gc.set_threshold(*_USUAL)


def keep_freed_memory(device_type: str) -> None:
    """Make malloc keep freed memory if we train on the CPU. Rank-local.

    WHY: each step frees and allocates the same activations, and the kernel would map and zero the
    same pages over and over (ResNet-18 on the CPU: 15 to 30 ms of 540 ms in each step). Call it
    after data and model are loaded: freed memory stays with the process.
    """
    if device_type != "cpu":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library: musl, macOS
        mallopt = ctypes.CDLL(None).mallopt
        for name in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(name, _LARGEST_KEPT_BYTES)


def raise_open_file_limit() -> None:
    """Raise the limit, usually 1,024: each connection of gloo and each batch of a worker counts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
