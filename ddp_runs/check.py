"""The result of one check of the machine: one line of the doctor's report."""

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
    """ok: nothing to do. warn: training may be slow or fail in some cases. FAIL: it can't run."""

    detail: str
    """What was found."""

    advice: str = ""
    """What to do about it; empty if nothing."""
