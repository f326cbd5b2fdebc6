"""The list of all faults.

Does not own: what a fault is (fault.py), how it happens (deeds.py inside of a rank, outside.py from
outside), whether all came as expected (compare.py). No torch: the list is told at once.
"""

from hardened_ddp.drill.bad_data import all_bad_data
from hardened_ddp.drill.fault import Fault
from hardened_ddp.drill.mishaps import all_mishaps
from hardened_ddp.drill.strikes import all_strikes


def all_faults() -> list[Fault]:
    """List all faults, in the order of the table."""
    return [*all_strikes(), *all_mishaps(), *all_bad_data()]


def find(name: str) -> Fault | None:
    """Give the fault of this name."""
    return next((fault for fault in all_faults() if fault.name == name), None)
