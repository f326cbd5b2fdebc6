"""What a misbehaving model or dataset is told to do, and the files by which it answers.

Owns: Injection, one fault with its moment; Board, the folder through which the wrappers
(wrappers.py) inside of the ranks and the drill (runner.py) outside talk. What was done
is a file there, so that a rank that is started again does not do it twice. No torch: the list of
drills is quick.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.002
PAUSE_LIMIT_S = 30.0
"""How long a rank holds still for what is to strike it from outside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Injection:
    """One fault: what, where, when."""

    kind: str
    """What drills/injectors.py is to do."""

    phase: str
    """data, forward, loss, layer, backward, optimizer, update, evaluation: of training. worker: in
    a process that loads; sample: in one certain sample, the first one that the last rank reads
    then; open, start: when the dataset is made."""

    step: int = 7
    """From this step on (0 is the first); in a worker, after so many samples."""

    ranks: tuple[int, ...] = ()
    """Which ranks; negative ones count from the last. Empty: all."""

    lasts: bool = False
    """Again and again, until the drill says that it is mended. Else once."""

    victim: int = -1
    """pause: which rank is to be struck meanwhile."""

    signal: int = 0
    """pause: by which signal. 0: by what the fault says."""

    seconds: float = 0.0

    def is_for(self, rank: int, world_size: int) -> bool:
        """Say whether this rank is meant."""
        return not self.ranks or rank in [number % world_size for number in self.ranks]


@dataclass(frozen=True, slots=True)
class Pause:
    """A rank that holds still in a phase, so that something can strike it there."""

    number: int
    victim: int
    signal: int
    where: str


class Board:
    """Notes between ranks and drill: one small file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sample = -1

    def claim(self, name: str) -> bool:
        """Leave a note of this name; False if it is there already, from an earlier start too."""
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def has(self, name: str) -> bool:
        """Say whether there is a note of this name."""
        return (self.folder / name).exists()

    def write(self, name: str, content: Any) -> None:  # Any: JSON
        """Leave a note that is whole or absent."""
        aside = self.folder / f".{name}"
        aside.write_text(json.dumps(content), encoding="utf-8")
        aside.rename(self.folder / name)

    def read(self, name: str) -> Any:  # Any: JSON; None: not there
        """Read a note."""
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def pause(self, pause: Pause) -> None:
        """Hold still until the drill has struck. In a rank. A signal's handler runs meanwhile."""
        self.write(f"pause-{pause.number}", asdict(pause))
        end = time.monotonic() + PAUSE_LIMIT_S
        while not self.has(f"go-{pause.number}") and time.monotonic() < end:
            time.sleep(POLL_S)

    def waiting(self) -> list[Pause]:
        """List the pauses that nobody has ended yet. In the drill."""
        found = []
        for path in sorted(self.folder.glob("pause-*")):
            if not self.has(path.name.replace("pause", "go")):
                found.append(Pause(**json.loads(path.read_text(encoding="utf-8"))))
        return found

    def end(self, pause: Pause) -> None:
        """Let the rank go on, if it still can. In the drill."""
        self.claim(f"go-{pause.number}")

    def is_bad_sample(self, index: int, *, may_choose: bool) -> bool:
        """Say whether this is the one sample that is bad. The first that may be chosen is."""
        if self._sample < 0:
            if may_choose and not self.has("sample"):
                self.write("sample", index)
            self._sample = int(self.read("sample")) if self.has("sample") else -1
        return self._sample == index

    def num_struck(self) -> int:
        """Count what was done so far: over all ranks and starts, once for each rank."""
        return len(list(self.folder.glob("struck-*")))

    def set_injections(self, injections: Sequence[Injection]) -> None:
        """Say what is to happen. In the drill, before the ranks start."""
        self.write("injections", [asdict(injection) for injection in injections])

    def injections(self) -> list[Injection]:
        """Read what is to happen. In a rank."""
        return [
            Injection(**{**entry, "ranks": tuple(entry["ranks"])})
            for entry in self.read("injections")
        ]
