"""The digests of a run, read: what each step left, and the facts of the start that did it.

Written by hardened_ddp/step/records.py; RECORD of data/batches/ledger.py has the fields. The last
start that did a step counts, and of its records the last one; a record that was cut off is dropped.
"""

import json
import math
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from hardened_ddp.data.batches.ledger import DIGESTS, RECORD, list_files
from hardened_ddp.errors import RunFolderError
from hardened_ddp.reporting.run_json import Json
from hardened_ddp.reporting.summary import finished_at
from hardened_ddp.settings.earlier_run import WHICH_RUN
from hardened_ddp.settings.schema import names_of
from hardened_ddp.settings.typed_command import own_command

# What is known of each step; other names of a condition are those of metrics.jsonl.
STEP_NUMBERS = ("loss", "grad_norm", "lr")

# Settings that change no weight: what is written and watched, and how long is waited. WHY not told:
# one that differs would pass for the reason why two runs part.
_HARMLESS = {"backend", "timeout_s", "eval_batch_size", "eval_every", "log_interval", "time_limit"}
_HARMLESS |= {"hang_after_s", "debug", "metrics", "best_metric", "max_errors", *names_of("run")}

# What a rank has left of a step: the fields of RECORD, which says more of each.
Record = namedtuple(
    "Record", "step epoch limit start size left_out batches low high loss num_counted norm rate"
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
    def numbers(self) -> Json:
        """What can be compared with the numbers of another step, and with those of a condition."""
        main, records = self.main, self.ranks.values()
        loss = sum(r.loss for r in records) / max(1.0, sum(r.num_counted for r in records))
        norm = 0.0 if main.left_out else main.norm
        known = main.step, loss, norm, main.rate, main.size
        return dict(zip(("step", *STEP_NUMBERS, "samples"), known, strict=True))

    def parts_from(self, other: "Step", *, rounds: bool = False) -> str:
        """Name the first thing in which two records of a step differ; empty: they are equal.

        rounds: on another number of ranks the same samples with about the same loss are equal.
        """
        one, two = self.main, other.main
        windows = [(each.epoch, each.start, each.size) for each in (one, two)]
        unlike = {"samples": windows[0] != windows[1], "left out": one.left_out != two.left_out}
        if self.facts["world_size"] != other.facts["world_size"]:
            losses = self.numbers["loss"], other.numbers["loss"]
            is_near = math.isclose(*losses, rel_tol=1e-3, abs_tol=1e-3)
            unlike |= {"ranks": not rounds, "loss": not is_near}
        else:
            pairs = [(self.ranks[r], other.ranks[r]) for r in self.ranks.keys() & other.ranks]
            unlike["data"] = any(a.batches != b.batches for a, b in pairs)
            unlike["loss"] = any(repr(a.loss) != repr(b.loss) for a, b in pairs)  # NaN, too
            unlike["gradient"] = (one.low, one.high) != (two.low, two.high)
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

    def shape_at(self, step: int) -> list[object]:
        """Give what is the same all along one start of the trainer, but for which run it was."""
        facts = self.facts_at(step)
        settings = {n: text for n, text in facts["settings"].items() if n[2:] not in WHICH_RUN}
        return [settings, *(facts[name] for name in ("world_size", "threads", "global_batch"))]

    def parting(self, other: "Digests", **how: bool) -> tuple[list[int], int, str]:
        """Return the steps that both have, the first that differs (else the last), and in what.

        how: as of Step.parts_from.
        """
        shared = [step for step in self.steps if step in other.steps]
        whats = ((at, self.steps[at].parts_from(other.steps[at], **how)) for at in shared)
        return shared, *next(filter(itemgetter(1), whats), (max(shared, default=0), ""))


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
                facts = dict(json.loads(head))
            except ValueError as error:
                raise RunFolderError(f"{path} is not a file of digests: {error}") from error
            # what earlier starts did from here on is done again
            steps = {step: left for step, left in steps.items() if step < facts["step"]}
            if facts.get("schema") != 2:  # an earlier version's, with other records
                continue
            starts[number] = facts
        for fields in RECORD.iter_unpack(raw[: len(raw) - len(raw) % RECORD.size]):
            record = Record(*fields)
            if rank == 0:
                steps[record.step] = Step(starts[number], {0: record})
            elif record.step in steps:
                steps[record.step].ranks[rank] = record
    if not steps and not may_be_empty:
        text = f"{run} has no digests of its steps, so nothing says whether one is the same again"
        raise RunFolderError(text, fix=f"train with {own_command('--digests', 'on')}")
    return Digests(run, steps, list(starts.values()))


def largeness(value: float) -> float:
    """Give what to compare: nothing is larger than NaN, to which nothing compares."""
    return value if math.isfinite(value) else math.inf


def side_by_side(ones: Iterable[Json], others: Iterable[Json]) -> list[str]:
    """Lay numbers of steps beside those of the same steps that others did: a line for each step."""
    lines = []
    for one, other in zip(ones, others, strict=False):  # an error may end one of them
        shared = [n for n in (*STEP_NUMBERS, "samples") if n in one and n in other]
        if math.isfinite(one["loss"]):  # then it is only not known, as nobody asked for it
            shared = [n for n in shared if not math.isnan(one[n])]
        told = "; ".join(f"{name} {one[name]:.6g} / {other[name]:.6g}" for name in shared)
        lines.append(f"  step {one['step']}: {told}  {other.get('error', '')}".rstrip())
    return lines


def differences(one: Json, two: Json) -> dict[str, list[str]]:
    """Say how far two starts differ; in libraries: in those that both have imported."""
    a, b = one["settings"], two["settings"]
    old, new = one["libraries"], two["libraries"]
    libraries = differing(old, new, sorted(old.keys() & new.keys()))
    code, other = one["code"], two["code"]
    return {
        "settings": differing(a, b, [name for name in {**a, **b} if name[2:] not in _HARMLESS]),
        "code": [name for name in {**code, **other} if code.get(name) != other.get(name)],
        "data": [] if one["data"] == two["data"] else ["another dataset, by its fingerprint"],
        # with others of these the same sums may be rounded otherwise
        "machine": differing(one, two, ["device", "threads"]) + libraries,
        "ranks": differing(one, two, ["world_size"]),
    }


def differing(before: Json, now: Json, names: Iterable[str]) -> list[str]:
    """Say which facts differ: threads 1 / 2."""
    pairs = [(name, before.get(name), now.get(name)) for name in names]
    return [f"{name} {one} / {two}" for name, one, two in pairs if one != two]
