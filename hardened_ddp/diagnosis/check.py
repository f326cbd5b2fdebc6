"""What one look at the machine found. The smallest part of the doctor's report."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "FAIL"]

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    """ok: nothing to do. warn: training runs, but slower or not in each case. FAIL: it does not."""

    detail: str
    """What was found."""

    advice: str = ""
    """What to do about it; empty if there is nothing to do."""
