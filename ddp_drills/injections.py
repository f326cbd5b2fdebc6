"""The faults that a misbehaving model or dataset injects, and the files that record them.

Through the folder Board, the wrappers (wrappers.py) inside of the ranks and the drill (runner.py)
outside communicate. Each fault that happened is a file there, so that a restarted rank does not
inject it twice. No torch: the list of drills prints at once.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.002
PAUSE_LIMIT_S = 30.0  # how long a rank pauses for a fault from outside
# A note: the model's output for a batch is not that for its halves, as with dropout.
DEPENDS_ON_PARTS = "depends-on-parts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """One fault: what, where, when."""

    kind: str  # what ddp_drills/injectors.py does
    # data, forward, loss, layer, backward, optimizer, update, evaluation: in training. worker: in a
    # DataLoader worker; sample: for one sample, the first one that the last rank reads from that
    # step on; open, start: when the dataset is created.
    phase: str
    step: int = 7  # from this step on (0 is the first); in a worker, after this many samples
    ranks: tuple[int, ...] = ()  # which ranks; negative ones count from the last. Empty: all.
    lasts: bool = False  # every time, until the drill removes the cause. Else once.
    victim: int = -1  # pause: the rank that gets the fault meanwhile
    signal: int = 0  # pause: the signal. 0: the one of the fault.
    seconds: float = 0.0

    def is_for(self, rank: int, world_size: int) -> bool:
        return not self.ranks or rank in [number % world_size for number in self.ranks]


@dataclass(frozen=True, slots=True)
class Pause:
    """A rank that pauses in a phase, so that a fault from outside can happen there."""

    number: int
    victim: int
    signal: int


class Board:
    """Notes between ranks and drill: one small file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sample = -1

    def claim(self, name: str) -> bool:
        """Create a note of this name; False if there is one, also from an earlier start."""
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def write(self, name: str, content: Any) -> None:  # Any: JSON
        """Write a note atomically; several ranks may write the same one."""
        aside = self.folder / f".{name}-{os.getpid()}"
        aside.write_text(json.dumps(content), encoding="utf-8")
        aside.rename(self.folder / name)

    def read(self, name: str) -> Any:  # Any: JSON; None: not there
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def pause(self, pause: Pause) -> None:
        """Wait until the drill has acted. In a rank. Signal handlers run meanwhile."""
        self.write(f"pause-{pause.number}", asdict(pause))
        end = time.monotonic() + PAUSE_LIMIT_S
        while not self.has(f"go-{pause.number}") and time.monotonic() < end:
            time.sleep(POLL_S)

    def waiting(self) -> list[Pause]:
        """List the pauses that are not ended yet. In the drill."""
        names = set(os.listdir(self.folder))  # WHY no glob: the drill asks 200 times a second
        paused = sorted(name for name in names if name.startswith("pause-"))
        found = [self.read(name) for name in paused if name.replace("pause", "go") not in names]
        return [Pause(**entry) for entry in found]

    def end(self, pause: Pause) -> None:
        """Let the rank continue, if it still can. In the drill."""
        self.claim(f"go-{pause.number}")

    def is_bad_sample(self, index: int, *, may_choose: bool) -> bool:
        """Return whether this is the bad sample. The first one with may_choose becomes it."""
        if self._sample < 0:
            if may_choose and not self.has("sample"):
                self.write("sample", index)
            self._sample = int(self.read("sample")) if self.has("sample") else -1
        return self._sample == index

    def num_injected(self) -> int:
        """Count the faults injected so far, over all starts, once for each rank."""
        return len(list(self.folder.glob("injected-*")))

    def set_injections(self, injections: Sequence[Injection]) -> None:
        """Write the faults to inject. In the drill, before the ranks start."""
        self.write("injections", [asdict(injection) for injection in injections])

    def injections(self) -> list[Injection]:
        return [
            Injection(**{**entry, "ranks": tuple(entry["ranks"])})
            for entry in self.read("injections")
        ]
