"""The commands replay and bisect: steps of a run again, exactly, in a folder of their own.

replay restores the checkpoint before the step, or begins with the seed, and starts the trainer on
as many ranks, with the threads and settings of that time; where the run was resized on the way, one
start follows the other. Then it compares the digests of all steps on the way.
bisect finds the first step where a condition holds, from what the run recorded; by binary search
over the checkpoints, if the condition stays once it holds; else by doing the steps again. Then it
does the steps without some samples, also those before it: damage may show some steps later.
What a rank does is in replay_rank.py.
"""

import contextlib
import json
import math
import shutil
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ddp_runs.replay_rank import STEP_NUMBERS, Condition, in_order
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
from hardened_ddp.errors import ConfigError, HardenedError, RunFolderError
from hardened_ddp.ranks.launch import environment
from hardened_ddp.reporting.run_json import Json, read_lines
from hardened_ddp.reporting.summary import finished_at
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, SAVED_SETTINGS, find_folder
from hardened_ddp.settings.record import read_back, yaml_word
from hardened_ddp.settings.typed_command import SCRIPT, own_command, torchrun_words
from hardened_ddp.settings.wording import counted

PLAN = "HARDENED_DDP_REPLAY"
"""The variable that names the plan to a rank."""

_SHOWN = 10
# WHY so long: a rank that hangs is ended by the trainer itself. This is for a launcher that hangs.
_LIMIT_S, _TIMED_OUT = 24 * 3600, 124
# What a replay writes, and where it runs, is its own.
_OF_REPLAY = "--tracker=none --no_ledger --time_limit= --on_event= --checkpoint_every_steps=0"
_OF_REPLAY += " --checkpoint_every_epochs=0"
_OF_MACHINE = ("--single_gpu", "--cpu_only", "--backend", "--timeout_s")
_OF_ONE_START = ("--resume", "--run_name", "--output_dir")


@dataclass(kw_only=True)
class Wish:
    """What is asked of a replay."""

    step: int
    ranks: int = 0
    """0: as many as then."""

    flags: Sequence[str] = ()
    """More settings, such as --deterministic."""

    open: int | None = None
    without: Sequence[int] = ()
    debug: bool = False
    checks_code: bool = True
    when: str = ""
    """A condition, where the replay ends before the step. Empty: the step is looked at."""

    first: int | None = None
    """Begin at a checkpoint of this step or before; None: at the newest before the step."""

    blames: bool = False
    """Find what makes the condition hold, among the steps from first on."""


@dataclass(kw_only=True)
class Replayed:
    """What a replay has shown."""

    folder: Path
    begun_at: int
    equal: int
    parted: tuple[int, str] | None
    """The first step that differs from its record, and in what."""

    verdict: str
    """Which steps are equal, and what that means."""

    found: list[Json]
    """Of each rank."""

    @property
    def main(self) -> Json:
        return self.found[0] if self.found else {}


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
    print("\n".join(told(run, wish, done)), file=output)
    return int(done.parted is not None)


def whole(text: str, name: str) -> int:
    """Read a whole number. Raises ConfigError."""
    if not text.strip().isdecimal():
        fix = own_command("replay", "--help")
        raise ConfigError(f"--{name}: found {text!r}, needs a whole number", fix=fix)
    return int(text)


def replay(run: Path, wish: Wish, *, output: TextIO) -> Replayed:
    """Do the steps up to the one of a wish again. Raises HardenedError."""
    digests = read_digests(run)
    newest = max(digests.steps)
    if wish.step > newest + 1:  # the one after the last may have failed
        raise _no_step(run, wish.step, newest)
    begin = wish.step if wish.first is None else wish.first
    found, rejected = find_newest(run / CHECKPOINTS_NAME, at_most=begin)
    if found is None and 0 not in digests.steps:
        raise RunFolderError(
            f"{run} has no checkpoint from before step {begin}, and no digests from step 0 on",
            fix="; ".join(map(str, rejected))
            or "name a later step; --keep_milestones keeps checkpoints of the whole run",
        )
    first = 0 if found is None else found.step
    folder = _make_folder(run, wish.step)
    number = counted(wish.step - first + 1, "step")
    begun = f"the checkpoint of step {first}" if found else "the seed"
    print(f"replaying {number} of {run}, from {begun}", file=output, flush=True)
    for facts, begin, end in _segments(digests, first, wish.step):
        _prepare(run, folder, facts, found if begin == first else None, wish.ranks)
        plan = _plan(digests, facts, wish, end)
        if wish.blames:  # within one start, so that a trial can begin there
            plan["tries_from"] = max(wish.first or 0, begin)
            plan["when"] = wish.when if end == wish.step else ""
        _train(folder, plan, wish)
        left = json.loads((folder / "replayed-rank-0.json").read_text(encoding="utf-8"))
        if left["held_at"] is not None:
            break
    done = _compare(digests, folder, wish, first)
    if wish.step > newest and "newest" not in done.main:
        raise _no_step(run, wish.step, newest)
    return done


def _no_step(run: Path, step: int, last: int) -> ConfigError:
    problem = f"{run} has no step {step}: the last one is {last}"
    if any(saved > last + 1 for saved in list_steps(run / CHECKPOINTS_NAME)):
        problem = (
            f"{run} left no digest of step {step}: they end at step {last}, as --digests auto "
        )
        problem += "does where they take more than 1.5 % of a step (train with --digests on)"
    return ConfigError(problem, fix=own_command("replay", run, "--step", str(last)))


def _make_folder(run: Path, step: int) -> Path:
    """Make the folder of a replay, within the run: an older one of this step is replaced."""
    folder = run / "replays" / f"step-{step}"
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        problem = f"{folder} can't be made: {error}"
        raise RunFolderError(problem, fix="copy the run first") from error
    return folder


def _segments(digests: Digests, first: int, last: int) -> list[tuple[Json, int, int]]:
    """Cut the way into parts that one start of the trainer can do: (its facts, from, to)."""

    def shape(facts: Json) -> list[Any]:  # Any: JSON
        settings = {n: v for n, v in facts["settings"].items() if n not in _OF_ONE_START}
        return [settings, *(facts[name] for name in ("world_size", "threads", "global_batch"))]

    parts: list[tuple[Json, int, int]] = []
    facts = digests.facts_at(first if first in digests.steps else last)
    for step in range(first, last + 1):
        facts = digests.steps[step].facts if step in digests.steps else facts
        if parts and shape(parts[-1][0]) == shape(facts):
            parts[-1] = (*parts[-1][:2], step)
        else:
            parts.append((facts, step, step))
    return parts


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
        with contextlib.suppress(KeyError, TypeError, ValueError):
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


def _train(folder: Path, plan: Json, wish: Wish) -> None:
    """Start the trainer on the steps of a plan. Raises the error that it ended with."""
    path, log, facts = folder / "plan.json", folder / "replay.log", plan["facts"]
    path.write_text(json.dumps(plan), encoding="utf-8")
    argv = ["--output_dir", str(folder.parent), "--run_name", folder.name]
    for name in _OF_MACHINE:
        argv.append(f"{name}={str(json.loads(facts['settings'][name])).lower()}")
    own = {PLAN: str(path.resolve()), "OMP_NUM_THREADS": str(facts["threads"])}
    env = {**facts.get("variables", {}), **own}
    argv += [*_OF_REPLAY.split(), *wish.flags]
    if status := run_trainer(argv, wish.ranks or facts["world_size"], env, log):
        raise _error_of(log, status)


def run_trainer(argv: Sequence[str], ranks: int, env: Mapping[str, str], log: Path) -> int:
    """Run the trainer on this machine; return its status. Its output is added to a log."""
    words = [sys.executable]
    if ranks > 1:
        words = [*torchrun_words(), "--standalone", f"--nproc_per_node={ranks}"]
    with log.open("ab") as file, contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(
            [*words, str(SCRIPT), *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**environment(), **env},
            timeout=_LIMIT_S,
        ).returncode
    return _TIMED_OUT


def _error_of(log: Path, status: int) -> HardenedError:
    text = log.read_text(encoding="utf-8", errors="replace")
    what, has_fix, rest = text.rpartition("[DDP-")[2].partition("] ")[2].partition("\n  next: ")
    if not has_fix:
        why = f"the replay ended with status {status}"
        return RunFolderError(why, fix=own_command("explain", log))
    return ConfigError(f"the replay can't be done: {what}", fix=rest.partition("\n")[0])


def _compare(digests: Digests, folder: Path, wish: Wish, first: int) -> Replayed:
    """Compare what the replay left with the records of the run."""
    again, owner = read_digests(folder, may_be_empty=True), digests.facts_at(wish.step)
    left = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("replayed-rank-*"))]
    found = [dict(json.loads(text)) for text in left]
    equal, missing, largest = 0, 0, 0.0
    parted: tuple[int, str] | None = None
    for number, mine in again.steps.items():
        if (then := digests.steps.get(number)) is None:
            missing += 1
            continue
        off = abs(mine.loss - then.loss)
        if then.loss and math.isfinite(then.loss):
            largest = max(largest, off / abs(then.loss))
        what = then.parts_from(mine)
        if what == "ranks":  # rounded otherwise
            what = "" if off <= 1e-3 * max(1.0, abs(then.loss)) else "loss"
        equal += not what
        parted = parted or ((number, what) if what else None)
    steps = counted(equal, "step")
    more = f"; {counted(missing, 'step')} left no digest" if missing else ""
    ranks, at_that_time = wish.ranks or owner["world_size"], owner["world_size"]
    if parted is not None:
        at, name = parted
        why = "Where the device is not deterministic, train and replay with --deterministic"
        if name == "data":
            why = "The dataset gives other samples now: it was changed, or a sample depends on more"
            why += " than its index, the seed and the epoch"
        text = f"equality ended at step {at}: its {name} differs from what the run recorded; "
        text += f"{steps} equal. What follows of steps from {at} on is not what the run did. {why}"
    elif ranks != at_that_time:
        text = f"on {ranks} instead of {counted(at_that_time, 'rank')}: the same samples and the "
        text += f"same mean, added up in another order: {steps} with the same loss up to rounding "
        text += f"(largest difference {largest:.1g})"
    else:
        share = "a sixteenth of the gradient in each (16 steps take it all)"
        share = "all of the gradient" if owner["parts"] == 1 else share
        text = f"{steps} equal bit for bit: samples, loss, {share}"
    now = found[0]["facts"] if found else owner
    if unlike := other_machine(owner, now) + differing(owner, now, ["data"]):
        more += f"\n  then and now differ: {'; '.join(unlike)}"
    return Replayed(
        folder=folder, begun_at=first, equal=equal, parted=parted, verdict=text + more, found=found
    )


def told(run: Path, wish: Wish, done: Replayed) -> list[str]:
    """Say what a replay has shown, one line after the other."""
    lines, step = [done.verdict], done.main.get("newest")
    if step is None or step["step"] != wish.step:
        return lines
    if step["error"]:
        lines.append(f"step {wish.step} fails: {step['error']}")
    else:
        layers = sorted(step["layers"].items(), key=lambda pair: -pair[1])[:_SHOWN]
        lines += [
            f"step {wish.step}: loss {step['loss']:.6g}, gradient norm {step['grad_norm']:.4g}, "
            f"learning rate {step['lr']:.3g}",
            "  gradient norm by layer: " + ", ".join(f"{name} {n:.3g}" for name, n in layers),
        ]
    rows = [row for rank in done.found for row in rank["samples"]]
    lines += sample_lines(rows)
    if opened := done.main.get("opened"):
        place = opened["file"] or "no file: it is what the dataset gives for this index"
        lines += [f"sample {wish.open}: {place}", *(f"  {part}" for part in opened["parts"])]
    if gone := sorted({*wish.without} - {row["sample"] for row in rows}):
        lines.append(f"not among the samples of step {wish.step}: {', '.join(map(str, gone))}")
    lines += _changes(done.main["trials"], wish.step)
    if rows:
        worst = str(in_order(rows)[0]["sample"])
        again = ("replay", run, "--step", str(wish.step))
        lines.append(f"look at it:      {own_command(*again, '--open', worst)}")
        lines.append(f"do without it:   {own_command(*again, '--without', worst)}")
    return [*lines, f"state after it:  {done.folder}"]


def sample_lines(rows: Sequence[Json]) -> list[str]:
    """List the samples that weigh most."""
    if not rows:
        return []
    has_change = any("change" in row for row in rows)
    why = "the gradient without each of them" if has_change else "gradient norm"
    title = "  sample  rank        loss  gradient norm" + "  without it" * has_change + "  file"
    lines = [f"samples that weigh most, of {len(rows)}, by {why}:", title]
    for row in in_order(rows)[:_SHOWN]:
        line = f"  {row['sample']:6}  {row['rank']:4}  {row['loss']:10.5g}  {row['norm']:13.5g}"
        line += f"  {row.get('change', math.nan):10.4g}" if has_change else ""
        lines.append(f"{line}  {row['file'] or row.get('problem', '')}".rstrip())
    worst = max(rows, key=lambda row: math.inf if math.isnan(row["loss"]) else row["loss"])
    return [*lines, f"  the largest loss: sample {worst['sample']}, {worst['loss']:.5g}"]


def _changes(trials: Sequence[Json], step: int) -> list[str]:
    if not trials:
        return []
    gone = ", ".join(map(str, trials[1]["without"]))
    lines = [f"without sample {gone}:  loss with and without; gradient norm with and without"]
    for one, two in zip(trials[0]["steps"], trials[1]["steps"], strict=False):
        lines.append(
            f"  step {one['step']}:  {one['loss']:.6g} and {two['loss']:.6g};  "
            f"{one['grad_norm']:.4g} and {two['grad_norm']:.4g}"
        )
        sides = ("with", one["error"]), ("without", two["error"])
        lines += [f"    {side}: {error}" for side, error in sides if error]
    return [*lines, "  A model with dropout draws other masks for the rows that are left."]


def run_bisect(options: Mapping[str, str], flags: Sequence[str], *, output: TextIO) -> int:
    """Print where a condition holds first, and why. Raises HardenedError."""
    run = find_folder(options["run"], Path("runs"))
    condition = Condition.parse(options["when"])
    horizon = whole(options["horizon"], "horizon")
    wish = Wish(step=0, when=condition.text, flags=flags, checks_code=not options["any_code"])
    digests = read_digests(run)
    if condition.name not in (*STEP_NUMBERS, "weights"):
        return _tell_metric(run, condition, output)
    step, how = first_step(digests, condition, wish, output)
    if step is None:
        print(f"{condition.text} holds at no step: {how}", file=output)
        return 1
    print(f"{condition.text} holds first at step {step}: {how}", file=output, flush=True)
    wish = replace(wish, step=step, first=max(0, step - horizon), blames=True)
    done = replay(run, wish, output=output)
    # where steps differ, what a trial shows is no proof for the run
    lines = blame_lines(run, done) if done.parted is None else [done.verdict]
    print("\n".join(lines), file=output)
    return int(done.parted is not None)


def first_step(
    digests: Digests, condition: Condition, wish: Wish, output: TextIO
) -> tuple[int | None, str]:
    """Return the first step where a condition holds, None if it is none, and how that is known."""
    run, is_finished = digests.run, finished_at(digests.run) is not None
    is_recorded = condition.name in ("loss", "lr")
    if condition.name == "grad_norm":  # else each step has none but those that are reported
        starts = {id(step.facts): step.facts for step in digests.steps.values()}.values()
        clips = [json.loads(facts["settings"]["--clip_grad_norm"]) for facts in starts]
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
    if done.parted is not None:
        return None, f"not known: {done.verdict}"
    return done.main.get("held_at"), f"steps {done.begun_at} to {last} were replayed"


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


def _tell_metric(run: Path, condition: Condition, output: TextIO) -> int:
    """Tell from metrics.jsonl where a metric was first reported so."""
    view = read_run(run)
    steps, values = view.curve(condition.name)
    if not steps:
        names = sorted({name for point in view.points for name in point.values})
        raise ConfigError(
            f"--when: {condition.name} was not recorded",
            fix=f"known: {', '.join([*STEP_NUMBERS, *names])}",
        )
    for before, step, value in zip([0, *steps], steps, values, strict=False):
        if condition.fits(value):
            look = own_command("replay", run, "--step", str(step - 1))
            print(
                f"{condition.text} holds first in the report after step {step}, {value:.6g}; the "
                f"one before was after step {before}\nlook: {look}",
                file=output,
            )
            return 0
    print(f"{condition.text} holds in no report", file=output)
    return 1


def blame_lines(run: Path, done: Replayed) -> list[str]:
    """Say which step and which samples made it so."""
    found = done.main.get("blame")
    if not found:
        return ["replayed, it does not hold: this step is not the same again here"]
    guilty = found["step"]
    if guilty is None:
        return [
            "none of these steps alone makes it so: without any one of them it still holds; "
            "a larger --horizon looks further back"
        ]
    samples = found["alone"] or found["together"]
    how = " together" if not found["alone"] else " (each alone)" if len(samples) > 1 else ""
    names = f"sample{'s' * bool(found['together'])} {', '.join(map(str, samples))}{how}"
    proof = f"proved: step {guilty} without {names} does not lead to it"
    if not samples:
        proof = "no few of its samples are to blame: the whole step is, such as its rate"
    lines = [f"without step {guilty} it does not hold ({found['trials']} trials)", proof]
    more = ["--open", str(samples[0])] if samples else []
    look = own_command("replay", run, "--step", str(guilty), *more)
    return [*lines, *sample_lines(found["rows"]), f"look at it: {look}"]
