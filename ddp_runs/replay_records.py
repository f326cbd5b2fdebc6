"""The digests of a run, read: what each step left, and the facts of the start that did it.

Written by hardened_ddp/step/records.py; RECORD of data/batches/ledger.py has the fields. The last
start that did a step counts, and of its records the last one; a record that was cut off is dropped.
"""

import json
import math
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ddp_runs.run_files import RunView
from hardened_ddp.data.batches.ledger import DIGESTS, RECORD, list_files
from hardened_ddp.errors import RunFolderError
from hardened_ddp.reporting.run_json import Json
from hardened_ddp.settings.typed_command import own_command

_MACHINE = ("python", "device", "kernels", "threads")
"""The facts of the machine: with others of them the same sums may be rounded otherwise."""

_SPIKE, _BEFORE = 1.5, 5
"""A loss so many times as large as the median of so many reports before it."""

# What a rank has left of a step: the fields of RECORD, which says more of each.
Record = namedtuple(
    "Record",
    "step epoch limit start size left_out low high batches loss num_counted norm rate",
)


@dataclass(frozen=True, slots=True)
class Step:
    """What a step has left."""

    facts: Json  # of the start that did it
    ranks: dict[int, Record]  # a rank that was killed in the step has left nothing

    @property
    def main(self) -> Record:
        return self.ranks[0]

    @property
    def loss(self) -> float:
        """The mean over all ranks."""
        records = self.ranks.values()
        return float(sum(r.loss for r in records) / max(1.0, sum(r.num_counted for r in records)))

    def parts_from(self, other: "Step") -> str:
        """Name the first thing in which two records of a step differ; empty: they are equal."""
        one, two = self.main, other.main
        both = self.ranks.keys() & other.ranks.keys()
        pairs = [(self.ranks[rank], other.ranks[rank]) for rank in both]
        unlike = {
            "samples": (one.epoch, one.start, one.size) != (two.epoch, two.start, two.size),
            "left out": one.left_out != two.left_out,
            "ranks": self.facts["world_size"] != other.facts["world_size"],
            "data": any(a.batches != b.batches for a, b in pairs),
            "loss": any(repr(a.loss) != repr(b.loss) for a, b in pairs),  # NaN, too
            "gradient": (one.low, one.high) != (two.low, two.high),
        }
        return next((name for name, is_unlike in unlike.items() if is_unlike), "")


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of a run."""

    run: Path
    steps: Mapping[int, Step]
    starts: Sequence[Json]  # the facts of each

    def facts_at(self, step: int) -> Json:
        """Return the facts of the last start that began at a step or before: it did the step."""
        return next((f for f in reversed(self.starts) if f["step"] <= step), self.starts[0])


def read_digests(run: Path, *, may_be_empty: bool = False) -> Digests:
    """Read the digests of a run. Raises RunFolderError if it has none."""
    steps: dict[int, Step] = {}
    starts: dict[int, Json] = {}
    for number, rank, path in list_files(run, DIGESTS):  # of each start rank 0 comes first
        head, has_head, raw = path.read_bytes().partition(b"\n")
        if not has_head or (rank and number not in starts):
            continue  # it was killed before its first step
        if rank == 0:
            try:
                starts[number] = facts = dict(json.loads(head))
            except ValueError as error:
                raise RunFolderError(f"{path} is not a file of digests: {error}") from error
            # what earlier starts did from here on is done again
            steps = {step: left for step, left in steps.items() if step < facts["step"]}
        for fields in RECORD.iter_unpack(raw[: len(raw) - len(raw) % RECORD.size]):
            record = Record(*fields)
            if rank == 0:
                steps[record.step] = Step(starts[number], {0: record})
            elif record.step in steps:
                steps[record.step].ranks[rank] = record
    if not steps and not may_be_empty:
        raise RunFolderError(
            f"{run} has no digests of its steps, so nothing says whether a step is the same again",
            fix=f"train with --digests on: {own_command('--digests', 'on')}",
        )
    return Digests(run, steps, list(starts.values()))


def spikes_of(run: RunView) -> list[tuple[int, float, str]]:
    """List the reports whose training loss has a spike, and what replays the worst of their steps.

    Of a run without digests: none.
    """
    steps, losses = run.curve("loss/train")
    spikes, found = [], []
    for at, loss in enumerate(losses):
        before = [value for value in losses[max(0, at - _BEFORE) : at] if math.isfinite(value)]
        if len(before) >= 2 and not loss <= _SPIKE * median(before):
            spikes.append(at)
    try:  # WHY not of any run: to read the digests of a long one takes time
        known = read_digests(run.folder, may_be_empty=True).steps if spikes else {}
    except (RunFolderError, OSError):
        known = {}
    for at in spikes:
        numbers = [n for n in range(*steps[at - 1 : at + 1]) if n in known]
        if numbers:
            # WHY first: a comparison with NaN is never true
            worst = max(numbers, key=lambda n: (math.isnan(known[n].loss), known[n].loss))
            command = own_command("replay", run.folder, "--step", str(worst))
            found.append((steps[at], losses[at], command))
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
