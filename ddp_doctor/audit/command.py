"""The command audit: read a source, or run a program under observation, and report.

Owns its output and its exit status: 0 healthy, 1 mistakes found, 2 could not observe.
Puts the verdicts together: each cause once, and what follows from another one as advice only.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
from ddp_doctor.terminal import PrintableOutput, UsageError, whole_number

HEALTHY, MISTAKES, UNSEEN = 0, 1, 2


# Cause -> what it leads to.
FOLLOWS = {
    "no-process-group": "weights-differ gradients-not-averaged evaluation-not-joined",
    "gradients-not-averaged": "weights-differ buffers-differ learning-rates-differ",
    "weights-differ": "gradients-not-averaged",
    "learning-rates-differ": "weights-differ",
    "uneven-steps": "collectives-differ hang exception",
    "collectives-differ": "hang exception uneven-steps",
    "same-samples": "samples-overlap same-augmentation same-dropout same-noise schedule-too-short",
    "samples-overlap": "schedule-too-short evaluation-not-joined",
    "exception": "hang",
    "gradients-not-zeroed": "accumulation-not-divided",
}

ENOUGH_STEPS = 4


def run_audit(
    options: Mapping[str, str], program: Sequence[str], *, output: TextIO, env: Mapping[str, str]
) -> int:
    """Print the report and return the exit status. Raises UsageError for wrong options.

    options: by the names of the flags; "usage" is the command that shows them.
    As JSON an error is printed, too: who reads the report gets an answer in every case.
    """
    try:
        return _run(options, program, output, env)
    except Exception as error:  # WHY broad: whatever it is, it is raised again
        if options["json"]:
            print(as_json([], error=str(error) or repr(error)), file=output)
        raise


def _run(
    options: Mapping[str, str], program: Sequence[str], output: TextIO, env: Mapping[str, str]
) -> int:
    source, wants_json = options["source"], bool(options["json"])
    if not source and not program:
        told = "audit looks at a program or a source, and was given neither a program nor --source "
        raise UsageError(f"{told}FILE", fix=options["usage"])
    read = read_script(Script(Path(source))) if source else []
    if not program:
        return _report(read, wants_json, output, seen=f"{source} was read, not run")
    num_steps, patience_s = (whole_number(options, name) for name in ("steps", "hang_after"))
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        shown = sys.stderr if wants_json else None  # the report alone is on stdout
        ending = run_program(
            program, Path(folder), num_steps=num_steps, patience_s=patience_s, env=env, stdout=shown
        )
        ranks = read_ranks(Path(folder))
    return _report_program(ranks, ending, options, output)


def _report_program(
    ranks: Ranks, ending: Ending, options: Mapping[str, str], output: TextIO
) -> int:
    steps, wants_json = {rank.number: rank.work_count for rank in ranks}, bool(options["json"])
    sources = [options["source"]] if options["source"] else []
    verdicts: list[Verdict] = []
    if len(ranks):
        verdicts = judge(ranks, hung=ending.hung, status=ending.status, sources=sources)
    has_mistakes = any(verdict.is_mistake for verdict in verdicts)
    if not has_mistakes and not any(steps.values()):
        why = f"could not observe the program: {_why_unseen(ranks, ending)}"
        if wants_json:
            print(as_json(verdicts, error=why), file=output)
        print(f"audit: {why}", file=PrintableOutput(sys.stderr))
        return UNSEEN
    if not wants_json:
        lines = [*time_lines(ranks), *(f"not seen: {what}" for what in unseen(ranks))]
        print("\n".join(["", *lines, ""]), file=output)
    told = ", ".join(f"rank {number}: {count}" for number, count in steps.items())
    how = "hung" if ending.hung else "was ended" if ending.status is None else "ended"
    if ending.status:
        how += f" with status {ending.status}"
    seen = f"the program {how}; steps seen: {told}"
    return _report(verdicts, wants_json, output, seen=seen, num_ranks=len(ranks))


def _why_unseen(ranks: Ranks, ending: Ending) -> str:
    if not len(ranks):
        why = "no process of it trains with torch, or they run with python -I, -E or -S, or with "
        why += "another PYTHONPATH"
        if ending.status:
            why = "it fails before a process of it trains with torch: see its own output"
    elif errors := [end["error"] for rank in ranks if (end := rank.last("exit")) and end["error"]]:
        why = f"it failed before the first optimizer step: {errors[0].splitlines()[0][:200]}"
    else:
        why = "none of its ranks made a step of a torch optimizer, or a backward through DDP"
    return f"{why} (its exit status: {ending.status})"


def _report(
    verdicts: list[Verdict], wants_json: bool, output: TextIO, *, seen: str, num_ranks: int = 0
) -> int:
    """Print the verdicts, and what they rest on. num_ranks: 0 for a source."""
    num_mistakes = sum(verdict.is_mistake for verdict in verdicts)
    if wants_json:
        print(as_json(verdicts, num_ranks=num_ranks), file=output)
    else:
        found = f"{num_mistakes or 'no'} mistake{'' if num_mistakes == 1 else 's'} found"
        if num_ranks == 1:
            found = f"{num_mistakes or 'nothing'} found in one process, the only one that trained, "
            found += "so there was nothing to compare between ranks: start at least two (for "
            found += "instance: torchrun --nproc_per_node=2, accelerate launch --num_processes 2)"
        print("\n".join([*as_text(verdicts), f"audit: {found}; {seen}"]), file=output)
    return MISTAKES if num_mistakes else HEALTHY


def judge(
    ranks: Ranks, *, hung: bool, status: int | None = None, sources: Sequence[str] = ()
) -> list[Verdict]:
    """Give all verdicts on a program of which at least one rank was seen.

    status: how it ended. sources: files that are read beside those that were seen at work.
    """
    found: dict[tuple[str, str], Verdict] = {}
    parts: dict[str, Iterator[Verdict]] = {
        "weights": judge_weights(ranks),
        "samples": judge_samples(ranks),
        "updates": judge_updates(ranks),
        "modes": judge_modes(ranks),
        "endings": judge_endings(ranks, hung=hung, status=status),
        "speed": judge_speed(ranks),
        "sources": _read_sources(ranks, sources, found),
    }
    for name, verdicts in parts.items():
        try:
            for verdict in verdicts:
                found.setdefault((verdict.code, verdict.place), verdict)
        except Exception as error:  # WHY broad: the other parts still have an answer
            ranks.failures.append(f"{name}: {error!r}")
    causes = {v.code for v in found.values() if v.is_mistake}
    effects: set[str] = set()
    for code in FOLLOWS:
        if code in causes - effects:
            effects |= set(FOLLOWS[code].split()) & causes
    return [replace(v, softened=v.softened or v.code in effects) for v in found.values()]


def _read_sources(
    ranks: Ranks, sources: Sequence[str], seen: Mapping[tuple[str, str], Verdict]
) -> Iterator[Verdict]:
    """Yield what the files tell beyond what was seen, and the run does not refute."""
    have_ended = all(rank.ended_well for rank in ranks)
    refuted = {
        "gradients-not-averaged": ranks.first.step_count >= ENOUGH_STEPS,
        "same-order": len(ranks.first.trained_passes()) > 1,
        "collectives-differ": have_ended,
        "same-file": have_ended,
    }
    codes = {verdict.code for verdict in seen.values()}
    for file in dict.fromkeys([*map(os.path.abspath, sources), *ranks.files]):
        with suppress(UsageError):  # it is gone, or no file: python -c
            for verdict in read_script(Script(Path(file))):
                if verdict.code not in codes and not refuted.get(verdict.code):
                    yield verdict


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
    found += [f"a part of the judging failed: {failure}" for failure in ranks.failures]
    errors = {r["where"] + ": " + r["what"] for rank in ranks for r in rank.all("error")}
    found += [f"a part of the observer failed: {error}" for error in sorted(errors)]
    return found
