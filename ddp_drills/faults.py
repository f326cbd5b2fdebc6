"""The list of all faults.

Does not own: what a fault is (fault.py), how it happens (injectors.py inside of a rank, outside.py
from outside), the comparison with its verdict (compare.py). No torch: the list prints at once.
"""

from ddp_drills.data_faults import all_data_faults
from ddp_drills.fault import Fault
from ddp_drills.process_faults import all_process_faults
from ddp_drills.step_faults import all_step_faults


def all_faults() -> list[Fault]:
    """List all faults, in the order of the table."""
    return [*all_process_faults(), *all_step_faults(), *all_data_faults()]


def find(name: str) -> Fault | None:
    """Return the fault of this name."""
    return next((fault for fault in all_faults() if fault.name == name), None)
