"""The digests of a run, read: what each step left, and the facts of the start that did it.

Written by hardened_ddp/step/records.py; RECORD of data/batches/ledger.py has the fields. The last
start that did a step counts, and of its records the last one; a record that was cut off is dropped.
"""

import json
import math
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ddp_runs.run_files import RunView
from hardened_ddp.data.batches.ledger import DIGESTS, RECORD, list_files
from hardened_ddp.errors import RunFolderError
from hardened_ddp.reporting.run_json import Json
from hardened_ddp.reporting.summary import finished_at
from hardened_ddp.settings.earlier_run import WHICH_RUN
from hardened_ddp.settings.typed_command import own_command

STEP_NUMBERS = ("loss", "grad_norm", "lr")
"""What is known of each step; other names of a condition are those of metrics.jsonl."""

_MACHINE = ("python", "device", "kernels", "threads")
"""The facts of the machine: with others of them the same sums may be rounded otherwise."""

# Settings that change no weight: what is written and watched, and how long is waited. WHY not told:
# one that differs would pass for the reason why two runs part.
_HARMLESS = {
    *("backend", "timeout_s", "eval_batch_size", "eval_every", "log_interval", "time_limit"),
    *("hang_after_s", "debug", "checkpoint_every_steps", "checkpoint_every_epochs", "keep_last"),
    *("keep_milestones", "ledger", "digests", "metrics", "best_metric", "max_errors", *WHICH_RUN),
}

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

    @property
    def numbers(self) -> Json:
        """What can be compared with the numbers of another step, and with those of a condition."""
        main = self.main
        norm = 0.0 if main.left_out else main.norm
        numbers = {"loss": self.loss, "grad_norm": norm, "lr": main.rate, "samples": main.size}
        return {"step": main.step, **numbers}

    def parts_from(self, other: "Step", *, rounds: bool = False) -> str:
        """Name the first thing in which two records of a step differ; empty: they are equal.

        rounds: on another number of ranks the same samples with about the same loss are equal.
        """
        one, two = self.main, other.main
        is_resized = self.facts["world_size"] != other.facts["world_size"]
        both = [] if is_resized else sorted(self.ranks.keys() & other.ranks.keys())
        pairs = [(self.ranks[rank], other.ranks[rank]) for rank in both]
        unlike = {
            "samples": (one.epoch, one.start, one.size) != (two.epoch, two.start, two.size),
            "left out": one.left_out != two.left_out,
            "ranks": is_resized and not rounds,
            "data": any(a.batches != b.batches for a, b in pairs),
            "loss": any(repr(a.loss) != repr(b.loss) for a, b in pairs),  # NaN, too
            "gradient": not is_resized and (one.low, one.high) != (two.low, two.high),
        }
        if is_resized:
            unlike["loss"] = not math.isclose(self.loss, other.loss, rel_tol=1e-3, abs_tol=1e-3)
        return next((name for name, is_unlike in unlike.items() if is_unlike), "")


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of a run."""

    run: Path
    steps: Mapping[int, Step]
    starts: Sequence[Json]  # the facts of each

    @property
    def last(self) -> int:
        """The last step that can be done again; the one after the last record may have failed."""
        return max(self.steps) + (finished_at(self.run) is None)

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
    known: Mapping[int, Step] | None = None
    found = []
    for at, loss in enumerate(losses):
        before = [value for value in losses[max(0, at - _BEFORE) : at] if math.isfinite(value)]
        if len(before) < 2 or loss <= _SPIKE * median(before):
            continue
        if known is None:  # WHY not of any run: to read the digests of a long one takes time
            known = {}
            with suppress(RunFolderError, OSError):
                known = read_digests(run.folder).steps
        if numbers := [n for n in range(*steps[at - 1 : at + 1]) if n in known]:
            worst = max(numbers, key=lambda n: largeness(known[n].loss))
            command = own_command("replay", run.folder, "--step", str(worst))
            found.append((steps[at], loss, command))
    return found


def largeness(value: float) -> float:
    """Give what to compare: nothing is larger than NaN, to which nothing compares."""
    return value if math.isfinite(value) else math.inf


def side_by_side(ones: Iterable[Json], others: Iterable[Json]) -> list[str]:
    """Lay numbers of steps beside those of the same steps that others did: a line for each step."""
    lines = []
    for one, other in zip(ones, others, strict=False):  # an error may end one of them
        shared = [n for n in (*STEP_NUMBERS, "samples") if n in one and n in other]
        told = "; ".join(f"{name} {one[name]:.6g} / {other[name]:.6g}" for name in shared)
        lines.append(f"  step {one['step']}: {told}  {other.get('error', '')}".rstrip())
    return lines


def first_parting(one: Digests, two: Digests, **how: bool) -> tuple[list[int], int, str]:
    """Return the steps that both have, the first that differs (else the last), and in what.

    how: as of Step.parts_from.
    """
    shared = [number for number in one.steps if number in two.steps]
    whats = ((number, one.steps[number].parts_from(two.steps[number], **how)) for number in shared)
    return shared, *next((at for at in whats if at[1]), (max(shared, default=0), ""))


def differences(one: Json, two: Json) -> dict[str, list[str]]:
    """Say how far two starts differ: in settings that can change a number, code, data and so on.

    Of libraries: in those that both have imported.
    """
    a, b = one["settings"], two["settings"]
    old, new = one.get("libraries", {}), two.get("libraries", {})
    libraries = differing(old, new, sorted(old.keys() & new.keys()))
    code, other = one["code"], two["code"]
    return {
        "settings": differing(a, b, [name for name in {**a, **b} if name[2:] not in _HARMLESS]),
        "code": [name for name in {**code, **other} if code.get(name) != other.get(name)],
        "data": [] if one["data"] == two["data"] else ["another dataset, by its fingerprint"],
        "machine": differing(one, two, _MACHINE) + libraries,
        "ranks": differing(one, two, ["world_size"]),
    }


def differing(before: Json, now: Json, names: Iterable[str]) -> list[str]:
    """Say which facts differ: threads 1 / 2."""
    pairs = [(name, before.get(name), now.get(name)) for name in names]
    return [f"{name} {one} / {two}" for name, one, two in pairs if one != two]
