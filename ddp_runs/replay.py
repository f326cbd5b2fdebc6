"""The commands replay and bisect: steps of a run again, exactly, in a folder of their own.

replay restores the checkpoint before the step, or begins with the seed, and starts the trainer on
as many ranks, with the threads and settings of that time; where the run was resized on the way, one
start follows the other. Then it compares the digests of all steps on the way.
bisect finds the first step where a condition holds, from what the run recorded; by binary search
over the checkpoints, if the condition stays once it holds; else by doing the steps again. Then it
does the steps without some samples, also those before it: damage may show some steps later.
What a rank does is in replay_rank.py.
"""

import json
import re
import shutil
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from ddp_runs.replay_rank import STEP_NUMBERS, Condition
from ddp_runs.replay_records import Digests, differing, other_machine, read_digests
from ddp_runs.run_files import read_run
from hardened_ddp.checkpoint.folder import (
    Found,
    find_newest,
    list_steps,
    load_checkpoint,
    step_folder_name,
    verify_checkpoint,
)
from hardened_ddp.errors import ConfigError, RunFolderError
from hardened_ddp.ranks.launch import environment
from hardened_ddp.reporting.run_json import Json, read_lines
from hardened_ddp.reporting.summary import finished_at
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, SAVED_SETTINGS, find_folder
from hardened_ddp.settings.record import read_back, yaml_word
from hardened_ddp.settings.typed_command import SCRIPT, own_command, torchrun_words
from hardened_ddp.settings.wording import counted

PLAN = "HARDENED_DDP_REPLAY"
"""The variable that names the plan to a rank."""

# What a replay writes, and where it runs, is its own.
_OF_REPLAY = "--tracker=none --no_ledger --time_limit= --on_event= --checkpoint_every_steps=0"
_OF_REPLAY += " --checkpoint_every_epochs=0"
_OF_MACHINE = ("--single_gpu", "--cpu_only", "--backend", "--timeout_s")
_OF_ONE_START = ("--resume", "--run_name", "--output_dir")


@dataclass(kw_only=True)
class Wish:
    """What is asked of a replay."""

    step: int
    ranks: int = 0  # 0: as many as then
    flags: Sequence[str] = ()  # more settings, such as --deterministic
    open: int | None = None
    without: Sequence[int] = ()
    debug: bool = False
    checks_code: bool = True
    when: str = ""  # a condition, where the replay ends. Empty: the step is looked at
    first: int | None = None  # begin at a checkpoint of this step or before. None: of the step
    blames: bool = False  # find what makes the condition hold, among the steps from first on


def run_replay(options: Mapping[str, str], flags: Sequence[str], *, output: TextIO) -> int:
    """Do a step again, and print what it was. Raises HardenedError."""
    run = find_folder(options["run"], Path("runs"))
    wish = Wish(
        step=whole(options["step"], "step"),
        ranks=whole(options["ranks"] or "0", "ranks"),
        flags=flags,
        open=whole(options["open"], "open") if options["open"] else None,
        without=[whole(word, "without") for word in options["without"].split(",") if word],
        debug=bool(options["debug_on"]),
        checks_code=not options["any_code"],
    )
    done = replay(run, wish, output=output)
    print("\n".join(told(run, done)), file=output)
    return int(bool(done["parted"]))


def whole(text: str, name: str) -> int:
    """Read a whole number. Raises ConfigError."""
    if not text.strip().isdecimal():
        fix = own_command("replay", "--help")
        raise ConfigError(f"--{name}: found {text!r}, needs a whole number", fix=fix)
    return int(text)


def told(run: Path, done: Json) -> list[str]:
    """Say what a replay has shown, one line after the other."""
    look = [f"look at it: {own_command('replay', run, *done['look'])}"] if done["look"] else []
    return [done["verdict"], *done["lines"], *look, f"state after it: {done['folder']}"]


def replay(run: Path, wish: Wish, *, output: TextIO) -> Json:
    """Do the steps up to the one of a wish again. Raises HardenedError.

    Returned is what replay_rank.py has found, and: folder; begun_at, a step; equal, how many steps
    are; parted, the first step that is not, and in what; verdict, what that means.
    """
    digests = read_digests(run)
    newest = max(digests.steps)
    missing = ConfigError(
        f"{run} has no step {wish.step} with a digest: the last one is {newest} (--digests auto "
        "ends them where they take more than 1.5 % of a step)",
        fix=own_command("replay", run, "--step", str(newest)),
    )
    if wish.step > newest + 1:  # the one after the last may have failed
        raise missing
    begin = wish.step if wish.first is None else wish.first
    found, _ = find_newest(run / CHECKPOINTS_NAME, at_most=begin)
    if found is None and 0 not in digests.steps:
        problem = f"{run} has no valid checkpoint from before step {begin}, and no digests from "
        fix = "name a later step; --keep_milestones keeps checkpoints of the whole run"
        raise RunFolderError(f"{problem}step 0 on", fix=fix)
    first = 0 if found is None else found.step
    folder, done = run / "replays" / f"step-{wish.step}", Json()
    number = counted(wish.step - first + 1, "step")
    begun = f"the checkpoint of step {first}" if found else "the seed"
    print(f"replaying {number} of {run}, from {begun}", file=output, flush=True)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for facts, begin, end in _starts(digests, first, wish.step):
            _prepare(run, folder, facts, found if begin == first else None, wish.ranks)
            plan = _plan(digests, facts, wish, end)
            if wish.blames:  # within one start, so that a trial can begin there
                plan["tries_from"] = max(wish.first or 0, begin)
                plan["when"] = wish.when if end == wish.step else ""
            done = _train(folder, plan, wish)
            if done["held_at"] is not None:
                break
    except OSError as error:
        raise RunFolderError(f"{folder}: {error}", fix="copy the run first") from error
    if wish.step > newest and done["newest"] <= newest and not wish.when:
        raise missing
    done |= {"folder": folder, "begun_at": first}
    return done | _compare(digests, folder, wish.ranks, done["facts"])


def _starts(digests: Digests, first: int, last: int) -> list[tuple[Json, int, int]]:
    """Cut the way into parts that one start of the trainer can do: (its facts, from, to)."""

    def shape(step: int) -> list[Any]:  # Any: JSON
        facts = digests.facts_at(step)
        settings = {n: v for n, v in facts["settings"].items() if n not in _OF_ONE_START}
        return [settings, *(facts[name] for name in ("world_size", "threads", "global_batch"))]

    parts = [list(steps) for _, steps in groupby(range(first, last + 1), shape)]
    return [(digests.facts_at(steps[0]), steps[0], steps[-1]) for steps in parts]


def _prepare(run: Path, folder: Path, facts: Json, found: Found | None, ranks: int) -> None:
    """Write the settings of a start to the folder, and the checkpoint to begin with."""
    settings = (run / SAVED_SETTINGS).read_text(encoding="utf-8")
    lines = {name: value for name, value, _ in read_back(settings)}
    for name, text in facts["settings"].items():
        lines[name.removeprefix("--")] = yaml_word(json.loads(text))
    if found is None and ranks not in (0, facts["world_size"]):
        lines["global_batch_size"] = str(facts["global_batch"])
    text = "".join(f"{name}: {value}\n" for name, value in lines.items())
    (folder / SAVED_SETTINGS).write_text(text, encoding="utf-8")
    root = folder / CHECKPOINTS_NAME
    root.mkdir(exist_ok=True)
    if found is not None:
        shutil.copytree(found.path, root / step_folder_name(found.step))


def _plan(digests: Digests, facts: Json, wish: Wish, end: int) -> Json:
    steps = [step.main for number, step in digests.steps.items() if number <= end]
    left_out: dict[int, list[int]] = {}
    for entry in read_lines(digests.run / "skipped_samples.jsonl", []):
        if "index" in entry:
            left_out.setdefault(int(entry["step"]), []).append(int(entry["index"]))
    return {
        **asdict(wish),
        "tries_from": wish.step if wish.without else None,
        "last": end,
        "facts": facts,
        "limits": {str(record.step): record.limit for record in steps},
        "left_out": left_out,
        "given_up": [record.step for record in steps if record.left_out],
    }


def _train(folder: Path, plan: Json, wish: Wish) -> Json:
    """Have the trainer do the steps of a plan; return what it found. Raises what ended it."""
    path, log, facts = folder / "plan.json", folder / "replay.log", plan["facts"]
    path.write_text(json.dumps(plan), encoding="utf-8")
    argv = ["--output_dir", str(folder.parent), "--run_name", folder.name]
    for name in _OF_MACHINE:
        argv.append(f"{name}={str(json.loads(facts['settings'][name])).lower()}")
    env = {PLAN: str(path.resolve()), "OMP_NUM_THREADS": str(facts["threads"])}
    argv += [*_OF_REPLAY.split(), *wish.flags]
    if status := run_trainer(argv, wish.ranks or facts["world_size"], env, log):
        text = log.read_text(encoding="utf-8", errors="replace")
        errors = re.findall(r"\[DDP-\w+\] (.*)", text) or [f"its status is {status}"]
        raise ConfigError(
            f"the replay can't be done: {errors[-1]}", fix=own_command("explain", log)
        )
    return dict(json.loads((folder / "replayed.json").read_text(encoding="utf-8")))


def run_trainer(argv: Sequence[str], ranks: int, env: Mapping[str, str], log: Path) -> int:
    """Run the trainer on this machine; return its status. Its output is added to a log."""
    words = [sys.executable]
    if ranks > 1:
        words = [*torchrun_words(), "--standalone", f"--nproc_per_node={ranks}"]
    with log.open("ab") as file:
        return subprocess.run(
            [*words, str(SCRIPT), *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment(), **env},
        ).returncode


def _compare(digests: Digests, folder: Path, ranks: int, now: Json) -> Json:
    """Compare a replay with the records of the run."""
    again, equal = read_digests(folder, may_be_empty=True), 0
    parted: tuple[int, str] | None = None
    both = [(n, digests.steps[n], step) for n, step in again.steps.items() if n in digests.steps]
    for number, then, mine in both:
        what = then.parts_from(mine)
        if what == "ranks":  # rounded otherwise
            is_near = abs(mine.loss - then.loss) <= 1e-3 * max(1.0, abs(then.loss))
            what = "" if is_near else "loss"
        equal += not what
        parted = parted or ((number, what) if what else None)
    steps = counted(equal, "step")
    owner = digests.facts_at(max(again.steps, default=0))
    if parted is not None:
        why = "Where the device is not deterministic, train and replay with --deterministic"
        if parted[1] == "data":
            why = "The dataset gives other samples now: it was changed, or a sample depends on more"
            why += " than its index, the seed and the epoch"
        at = parted[0]
        text = f"equality ended at step {at}: its {parted[1]} differs from what the run recorded; "
        text += f"{steps} equal. What follows of steps from {at} on is not what the run did. {why}"
    elif ranks not in (0, owner["world_size"]):
        text = f"on {ranks} instead of {counted(owner['world_size'], 'rank')}: the same samples "
        text += f"and the same mean, added up in another order: {steps} with the same loss up to "
        text += "rounding"
    else:
        share = f"a share of the gradient in each ({owner['parts']} steps take all of it)"
        share = "all of the gradient" if owner["parts"] == 1 else share
        text = f"{steps} equal bit for bit: samples, loss, {share}"
    if unlike := other_machine(owner, now) + differing(owner, now, ["data"]):
        text += f"\n  then and now differ: {'; '.join(unlike)}"
    return {"equal": equal, "parted": parted, "verdict": text}


def run_bisect(options: Mapping[str, str], flags: Sequence[str], *, output: TextIO) -> int:
    """Print where a condition holds first, and why. Raises HardenedError."""
    run = find_folder(options["run"], Path("runs"))
    condition, digests = Condition.parse(options["when"]), read_digests(run)
    horizon = whole(options["horizon"], "horizon")
    wish = Wish(step=0, when=condition.text, flags=flags, checks_code=not options["any_code"])
    if condition.name not in (*STEP_NUMBERS, "weights"):
        step, how = _first_report(run, condition)
    else:
        step, how = _first_step(digests, condition, wish, output)
    if step is None:
        print(f"{condition.text} holds at no step: {how}", file=output)
        return 1
    print(f"{condition.text} holds first at step {step}: {how}", file=output, flush=True)
    if condition.name not in (*STEP_NUMBERS, "weights"):
        return 0
    wish = replace(wish, step=step, first=max(0, step - horizon), blames=True)
    done = replay(run, wish, output=output)
    if done["parted"]:  # then what a trial shows is no proof for the run
        done |= {"lines": [], "look": []}
    print("\n".join(told(run, done)), file=output)
    return int(bool(done["parted"]))


def _first_step(
    digests: Digests, condition: Condition, wish: Wish, output: TextIO
) -> tuple[int | None, str]:
    """Return the first step where a condition holds, None if it is none, and how that is known."""
    run, is_finished = digests.run, finished_at(digests.run) is not None
    is_recorded = condition.name in ("loss", "lr")
    if condition.name == "grad_norm":  # else each step has none but those that are reported
        clips = [json.loads(facts["settings"]["--clip_grad_norm"]) for facts in digests.starts]
        is_recorded = min(clips) > 0
    for number, step in digests.steps.items() if is_recorded else ():
        norm = 0.0 if step.main.left_out else step.main.norm
        if condition.holds({"loss": step.loss, "grad_norm": norm, "lr": step.main.rate}):
            return number, "recorded when it was done"
    if is_recorded and is_finished:
        return None, f"by the records of {len(digests.steps)} steps"
    last = max(digests.steps) + (not is_finished)  # the one after the last may have failed
    first = last if is_recorded else 0
    if condition.name == "weights" and not condition.op:  # NaN in them never goes away
        first, last = _between_checkpoints(run, last)
        if first > last:
            return None, f"the checkpoint of step {first}, the last one, has none"
    done = replay(run, replace(wish, step=last, first=first), output=output)
    if done["parted"]:
        return None, f"not known: {done['verdict']}"
    return done["held_at"], f"steps {done['begun_at']} to {last} were replayed"


def _between_checkpoints(run: Path, last: int) -> tuple[int, int]:
    """Return two steps between which weights become NaN, by binary search over checkpoints."""
    root = run / CHECKPOINTS_NAME
    steps = sorted(list_steps(root))

    def has_nan(step: int) -> bool:
        found = verify_checkpoint(root / step_folder_name(step))
        if not isinstance(found, Found):
            return False
        names = [name for name in found.manifest.tensors if name.startswith("model.")]
        tensors = load_checkpoint(found, names=names)[0].values()
        return not all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())

    at = bisect_left(steps, True, key=has_nan)
    return steps[at - 1] if at else 0, steps[at] - 1 if at < len(steps) else last


def _first_report(run: Path, condition: Condition) -> tuple[int | None, str]:
    """Return the step of the first report of a metric where a condition holds."""
    view = read_run(run)
    reports = list(zip(*view.curve(condition.name), strict=True))
    if not reports:
        known = sorted({*STEP_NUMBERS, *(name for point in view.points for name in point.values)})
        fix = f"known: {', '.join(known)}"
        raise ConfigError(f"--when: {condition.name} was not recorded", fix=fix)
    step = next((step for step, value in reports if condition.fits(value)), None)
    return step, f"by {len(reports)} reports, each of the steps since the one before"
