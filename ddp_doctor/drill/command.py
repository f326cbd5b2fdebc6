"""The command drill: gives faults to any DDP program, unchanged, and says what it lost.

Owns the order of the work and the exit status: 0 nothing lost, 1 something lost, 2 the program
can't be observed, or not in all. Two undisturbed runs come first: what differs between them is no
loss.
"""

import ctypes
import html
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO, cast

from ddp_doctor.drill import isolation
from ddp_doctor.drill.outcome import FAULTS, Drill, Reference, checkpoints_of, has_failed, is_whole
from ddp_doctor.drill.runs import OTHER_RANKS, Case, Facts, Plan, Process, kill_all
from ddp_doctor.drill.story import Part, last_weights, samples_of, uses_of
from ddp_doctor.terminal import PrintableOutput, UsageError, whole_number

LOST, UNSEEN, SHOWN_LINES = 1, 2, 15
MOUNT_S = 20.0
"""For a trial mount: a network file system that is gone never answers."""

COLUMNS = {"fault": 14, "verdict": 14, "ended": 9, "gone_s": 6, "orphans": 0, "next_start": 12}
COLUMNS |= dict.fromkeys(("steps_lost", "samples_twice", "samples_never", "weights"), 0)
COLUMNS |= dict.fromkeys(("files_whole", "files_broken", "log_names"), 0)


def run_drill(
    options: Mapping[str, str], program: Sequence[str], *, output: TextIO, env: Mapping[str, str]
) -> int:
    """Drill the program, print what it lost; return the exit status. Raises UsageError.

    options: by the names of the flags; "usage" is the command that shows them.
    """
    report: Facts = {"command": shlex.join(program), "faults": [], "logs": ""}
    wants_json = bool(options["json"])
    shown = cast(TextIO, PrintableOutput(sys.stderr)) if wants_json else output
    try:
        faults, again = read_faults(options, program, env)
        plan = make_plan(options, env)
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the finally is reached
        try:
            reference = observe_undisturbed(plan, program, report)
            header = line_of(dict(zip(COLUMNS, COLUMNS, strict=True)))
            print(*summary(report), header, sep="\n", file=shown, flush=True)
            for name, fault in [(f"{f}-{n}", f) for n in range(plan.repeats) for f in faults]:
                words, drill = again, Drill(Case(plan, name, fault), reference)
                if fault in OTHER_RANKS:
                    words = with_ranks(again, report["ranks"], OTHER_RANKS[fault])
                report["faults"].append(drill.run(program, words))
                print(line_of(report["faults"][-1]), file=shown, flush=True)
                for path in plan.work.glob("*/[!l]*/"):  # all that the case left, but its logs
                    shutil.rmtree(path, ignore_errors=True)
            verdicts = {row["verdict"] for row in report["faults"]}
            report["logs"] = str(plan.work) if "lost" in verdicts else ""
        finally:
            kill_all()
            if not report["logs"]:
                shutil.rmtree(plan.work, ignore_errors=True)
    except UsageError as error:
        if wants_json:
            print(json.dumps({"error": error.message, "next": error.fix}), file=output)
        raise
    told = json.dumps(report, indent=1) if wants_json else "\n".join(["", *sentences(report)])
    print(told, file=output)
    if options["html"]:
        Path(options["html"]).write_text(as_html(report), encoding="utf-8")
    return LOST if "lost" in verdicts else UNSEEN if "not measured" in verdicts else 0


def with_ranks(command: Sequence[str], old: int, change: int) -> list[str]:
    """Give a command for another number of ranks; empty if it does not name the old one."""
    flag = rf"(\0--(?:nproc[-_]per[-_]node|num[-_]processes)[=\0]){old}(?=\0)"
    changed, found = re.subn(flag, rf"\g<1>{old + change}", "\0".join([*command, ""]))
    # accelerate refuses --multi_gpu for one process
    words = [w for w in changed.split("\0")[:-1] if w != "--multi_gpu" or old + change > 1]
    return words if found else []


def read_faults(
    options: Mapping[str, str], program: Sequence[str], env: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Give the faults, and the command of the next start. Raises UsageError."""
    faults = [word.strip() for word in (options["faults"] or ",".join(FAULTS)).split(",")]
    unknown = [fault for fault in faults if fault not in FAULTS]
    problems = [f"--faults: found {unknown}, known: {', '.join(FAULTS)}"] if unknown else []
    try:
        again = shlex.split(options["again"]) or list(program)
    except ValueError as error:
        again, problems = ["true"], [f"--again: {error}: {options['again']}"]
    for words in (program, again):
        if not words or shutil.which(words[0], path=env.get("PATH")) is None:
            problems.append(f"can't be executed: {words[0]}" if words else "no command was given")
    page = Path(options["html"]).absolute()
    if options["html"] and (page.is_dir() or not os.access(page.parent, os.W_OK)):
        problems.append(f"--html: {page}: it is a folder, or there is none to write it to")
    if sys.platform != "linux":
        problems.append("this needs Linux: /proc, and overlay mounts where it has them")
    if problems:
        raise UsageError(f"drill: {'; '.join(dict.fromkeys(problems))}", fix=options["usage"])
    return faults, again


def make_plan(options: Mapping[str, str], env: Mapping[str, str]) -> Plan:
    """Choose the folders, and how the program gets its own. Raises UsageError."""
    numbers = {"hang_after": 120, "repeat": 1, "rank": 1, "step": 0}
    for name in filter(options.get, numbers):
        numbers[name] = whole_number(options, name, least=int(name != "rank"))
    folders = [os.path.realpath(folder) for folder in (".", *options["also"].splitlines())]
    if bad := [folder for folder in folders if folder == "/" or not os.path.isdir(folder)]:
        told = f"{bad[0]}: this needs a folder that exists, and not /"
        raise UsageError(told, fix="start the drill in the folder of the program")
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    inside = tuple(f"{folder}/" for folder in folders)
    # WHY: an overlay of a folder alone would hide what is mounted in it
    points = sorted({line.split()[4].replace("\\040", " ") for line in text.splitlines()})
    folders += [p for p in points if p.startswith(inside) and p not in folders]
    places = [os.path.realpath(tempfile.gettempdir()), "/var/tmp", "/dev/shm"]
    place = next(place for place in places if not f"{place}/".startswith(inside))
    work = Path(tempfile.mkdtemp(prefix="drill-", dir=place))
    plan = Plan(folders, work, env, numbers["hang_after"], numbers["rank"], numbers["step"])
    plan.repeats, trial = numbers["repeat"], Case(plan, "trial")
    words = [sys.executable, "-I", isolation.__file__, str(trial.home), *folders, "--", "true"]
    plan.has_overlay, why = not options["copy"], "--copy was given"
    try:
        if plan.has_overlay:
            subprocess.run(words, capture_output=True, text=True, timeout=MOUNT_S, check=True)
    except subprocess.SubprocessError as error:  # it failed, or did not end
        plan.has_overlay = False
        why = [str(error), *(str(getattr(error, "stderr", "") or "").splitlines())][-1]
    if not plan.has_overlay:
        plan.folders = folders[:1]
    if options["also"] and not plan.has_overlay:
        shutil.rmtree(work)
        raise UsageError(f"--also needs overlay mounts: {why}", fix="leave out --also or --copy")
    return plan


def observe_undisturbed(plan: Plan, program: Sequence[str], report: Facts) -> Reference:
    """Run it twice, undisturbed; choose where the fault comes. Raises UsageError."""
    cases, uses = [Case(plan, "undisturbed"), Case(plan, "undisturbed-again")], []
    for case in cases:
        case.start(program)
        ranks = {p.rank: p for p in case.processes() if p.rank is not None and p.all("update")}
        check_observed(case, list(ranks.values()), program)
        uses.append(uses_of(case, [Part(ranks[0])]))
    total = len(ranks[0].all("update"))
    if len({max(step for _, step in some) for some in uses}) > 1:
        told = "drill: two undisturbed runs made different numbers of steps"
        raise UsageError(told, fix="fix the number of its steps")
    saves = [(p.rank, r["n"]) for p in ranks.values() for r in p.all("save")]
    steps = sorted({step for _, step in saves})
    # WHY the most: Accelerate saves a small file on every rank, the model on one
    plan.saver = Counter(rank or 0 for rank, _ in saves).most_common(1)[0][0] if saves else 0
    if not plan.step:  # in the middle between two saves: right after one would flatter
        last = max((step for step in steps if step < 0.6 * total), default=0)
        gap = min((step for step in steps if step > last), default=total) - last
        middle = last + (gap + 1) // 2 + 1 if gap < total else round(0.6 * total)
        plan.step = max(2, min(middle, total))
    plan.point = "forward" if ranks[0].all("update")[0]["has_forward"] else "step"
    wall_s = max(case.starts[0]["wall_s"] for case in cases)
    plan.hang_after_s += max(case.starts[0]["silent_s"] for case in cases)
    plan.limit_s = 3 * wall_s + plan.hang_after_s + 60
    samples, weights = [samples_of(some) for some in uses], [last_weights(case) for case in cases]
    report |= {"steps": total, "ranks": len(ranks), "seconds": round(wall_s, 1)}
    report |= {"saves_after": steps, "fault_step": plan.step, "fault_rank": plan.rank}
    report |= {"isolation": "overlay" if plan.has_overlay else "copy"}
    report |= {"same_weights_twice": weights[0] == weights[1]}
    report |= {"same_samples_twice": None if None in samples else samples[0] == samples[1]}
    return Reference(
        start=cases[0].starts[0],
        lines=set(cases[0].log(0).splitlines()),
        total=total,
        weights=weights[0] if weights[0] == weights[1] else None,
        samples=samples[0] if samples[0] == samples[1] else None,
        uses=uses[0],
        can_judge_files=all(is_whole(path) for path, _ in checkpoints_of(cases[0])),
    )


def check_observed(case: Case, ranks: Sequence[Process], program: Sequence[str]) -> None:
    """Check that all ranks trained to the end and were seen. Raises UsageError."""
    start, told, fix = case.starts[0], "", ""
    outside = sorted({r["path"] for p in case.processes() for r in p.all("outside")})
    numbers = sorted(p.rank or 0 for p in ranks)
    total = min((len(p.all("update")) for p in ranks), default=0)
    if outside:
        told = f"it writes outside of its folder (refused): {', '.join(outside[:3])}"
        fix = f"add --also {os.path.dirname(outside[0])}"
    elif start["why"] or has_failed(case, 0):
        lines, fix = case.log(0).splitlines(), "this must end with status 0 by itself, and without "
        fix += f"input: {shlex.join(program)} < /dev/null"
        # WHY: what torchrun says after it hides what the ranks said
        ends = [i for i, line in enumerate(lines, 1) if "] failed (exitcode" in line]
        tail = lines[: ends[0] if ends else None][-SHOWN_LINES:]
        how = start["why"] or f"status {start['status']}"
        told = "\n  ".join([f"undisturbed: {how}; the end of its log:", *tail])
    elif len(ranks) < 2 or len(ranks) < ranks[0].world:
        told = f"no DDP program, or not to be observed: {len(ranks)} ranks made steps of an "
        told += "optimizer of torch"
        told += "".join(f"; {r['what']}" for p in case.processes() for r in p.all("error")[:1])
        fix = "start two ranks or more, without python -I or -E"
    elif len([p for p in case.processes() if p.all("update")]) > len(ranks):
        told, fix = "a rank trains in several processes, one after the other", "drill one training"
    elif any(len(p.all("update")) != total for p in ranks):
        told, fix = "its ranks make different numbers of steps", "audit it first"
    elif case.plan.rank not in numbers or case.plan.step > total:
        asked = f"--rank {case.plan.rank} --step {case.plan.step}"
        told = f"it has the ranks {numbers} and {total} steps: {asked}"
        fix = "choose one of these"
    if told:
        raise UsageError(f"drill: {told}", fix=fix)


# What is shown: a table, sentences, a page.


def row_of(facts: Facts) -> list[str]:
    """Give what the columns show of one fault; "-": it was not measured."""
    return ["-" if facts.get(name) is None else str(facts[name]) for name in COLUMNS]


def line_of(facts: Facts) -> str:
    words = zip(row_of(facts), COLUMNS.items(), strict=True)
    return "  ".join(w.ljust(max(width, len(name))) for w, (name, width) in words).rstrip()


def sentences(report: Facts) -> list[str]:
    """Say what was lost, what was not measured, and why."""
    found = []
    for row in report["faults"]:
        told = ["lost " + ", ".join(row["lost"])] if row["lost"] else []
        told += ["not measured: " + ", ".join(row["not_measured"])] if row["not_measured"] else []
        found += [f"{row['fault']}: {'; '.join([*told, *row['notes']])}"] if told else []
    counts = Counter(row["verdict"] for row in report["faults"])
    logs = f"; logs: {report['logs']}" if report["logs"] else ""
    return [*found, "drill: " + ", ".join(f"{n} {word}" for word, n in counts.items()) + logs]


def summary(report: Facts) -> list[str]:
    """Say what was run undisturbed, and where the fault comes."""
    words = {True: "equal", False: "different", None: "not measured"}
    told = f"undisturbed: {report['steps']} steps on {report['ranks']} ranks in "
    told += f"{report['seconds']} s, saved after steps {report['saves_after'][:9]}; twice: weights "
    told += f"{words[report['same_weights_twice']]}, samples {words[report['same_samples_twice']]}"
    return [told, f"fault in step {report['fault_step']} on rank {report['fault_rank']}"]


def as_html(report: Facts) -> str:
    """Give one page that needs no other file."""
    rows = [map(html.escape, row) for row in [[*COLUMNS], *map(row_of, report["faults"])]]
    table = "".join(f"<tr><td>{'<td>'.join(row)}" for row in rows)
    told = "".join(f"<p>{html.escape(line)}" for line in [*summary(report), *sentences(report)])
    style = "body{font-family:sans-serif}td{padding:4px 9px;border-bottom:1px solid #ccc}"
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>drill</title>'
    head += f"<style>{style}</style><h1>{html.escape(report['command'])}</h1>"
    return f"{head}<table>{table}</table>{told}\n"
