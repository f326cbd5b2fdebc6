"""Python's garbage collector, which would look through all modules of torch again and again.

Owns: when it looks. Importing torch makes 600,000 objects, and none of them is garbage. With
Python's own thresholds, looking for some is a quarter of the CPU time of a short run: during the
imports, then now and then in the middle of a step, and once more at the end of the process.
"""

import gc

_USUAL = gc.get_threshold()
_WHILE_IMPORTING = 50_000


def collect_rarely() -> None:
    """Collect once per so many new objects, up to collect_as_usual(): for the imports."""
    gc.set_threshold(_WHILE_IMPORTING)


def keep_imported() -> None:
    """Never look again at what exists now: modules, before anything of a run is made."""
    gc.freeze()


def collect_as_usual() -> None:
    """Collect as Python does by itself: the loop of a run makes garbage that may be large."""
    gc.set_threshold(*_USUAL)
