"""The result of one check of the machine: one line of the doctor's report."""

from dataclasses import dataclass
from typing import Literal

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Check:
    """What was found, and what to do about it, if anything."""

    name: str
    status: Literal["ok", "warn", "FAIL"]
    """warn: training may be slow or fail in some cases. FAIL: it can't run."""

    detail: str
    advice: str = ""
