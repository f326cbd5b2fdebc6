"""What a fault is: what happens, and what is to come of it.

No torch: the list of drills is told at once. Does not own: which faults there are (faults.py).
"""

from dataclasses import dataclass
from typing import Literal

from drills.injections import Injection

LAST = (-1,)
ALL: tuple[int, ...] = ()
HANGS = ("--timeout_s", "5")
"""Settings for a drill that waits for a rank in vain, where the watch for hangs has more patience:
at the start, in an evaluation, in a checkpoint."""

WATCHED = ("--hang_after_s", "1.5")
"""Settings for a drill in which a rank hangs inside of a step."""

Ends = Literal["goes on", "saves", "stops", "restarts", "several starts"]
Keeps = Literal["same weights", "equal replicas"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault, and its expected verdict."""

    name: str
    text: str
    """What happens."""

    injections: tuple[Injection, ...] = ()
    ends: Ends = "goes on"
    """saves: leaves with status 0 and a checkpoint; stops: with an error; restarts: by torchrun;
    several starts: whichever of these, as often as it takes."""

    code: str = ""
    """The error that the user reads."""

    says: tuple[str, ...] = ()
    """Words that the user reads besides; SAMPLE stands for the number of the bad sample."""

    keeps: Keeps = "same weights"
    """equal replicas: rounding differs, because something was summed in another order or form."""

    leaves_out: bool = False
    """A sample is left out, and the ledger and the report say so."""

    flags: tuple[str, ...] = ()
    """Settings of this drill, beside those of the work."""

    signal: int = 0
    """Sent to the victim while it pauses."""

    outside: str = ""
    """What else is done, of outside.py."""

    min_ranks: int = 1

    @property
    def verdict(self) -> str:
        """Say in a line what is expected."""
        kept = "the same weights" if self.keeps == "same weights" else "equal replicas"
        if self.leaves_out:
            return "goes on without the sample, and says so; equal replicas"
        match self.ends:
            case "goes on":
                return f"goes on by itself to {kept}"
            case "saves":
                return f"saves, status 0; the same command goes on to {kept}"
            case "several starts":
                return f"the same command, as often as it takes, comes to {kept}"
            case "restarts":
                return f"torchrun starts it again; to {kept}"
        told = f"stops with {self.code}" if self.code else "ends"
        return f"{told}; the same command goes on to {kept}"
