"""The digests of a run, read: which start did a step, from what facts, and what it left.

Written by hardened_ddp/step/records.py; RECORD of data/batches/ledger.py has the fields. The last
start that did a step counts, and of its records the last one; a record that was cut off is dropped.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ddp_runs.run_files import RunView
from hardened_ddp.data.batches.ledger import DIGESTS, RECORD, list_files
from hardened_ddp.errors import RunFolderError
from hardened_ddp.settings.typed_command import own_command

Json = dict[str, Any]  # Any: JSON

_MACHINE = ("python", "device", "kernels", "variables", "tf32", "threads")
"""The facts of the machine: with others of them the same sums may be rounded otherwise."""

_SPIKE, _BEFORE = 1.5, 5
"""A loss so many times as large as the median of so many reports before it."""


@dataclass(slots=True)
class Step:
    """What a step has left."""

    number: int
    world_size: int
    epoch: int
    limit: int
    """Of the samples of a micro-batch; 0: none."""

    start: int
    """Of its window in the epoch's order."""

    size: int
    is_left_out: bool
    gradient: tuple[int, int]
    norm: float
    rate: float
    batches: dict[int, int] = field(default_factory=dict)
    """By rank: the hash of its samples. A rank that was killed in the step has left nothing."""

    losses: dict[int, float] = field(default_factory=dict)
    counts: dict[int, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean over all ranks."""
        return sum(self.losses.values()) / max(1.0, sum(self.counts.values()))

    def parts_from(self, other: "Step") -> str:
        """Name the first thing in which two records of a step differ; empty: they are equal."""
        mine = (self.epoch, self.start, self.size)
        if mine != (other.epoch, other.start, other.size):
            return "samples"
        if self.is_left_out != other.is_left_out:
            return "left out"
        if self.world_size != other.world_size:
            return "ranks"
        ranks = self.batches.keys() & other.batches.keys()
        if any(self.batches[rank] != other.batches[rank] for rank in ranks):
            return "data"
        if any(repr(self.losses[rank]) != repr(other.losses[rank]) for rank in ranks):  # NaN, too
            return "loss"
        return "" if self.gradient == other.gradient else "gradient"


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the run, or a return to an earlier step."""

    number: int
    facts: Json
    steps: dict[int, Step]

    @property
    def world_size(self) -> int:
        return int(self.facts["world_size"])

    @property
    def first(self) -> int:
        return int(self.facts["step"])


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of a run."""

    run: Path
    starts: tuple[Start, ...]

    def owner(self, step: int) -> Start | None:
        """Return the start whose record of a step counts; None: none has one."""
        end = math.inf
        for start in reversed(self.starts):
            if step in start.steps and step < end:
                return start
            end = min(end, start.first)
        return None

    def step(self, number: int) -> Step | None:
        """Return what a step has left."""
        start = self.owner(number)
        return None if start is None else start.steps[number]

    def numbers(self) -> list[int]:
        """List the steps that have a record, in order."""
        every = {number for start in self.starts for number in start.steps}
        return sorted(number for number in every if self.owner(number) is not None)


def read_digests(run: Path, *, may_be_empty: bool = False) -> Digests:
    """Read the digests of a run. Raises RunFolderError if it has none."""
    by_start: dict[int, dict[int, tuple[Json, bytes]]] = {}
    for number, rank, path in list_files(run, DIGESTS):
        head, has_head, raw = path.read_bytes().partition(b"\n")
        if has_head:  # else the rank was killed before its first step
            try:
                facts = dict(json.loads(head))
            except ValueError as error:
                raise RunFolderError(f"{path} is not a file of digests: {error}") from error
            by_start.setdefault(number, {})[rank] = facts, raw
    starts = [
        Start(number, ranks[0][0], _steps_of(ranks))
        for number, ranks in sorted(by_start.items())
        if 0 in ranks
    ]
    if not may_be_empty and not any(start.steps for start in starts):
        raise RunFolderError(
            f"{run} has no digests of its steps, so nothing says whether a step is the same again",
            fix=f"train with --digests on: {own_command('--digests', 'on')}",
        )
    return Digests(run, tuple(starts))


def _steps_of(ranks: Mapping[int, tuple[Json, bytes]]) -> dict[int, Step]:
    """Put the records of all ranks of one start together."""
    steps: dict[int, Step] = {}
    world_size = int(ranks[0][0]["world_size"])
    for rank, (_, raw) in sorted(ranks.items()):
        for at in range(0, len(raw) - RECORD.size + 1, RECORD.size):
            number, *place, left_out, low, high, batches, loss, count, norm, rate = (
                RECORD.unpack_from(raw, at)
            )
            if rank == 0:
                facts = (*place, bool(left_out), (low, high), norm, rate)
                steps[number] = Step(number, world_size, *facts)
            if number in steps:
                step = steps[number]
                step.batches[rank], step.losses[rank], step.counts[rank] = batches, loss, count
    return steps


def spikes_of(run: RunView) -> list[tuple[int, float, str]]:
    """List the reports whose training loss has a spike, and what replays the worst of their steps.

    Of a run without digests: none.
    """
    steps, losses = run.curve("loss/train")
    spikes = []
    for at, loss in enumerate(losses):
        before = [value for value in losses[max(0, at - _BEFORE) : at] if math.isfinite(value)]
        if len(before) >= 2 and not loss <= _SPIKE * median(before):
            spikes.append((at, loss))
    if not spikes:  # WHY first: to read the digests of a long run takes time
        return []
    try:
        digests = read_digests(run.folder)
    except (RunFolderError, OSError):
        return []
    found = []
    for at, loss in spikes:
        since = [s for n in range(steps[at - 1], steps[at]) if (s := digests.step(n)) is not None]
        if since:
            worst = max(since, key=lambda step: math.inf if math.isnan(step.loss) else step.loss)
            command = own_command("replay", run.folder, "--step", str(worst.number))
            found.append((steps[at], loss, command))
    return found


def differing(before: Json, now: Json, names: Iterable[str]) -> list[str]:
    """Say which facts differ: threads 1 / 2."""
    pairs = [(name, before.get(name), now.get(name)) for name in names]
    return [f"{name} {one} / {two}" for name, one, two in pairs if one != two]


def other_machine(before: Json, now: Json) -> list[str]:
    """Say what is different of the machine, and of libraries that both have imported."""
    old, new = before.get("libraries", {}), now.get("libraries", {})
    shared = sorted(old.keys() & new.keys())
    return differing(before, now, _MACHINE) + differing(old, new, shared)


def in_order(rows: Sequence[Json]) -> list[Json]:
    """Sort samples by their weight, the largest first; what is not finite weighs most.

    By the change of the gradient without each of them, where samples are not independent.
    """

    def weight(row: Json) -> tuple[float, float]:
        change = row["change"] if "change" in row else row["norm"]
        values = float(change), float(row["loss"])
        # WHY the loss too: where one sample is NaN, all gradients of its batch may be
        first, second = (-value if math.isfinite(value) else -math.inf for value in values)
        return first, second

    return sorted(rows, key=weight)
