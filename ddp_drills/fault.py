"""Fault: what happens, and the expected verdict.

No torch: the list of drills prints at once.
"""

from dataclasses import dataclass
from typing import Literal

from ddp_drills.injections import Injection

LAST = (-1,)
ALL: tuple[int, ...] = ()
# Settings for a drill that waits for a missing rank where the watch for hangs waits longer: at the
# start, in an evaluation, in a checkpoint.
HANGS = ("--timeout_s", "5")
WATCHED = ("--hang_after_s", "1.5")  # settings for a drill in which a rank hangs inside of a step
Ends = Literal["continues", "saves", "stops", "restarts", "several starts"]
Keeps = Literal["same weights", "near weights", "equal replicas"]

_ENDS = {
    "continues": "continues by itself",
    "saves": "saves, status 0; the same command resumes",
    "several starts": "the same command resumes, as often as needed",
    "restarts": "torchrun restarts it",
}
_KEPT = {
    "same weights": "the same weights",
    "near weights": "the same weights but for rounding",
    "equal replicas": "equal replicas",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault, and its expected verdict."""

    name: str
    text: str  # what happens
    injections: tuple[Injection, ...] = ()
    # saves: exits with status 0 and a checkpoint; stops: with an error; restarts: by torchrun;
    # several starts: any of these, as often as needed.
    ends: Ends = "continues"
    code: str = ""  # the code of the error that the user reads
    # More texts that the user reads; SAMPLE stands for the index of the bad sample.
    says: tuple[str, ...] = ()
    # near weights: only rounding differs, because the parts of a sum changed. equal replicas: the
    # samples or the gradients are other ones.
    keeps: Keeps = "same weights"
    leaves_out: bool = False  # A sample is left out, and the ledger and the report show it
    flags: tuple[str, ...] = ()  # settings of this drill, besides those of the work
    signal: int = 0  # sent to the rank while it pauses
    outside: str = ""  # A fault from outside, see outside.py
    min_ranks: int = 1

    @property
    def verdict(self) -> str:
        kept = _KEPT[self.keeps]
        if self.leaves_out:
            return "continues without the sample and reports it; equal replicas"
        stops = f"{f'stops with {self.code}' if self.code else 'ends'}; the same command resumes"
        return f"{_ENDS.get(self.ends, stops)}; {kept}"
