"""The command audit: read a source, or run a program under observation, and report.

Owns its output and its exit status: 0 healthy, 1 mistakes found, 2 could not observe.
Puts the verdicts together: each cause once, and what follows from another one as advice only.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from ddp_doctor.audit.endings import judge_endings
from ddp_doctor.audit.modes import judge_modes
from ddp_doctor.audit.program import Ending, run_program
from ddp_doctor.audit.records import Ranks, read_ranks
from ddp_doctor.audit.samples import judge_samples
from ddp_doctor.audit.source_rules import Script, read_script
from ddp_doctor.audit.speed import judge_speed, time_lines
from ddp_doctor.audit.updates import judge_updates
from ddp_doctor.audit.verdict import Verdict, as_json, as_text
from ddp_doctor.audit.weights import judge_weights
from ddp_doctor.terminal import PrintableOutput, UsageError

HEALTHY, MISTAKES, UNSEEN = 0, 1, 2


# Cause -> what it leads to.
FOLLOWS = {
    "no-process-group": ("weights-differ", "gradients-not-averaged", "evaluation-not-joined"),
    "gradients-not-averaged": ("weights-differ", "buffers-differ", "learning-rates-differ"),
    "weights-differ": ("gradients-not-averaged",),
    "learning-rates-differ": ("weights-differ",),
    "uneven-steps": ("collectives-differ", "hang", "exception"),
    "collectives-differ": ("hang", "exception", "uneven-steps"),
    "same-samples": ("samples-overlap", "same-augmentation", "same-dropout"),
    "exception": ("hang",),
    "gradients-not-zeroed": ("accumulation-not-divided",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is asked for: a source to read, or a program to run."""

    source: str
    program: tuple[str, ...]
    num_steps: int
    patience_s: int
    wants_json: bool
    usage: str
    """The command that shows the options."""


def run_audit(request: Request, *, output: TextIO, env: Mapping[str, str]) -> int:
    """Print the report and return the exit status. Raises UsageError for wrong options."""
    source, program = request.source, request.program
    if bool(source) == bool(program):
        found = "both --source and a program" if source else "neither a program nor --source FILE"
        raise UsageError(f"audit looks at one thing, and was given {found}", fix=request.usage)
    if source:
        verdicts = read_script(Script(Path(source)))
        return _report(verdicts, request, output, seen=f"{source} was read, not run")
    for name, number in (("steps", request.num_steps), ("hang_after", request.patience_s)):
        if number < 1:
            text = f"--{name}: found {number}, needs a whole number from 1"
            raise UsageError(text, fix=request.usage)
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        ending = run_program(
            program,
            Path(folder),
            num_steps=request.num_steps,
            patience_s=request.patience_s,
            env=env,
            stdout=sys.stderr if request.wants_json else None,  # the report alone is on stdout
        )
        ranks = read_ranks(Path(folder))
    return _report_program(ranks, ending, request, output)


def _report_program(ranks: Ranks, ending: Ending, request: Request, output: TextIO) -> int:
    steps = {rank.number: rank.work_count for rank in ranks}
    verdicts = judge(ranks, hung=ending.hung) if len(ranks) else []
    has_mistakes = any(verdict.is_mistake for verdict in verdicts)
    if not has_mistakes and not any(steps.values()):
        why = _why_unseen(ranks, ending)
        if request.wants_json:
            print(as_json(verdicts, was_observed=False), file=output)
        print(f"audit: could not observe the program: {why}", file=PrintableOutput(sys.stderr))
        return UNSEEN
    if not request.wants_json:
        lines = [*time_lines(ranks), *(f"not seen: {what}" for what in unseen(ranks))]
        print("\n".join(["", *lines, ""]), file=output)
    told = ", ".join(f"rank {number}: {count}" for number, count in steps.items())
    how = "hung" if ending.hung else "was ended" if ending.status is None else "ended"
    if ending.status:
        how += f" with status {ending.status}"
    seen = f"the program {how}; steps seen: {told}"
    return _report(verdicts, request, output, seen=seen, num_ranks=len(ranks))


def _why_unseen(ranks: Ranks, ending: Ending) -> str:
    if not len(ranks):
        why = "no process of it trains with torch, or they run with python -I, -E or -S, or with "
        why += "another PYTHONPATH"
    elif errors := [end["error"] for rank in ranks if (end := rank.last("exit")) and end["error"]]:
        why = f"it failed before the first optimizer step: {errors[0].splitlines()[0][:200]}"
    else:
        why = "none of its ranks made a step of a torch optimizer, or a backward through DDP"
    return f"{why} (its exit status: {ending.status})"


def _report(
    verdicts: list[Verdict], request: Request, output: TextIO, *, seen: str, num_ranks: int = 0
) -> int:
    """Print the verdicts, and what they rest on. num_ranks: 0 for a source."""
    num_mistakes = sum(verdict.is_mistake for verdict in verdicts)
    if request.wants_json:
        print(as_json(verdicts, num_ranks=num_ranks), file=output)
    else:
        found = f"{num_mistakes or 'no'} mistake{'' if num_mistakes == 1 else 's'} found"
        if num_ranks == 1:
            found = f"{num_mistakes or 'nothing'} found in one process, the only one that trained, "
            found += "so there was nothing to compare between ranks: start at least two (for "
            found += "instance: torchrun --nproc_per_node=2, accelerate launch --num_processes 2)"
        print("\n".join([*as_text(verdicts), f"audit: {found}; {seen}"]), file=output)
    return MISTAKES if num_mistakes else HEALTHY


def judge(ranks: Ranks, *, hung: bool) -> list[Verdict]:
    """Give all verdicts on a program of which at least one rank was seen."""
    found: list[Verdict] = []
    for verdict in _all(ranks, hung=hung):
        if not any(v.code == verdict.code and v.place == verdict.place for v in found):
            found.append(verdict)
    causes = {v.code for v in found if v.is_mistake}
    effects: set[str] = set()
    for code in FOLLOWS:
        if code in causes - effects:
            effects |= set(FOLLOWS[code]) & causes
    return [replace(v, softened=v.softened or v.code in effects) for v in found]


def _all(ranks: Ranks, *, hung: bool) -> Iterator[Verdict]:
    yield from judge_weights(ranks)
    yield from judge_samples(ranks)
    yield from judge_updates(ranks)
    yield from judge_modes(ranks)
    yield from judge_endings(ranks, hung=hung)
    yield from judge_speed(ranks)


def unseen(ranks: Ranks) -> list[str]:
    """Say what this run could not show."""
    found = []
    passes = [p for rank in ranks for p in rank.all("pass")]
    if not passes:
        found.append("no DataLoader was used: samples are compared at DDP's forward only")
    elif max(p["number"] for p in passes) == 0:
        found.append("no second epoch was seen, so nothing is said of set_epoch: try more --steps")
    if ranks.are_sharded:
        found.append("the ranks hold parts of the model (FSDP or the like): weights not compared")
    if len(ranks) < ranks.world_size:
        found.append(f"{ranks.world_size - len(ranks)} of {ranks.world_size} ranks were not seen")
    if not any(rank.all("ddp") for rank in ranks):
        found.append("no DistributedDataParallel was seen")
    errors = {r["where"] + ": " + r["what"] for rank in ranks for r in rank.all("error")}
    found += [f"a part of the observer failed: {error}" for error in sorted(errors)]
    return found
