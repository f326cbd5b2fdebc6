"""What a run trained on, by the lines that its ranks wrote: steps lost, samples twice or never.

Owns the arithmetic. A start that goes on after step S takes back what earlier starts did beyond S:
that work is lost. What remains is what the final weights come from; of it each sample must be there
once for each epoch. Takes files or values and returns values.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_NAME = re.compile(r"steps-(\d+)-(\d+)-rank-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Line:
    """One optimizer step of one rank."""

    step: int
    time: float
    finite: bool
    """All weights are numbers after it."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """One start of all ranks: by the command, or by torchrun's restart."""

    run: int
    restart: int
    lines: tuple[Line, ...]
    """Of all ranks; at least one."""

    @property
    def first(self) -> int:
        return min(line.step for line in self.lines)

    @property
    def last(self) -> int:
        return max(line.step for line in self.lines)


def read_starts(folder: Path) -> list[Start]:
    """Read the lines of all starts that did a step, oldest first."""
    found: dict[tuple[int, int], list[Line]] = {}
    for path in folder.glob("steps-*.jsonl"):
        match = _NAME.fullmatch(path.name)
        assert match is not None, path
        lines = path.read_text(encoding="ascii").split("\n")[:-1]  # the last one may be cut off
        made = [
            Line(e["step"], e["time"], e["finite"], tuple(e["ids"])) for e in map(json.loads, lines)
        ]
        found.setdefault((int(match[1]), int(match[2])), []).extend(made)
    return [Start(*key, tuple(found[key])) for key in sorted(found) if found[key]]


def count_lost_steps(starts: Sequence[Start]) -> int:
    """Count the completed steps that a later start did not go on from."""
    return sum(max(0, earlier.last - (later.first - 1)) for earlier, later in pairwise(starts))


def kept_lines(starts: Sequence[Start]) -> list[Line]:
    """List what the final weights come from."""
    kept: list[Line] = []
    for number, start in enumerate(starts):
        end = min((later.first for later in starts[number + 1 :]), default=start.last + 1)
        kept += [line for line in start.lines if line.step < end]
    return kept


def count_samples(lines: Sequence[Line], *, num_samples: int, num_epochs: int) -> tuple[int, int]:
    """Count the surplus and the missing uses of samples: 0, 0 if each came once per epoch."""
    uses = Counter(sample for line in lines for sample in line.ids)
    surplus = sum(max(0, uses[sample] - num_epochs) for sample in range(num_samples))
    missing = sum(max(0, num_epochs - uses[sample]) for sample in range(num_samples))
    return surplus, missing


def first_poisoned_step(lines: Sequence[Line]) -> int | None:
    """Give the first step after which a weight of the final lineage was not a number."""
    return min((line.step for line in lines if not line.finite), default=None)


def seconds_to_next_step(starts: Sequence[Start], fault_time: float) -> float | None:
    """Give the time from the fault to the next optimizer step on any rank; None without one."""
    times = [line.time for start in starts for line in start.lines if line.time > fault_time]
    return min(times) - fault_time if times else None
