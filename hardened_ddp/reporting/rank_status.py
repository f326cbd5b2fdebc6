"""The format of RUN/status/rank-N.json: what a rank does. No torch: watch answers at once."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from hardened_ddp.ranks.phase import FIRST_WAIT, Phase
from hardened_ddp.ranks.process import ProcessMark, is_gone
from hardened_ddp.reporting.run_json import Json, is_number, number_of

# The phases in which a rank only waits for others.
WAITS = tuple(phase.label for phase in Phase if phase >= FIRST_WAIT)
# Or longer. WHY not less: the clocks of two hosts may differ, and a shared disk may lag behind.
SILENT_AFTER_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """What a rank does, and where it runs, at one moment."""

    rank: int
    state: str  # running, finished, stopped or failed
    now: float = 0.0  # when this was written, in seconds since the epoch
    began_at: float = 0.0
    silent_after_s: float = SILENT_AFTER_S  # how old this is at most while the rank lives
    world_size: int = 0
    num_nodes: int = 0
    launcher: str = ""
    working_folder: str = ""
    # What starts a loop of the user's own again; empty: resume_command composes it.
    command: str = ""
    step: int = 0
    total_steps: int = 0  # 0: not known yet
    epoch: int = 0
    epochs: int = 0
    phase: str = "?"
    phase_s: float = 0.0
    steps_here: int = 0  # steps since this start
    # Seconds of each phase since this start.
    spent_s: Mapping[str, float] = field(default_factory=dict)
    # On a GPU: seconds of each part of a step. The CPU's clock would see only the queueing.
    split_s: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: float = 0.0  # of all ranks
    rss_mib: float = 0.0
    gpu_mib: float = 0.0
    gpu_peak_mib: float = 0.0
    process: Mapping[str, Any] = field(default_factory=dict)  # Any: a ProcessMark as JSON
    device: str = "?"
    device_name: str = ""
    backend: str = ""
    versions: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON of somebody

    @classmethod
    def read(cls, entry: Json) -> Self | None:
        """Take what is usable of a file that anybody may have written; None: it is no status."""
        if not isinstance(entry.get("rank"), int) or not isinstance(entry.get("state"), str):
            return None
        status = cls(rank=entry["rank"], state=entry["state"])
        found: dict[str, Any] = {}  # Any: by field
        for name in (each.name for each in fields(cls)):
            value: Any = entry.get(name)  # Any: JSON
            default = getattr(status, name)
            if isinstance(default, int | float):
                found |= {name: type(default)(value)} if is_number(value) else {}
            elif isinstance(value, type(default)):
                found[name] = value
        return replace(status, **found)

    def at_work_s(self) -> dict[str, float]:
        """Seconds of each part of the work, without the start; on a GPU of one step."""
        if self.split_s:  # a GPU's backward is "backward with all-reduce"
            return {n.partition(" with ")[0]: number_of(self.split_s, n) for n in self.split_s}
        return {n: number_of(self.spent_s, n) for n in self.spent_s if n != Phase.START_UP.label}

    def is_silent(self, now: float) -> bool:
        """Whether it has given no sign of life for long, or is known to have ended."""
        # WHY suppressed: it may be no mark of a process. Only one of this machine can be asked.
        with contextlib.suppress(TypeError, ValueError, OSError, AttributeError, OverflowError):
            if is_gone(ProcessMark(**self.process)):
                return True
        return now - self.now > self.silent_after_s
