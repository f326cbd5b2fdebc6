"""The command audit: read a source, or run a program under observation, and report.

Owns its output and its exit status: 0 healthy, 1 mistakes found, 2 could not observe.
Does not own: what a mistake is (source_rules.py, judge.py).
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from hardened_ddp.diagnosis.audit.judge import judge, unseen
from hardened_ddp.diagnosis.audit.program import Ending, run_program
from hardened_ddp.diagnosis.audit.records import Ranks, read_ranks
from hardened_ddp.diagnosis.audit.script import Script
from hardened_ddp.diagnosis.audit.source_rules import read_script
from hardened_ddp.diagnosis.audit.speed import time_lines
from hardened_ddp.diagnosis.audit.verdict import Verdict, as_json, as_text
from hardened_ddp.errors import ConfigError
from hardened_ddp.reporting.sinks import printed
from hardened_ddp.settings.cli import Request
from hardened_ddp.settings.typed_command import own_command

HEALTHY, MISTAKES, UNSEEN = 0, 1, 2


def run_audit(request: Request, *, output: TextIO, env: Mapping[str, str]) -> int:
    """Print the report and return the exit status. Raises ConfigError for wrong options."""
    source, program = request.options["source"], request.program
    if bool(source) == bool(program):
        found = "both --source and a program" if source else "neither a program nor --source FILE"
        raise ConfigError(
            f"audit looks at one thing, and was given {found}", fix=own_command("audit", "--help")
        )
    if source:
        verdicts = read_script(Script(Path(source)))
        return _report(verdicts, request, output, seen=f"{source} was read, not run")
    num_steps = _positive(request, "steps")
    patience_s = _positive(request, "hang_after")
    is_json = bool(request.options["json"])
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        ending = run_program(
            program,
            Path(folder),
            num_steps=num_steps,
            patience_s=patience_s,
            env=env,
            stdout=sys.stderr if is_json else None,  # the report alone is on stdout
        )
        ranks = read_ranks(Path(folder))
    return _report_program(ranks, ending, request, output)


def _positive(request: Request, name: str) -> int:
    value = request.options[name]
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(
            f"--{name}: found {value!r}, needs a whole number from 1",
            fix=own_command("audit", "--help"),
        )
    return int(value)


def _report_program(ranks: Ranks, ending: Ending, request: Request, output: TextIO) -> int:
    steps = {rank.number: _work_of(ranks, rank.number) for rank in ranks}
    verdicts = judge(ranks, hung=ending.hung) if len(ranks) else []
    has_mistakes = any(verdict.is_mistake for verdict in verdicts)
    if not has_mistakes and not any(steps.values()):
        why = _why_unseen(ranks, ending)
        if request.options["json"]:
            print(as_json(verdicts, was_observed=False), file=output)
        print(f"audit: could not observe the program: {why}", file=printed(sys.stderr))
        return UNSEEN
    if not request.options["json"]:
        lines = [*time_lines(ranks), *(f"not seen: {what}" for what in unseen(ranks))]
        print("\n".join(["", *lines, ""]), file=output)
    told = ", ".join(f"rank {number}: {count}" for number, count in steps.items())
    how = "hung" if ending.hung else "was ended" if ending.status is None else "ended"
    if ending.status:
        how += f" with status {ending.status}"
    seen = f"the program {how}; steps seen: {told}"
    return _report(verdicts, request, output, seen=seen, num_ranks=len(ranks))


def _work_of(ranks: Ranks, number: int) -> int:
    rank = ranks.by_number[number]
    return max([rank.step_count, *(int(r["n"]) for r in rank.all("by_hand"))])


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
    if request.options["json"]:
        print(as_json(verdicts, num_ranks=num_ranks), file=output)
    else:
        found = f"{num_mistakes or 'no'} mistake{'' if num_mistakes == 1 else 's'} found"
        if num_ranks == 1:
            found = f"{num_mistakes or 'nothing'} found in one process, the only one that trained, "
            found += "so there was nothing to compare between ranks: start at least two (for "
            found += "instance: torchrun --nproc_per_node=2, accelerate launch --num_processes 2)"
        print("\n".join([*as_text(verdicts), f"audit: {found}; {seen}"]), file=output)
    return MISTAKES if num_mistakes else HEALTHY
