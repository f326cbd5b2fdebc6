"""The commands replay, bisect and diff: steps of a run again, exactly, and where two runs part.

replay restores the checkpoint before the step, or begins with the seed, and starts the trainer in a
folder of its own, on as many ranks, with the threads and settings of that time; where the run was
resized on the way, one start follows the other. Then it compares the digests of all those steps.
bisect finds the first step where a condition holds, from what the run recorded; by binary search
over the checkpoints, if the condition stays once it holds; else by doing the steps again. Then it
does the steps without some samples, also those before it: damage may show some steps later.
diff trains nothing. Where the samples are the same and their bytes are not, it reads the samples of
that step again from both datasets, and names those that differ.
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
from typing import TextIO

import torch

from ddp_runs.replay_rank import Condition
from ddp_runs.replay_records import (
    STEP_NUMBERS,
    Digests,
    differences,
    first_parting,
    read_digests,
    side_by_side,
)
from ddp_runs.run_events import FAULTS
from ddp_runs.run_files import read_run
from hardened_ddp.checkpoint.folder import (
    find_newest,
    list_steps,
    load_checkpoint,
    step_folder_name,
)
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.data.batches.sampler import EpochOrder
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import ANY_FAILURE, ConfigError, RunFolderError
from hardened_ddp.ranks.launch import environment
from hardened_ddp.reporting.run_json import Json, read_lines
from hardened_ddp.settings.cli import Request
from hardened_ddp.settings.earlier_run import (
    CHECKPOINTS_NAME,
    SAVED_SETTINGS,
    WHICH_RUN,
    find_folder,
)
from hardened_ddp.settings.layers import resolve
from hardened_ddp.settings.record import yaml_word
from hardened_ddp.settings.typed_command import SCRIPT, own_command, torchrun_words
from hardened_ddp.settings.wording import counted, listed

PLAN = "HARDENED_DDP_REPLAY"
"""The variable that names the plan to a rank."""

# What a replay writes, and where it runs, is its own.
_OF_REPLAY = "--tracker=none --ledger=false --time_limit= --on_event= --checkpoint_every_steps=0"
_OF_REPLAY += " --checkpoint_every_epochs=0"

_PARTED = {
    "samples": "it takes other samples",
    "left out": "one run left it out: see skipped_samples.jsonl",
    "data": "the same samples, of other bytes",
    "ranks": "the same samples on another number of ranks, so the same sums are added up in "
    "another order; what a model draws, such as dropout, follows from the rank",
    "loss": "the same samples, of the same bytes, give another loss",
    "gradient": "the same loss, another gradient",
}
_NOTHING = "nothing recorded differs: a device that is not deterministic (train both with "
_NOTHING += "--deterministic), or what is not recorded"


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
    first: int = sys.maxsize  # begin at a checkpoint of it or before, and of the step at most
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
    return show(replay(run, wish, output=output), output)


def whole(text: str, name: str) -> int:
    """Read a whole number. Raises ConfigError."""
    if not text.strip().isdecimal():
        fix = own_command("replay", "--help")
        raise ConfigError(f"--{name}: found {text!r}, needs a whole number", fix=fix)
    return int(text)


def show(done: Json, output: TextIO) -> int:
    """Print what a replay has shown; return 0 if all of it is as it was, else 1."""
    lines = [done["verdict"], *done["lines"], f"state after it: {done['folder']}"]
    print("\n".join(lines), file=output)
    return int(bool(done["parted"]))


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
    if wish.step > digests.last:
        raise missing
    found, _ = find_newest(run / CHECKPOINTS_NAME, at_most=min(wish.first, wish.step))
    if found is None and 0 not in digests.steps:
        problem = f"{run} has no valid checkpoint from before step {min(wish.first, wish.step)}, "
        fix = "name a later step; --keep_milestones keeps checkpoints of the whole run"
        raise RunFolderError(f"{problem}and no digests from step 0 on", fix=fix)
    first = 0 if found is None else found.step
    folder, done = run / "replays" / f"step-{wish.step}", Json()
    number = counted(wish.step - first + 1, "step")
    begun = f"the checkpoint of step {first}" if found else "the seed"
    print(f"replaying {number} of {run}, from {begun}", file=output, flush=True)
    root = folder / CHECKPOINTS_NAME
    # one start of the trainer for those of the run that were alike
    starts = groupby(range(first, wish.step + 1), lambda step: _shape(digests.facts_at(step)))
    try:
        shutil.rmtree(folder, ignore_errors=True)
        root.mkdir(parents=True)
        shutil.copy(run / SAVED_SETTINGS, folder)
        if found is not None:
            shutil.copytree(found.path, root / step_folder_name(found.step))
        for _, steps in starts:
            begin, *_, end = [*steps] * 2  # the first and the last one, which may be the same
            done = _train(folder, _plan(digests, wish, begin, end), wish)
            if done["held_at"] is not None:
                break
    except OSError as error:
        raise RunFolderError(f"{folder}: {error}", fix="copy the run first") from error
    if not (wish.when or done["lines"]):  # the run was killed after its last step
        raise missing
    return done | {"folder": folder, "begun_at": first} | _compare(digests, folder, done["facts"])


def _shape(facts: Json) -> list[object]:
    """Give what is the same all along one start of the trainer."""
    settings = {n: text for n, text in facts["settings"].items() if n[2:] not in WHICH_RUN}
    return [settings, *(facts[name] for name in ("world_size", "threads", "global_batch"))]


def _plan(digests: Digests, wish: Wish, begin: int, end: int) -> Json:
    """Write what replay_rank.py needs to know of the steps from begin to end."""
    steps = [step.main for number, step in digests.steps.items() if number <= end]
    left_out: dict[int, list[int]] = {}
    for entry in read_lines(digests.run / "skipped_samples.jsonl", []):
        if "index" in entry:
            left_out.setdefault(int(entry["step"]), []).append(int(entry["index"]))
    tries_from = max(wish.first, begin) if wish.blames else wish.step if wish.without else None
    return {
        **asdict(wish),
        "tries_from": tries_from,
        "last": end,
        "facts": digests.facts_at(begin),
        "limits": {str(record.step): record.limit for record in steps},
        "left_out": left_out,
        "given_up": [record.step for record in steps if record.left_out],
    }


def _train(folder: Path, plan: Json, wish: Wish) -> Json:
    """Have the trainer do the steps of a plan; return what it found. Raises what ended it."""
    path, log, facts = folder / "plan.json", folder / "replay.log", plan["facts"]
    path.write_text(json.dumps(plan), encoding="utf-8")
    then = {name: json.loads(text) for name, text in facts["settings"].items()}
    flags = [as_flag(name, value) for name, value in then.items() if name[2:] not in WHICH_RUN]
    if wish.ranks not in (0, facts["world_size"]):
        flags.append(f"--global_batch_size={facts['global_batch']}")
    flags += [*_OF_REPLAY.split(), *wish.flags]
    given = {flag.partition("=")[0]: flag for flag in flags}  # the last one of a name counts
    argv = ["--output_dir", str(folder.parent), "--run_name", folder.name, *given.values()]
    env = {PLAN: str(path.resolve()), "OMP_NUM_THREADS": str(facts["threads"])}
    if status := run_trainer(argv, wish.ranks or facts["world_size"], env, log):
        text = log.read_text(encoding="utf-8", errors="replace")
        errors = re.findall(r"\[DDP-\w+\] (.*)", text) or [f"its status is {status}"]
        raise ConfigError(
            f"the replay can't be done: {errors[-1]}", fix=own_command("explain", log)
        )
    return dict(json.loads((folder / "replayed.json").read_text(encoding="utf-8")))


def as_flag(name: str, value: object) -> str:
    """Write a setting as a flag of the trainer, which takes text as it is."""
    return f"{name}={value if isinstance(value, str) else yaml_word(value)}"


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


def _compare(digests: Digests, folder: Path, now: Json) -> Json:
    """Compare a replay with the records of the run."""
    again = read_digests(folder, may_be_empty=True)
    shared, at, what = first_parting(digests, again, rounds=True)
    then, equal = digests.facts_at(at), shared.index(at) if what else len(shared)
    steps, ranks = counted(equal, "step"), counted(then["world_size"], "rank")
    if what:
        text = f"equality ended at step {at}: its {what} differs from what the run recorded; "
        text += f"{steps} equal. What follows of steps from {at} on is not what the run did. If "
        text += "the data is as it was: train and replay with --deterministic"
    elif then["world_size"] != now["world_size"]:
        text = f"on {now['world_size']} instead of {ranks}: the same samples and the same mean, "
        text += f"added up in another order: {steps} with the same loss up to rounding"
    else:
        share = "all" if then["parts"] == 1 else "in each step a share"
        text = f"{steps} equal bit for bit: samples, loss, {share} of the gradient"
    unlike = differences(then, now)
    if names := unlike["machine"] + unlike["data"]:
        text += f"\n  then and now differ: {'; '.join(names)}"
    return {"equal": equal, "parted": (at, what) if what else None, "verdict": text}


def run_bisect(options: Mapping[str, str], flags: Sequence[str], *, output: TextIO) -> int:
    """Print where a condition holds first, and why. Raises HardenedError."""
    run = find_folder(options["run"], Path("runs"))
    condition, digests = Condition.parse(options["when"]), read_digests(run)
    horizon = whole(options["horizon"], "horizon")
    wish = Wish(step=0, when=condition.text, flags=flags, checks_code=not options["any_code"])
    is_of_steps = condition.name in (*STEP_NUMBERS, "weights")
    records = _records_of(digests, condition.name)
    step = next((each["step"] for each in records if condition.holds(each)), None)
    how = "recorded when it was done" if is_of_steps else "by a report of the steps up to it"
    if step is None:
        how = f"by {counted(len(records), 'record' if is_of_steps else 'report')}"
        if is_of_steps and not (records and digests.last in digests.steps):
            span = digests.last if records else 0, digests.last
            if condition.name == "weights" and not condition.op:  # NaN in them never goes away
                span = _between_checkpoints(run, digests.last)
            how = f"the checkpoint of step {span[0]}, the last one, has none"
            if span[0] <= span[1]:
                done = replay(run, replace(wish, first=span[0], step=span[1]), output=output)
                step, how = done["held_at"], f"steps {done['begun_at']} to {span[1]} were replayed"
                if done["parted"]:
                    step, how = None, f"not known: {done['verdict']}"
    holds = "holds at no step" if step is None else f"holds first at step {step}"
    print(f"{condition.text} {holds}: {how}", file=output, flush=True)
    if step is None or not is_of_steps:
        return int(step is None)
    wish = replace(wish, step=step, first=max(0, step - horizon), blames=True)
    done = replay(run, wish, output=output)
    if done["parted"]:  # then what a trial shows is no proof for the run
        done["lines"] = []
    return show(done, output)


def _records_of(digests: Digests, name: str) -> Sequence[Json]:
    """List the numbers that the run has recorded, by step. Raises ConfigError for a strange name.

    Empty: of its steps nothing is known, or not of each.
    """
    if name in (*STEP_NUMBERS, "weights"):
        # without clipping each step has no norm but those that are reported
        clips = [json.loads(facts["settings"]["--clip_grad_norm"]) for facts in digests.starts]
        is_known = name in ("loss", "lr") or (name == "grad_norm" and min(clips) > 0)
        return [step.numbers for step in digests.steps.values()] if is_known else []
    view = read_run(digests.run)
    steps, values = view.curve(name)
    if not steps:
        known = sorted({*STEP_NUMBERS, *(name for point in view.points for name in point.values)})
        fix = f"known: {', '.join(known)}"
        raise ConfigError(f"--when: {name} was not recorded", fix=fix)
    return [{"step": step, name: value} for step, value in zip(steps, values, strict=True)]


def _between_checkpoints(run: Path, last: int) -> tuple[int, int]:
    """Return two steps between which weights become NaN, by binary search over checkpoints."""
    root = run / CHECKPOINTS_NAME
    newest, _ = find_newest(root)
    steps = sorted(step for step in list_steps(root) if newest and step <= newest.step)

    def has_nan(step: int) -> bool:
        found, _ = find_newest(root, at_most=step)  # in place of a damaged one that before it
        if found is None:
            return False
        names = [name for name in found.manifest.tensors if name.startswith("model.")]
        tensors = load_checkpoint(found, names=names)[0].values()
        return not all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())

    at = bisect_left(steps, True, key=has_nan)
    return steps[at - 1] if at else 0, steps[at] - 1 if at < len(steps) else last


def run_diff(options: Mapping[str, str], *, output: TextIO) -> int:
    """Print where two runs part; return 0 if they do nowhere, else 1. Raises RunFolderError."""
    names = options["run"].splitlines()
    if len(names) != 2:
        raise ConfigError(f"diff compares two runs, found {len(names)}", fix="name two run folders")
    folders = [find_folder(name, Path("runs")) for name in names]
    one, two = map(read_digests, folders)
    shared, step, what = first_parting(one, two)
    if not shared:
        spans = [f"{min(digests.steps)} to {max(digests.steps)}" for digests in (one, two)]
        raise RunFolderError(
            f"no step has digests in both runs: one has those of {spans[0]}, the other {spans[1]}",
            fix="compare runs that did the same steps",
        )
    a, b = one.facts_at(step), two.facts_at(step)
    unlike = differences(a, b)
    faults = [sum(event.kind in FAULTS for event in read_run(folder).events) for folder in folders]
    lines = [f"{name + ':':10}{listed(found) or 'the same'}" for name, found in unlike.items()]
    lines.append(f"{'faults:':10}{faults[0]} in the first run, {faults[1]} in the second")
    if not what:
        lines.append(f"equal in all {counted(len(shared), 'step')} that both have")
    else:
        orders = [(facts["settings"].get("--seed"), facts["num_samples"]) for facts in (a, b)]
        if what == "data" and orders[0] != orders[1]:  # a place in another order
            what = "samples"
        named = name_samples(one, two, step) if what == "data" else []
        lines.append(f"they part at step {step}: {_PARTED[what]}")
        if not any(unlike.values()) and what in ("loss", "gradient"):
            named = [_NOTHING]
        few = [[d.steps[n].numbers for n in shared if step <= n < step + 3] for d in (one, two)]
        lines += [*(f"  {line}" for line in named), *side_by_side(*few)]
        lines.append(f"look at it: {own_command('replay', folders[0], '--step', str(step))}")
    print("\n".join(lines), file=output)
    return int(bool(what))


def name_samples(one: Digests, two: Digests, step: int) -> list[str]:
    """Name the samples of a step whose bytes differ, by reading them from both datasets again."""
    facts, window = one.facts_at(step), one.steps[step].main
    if not facts["num_samples"]:
        return ["which sample it is, is not known: its order does not follow from the seed"]
    order = EpochOrder(facts["num_samples"], int(facts["settings"]["--seed"]), window.epoch)
    taken = order.take(window.start, window.start + window.size).tolist()
    found, fetchers = [], []
    why = "read again now, both datasets give the same: one of them has changed since its run"
    try:
        for digests in (one, two):
            config = resolve(Request(config_file=str(digests.run / SAVED_SETTINGS))).config
            data = build_data(config.data, leaves_out=True, task=config.task.task, evaluates=False)
            fetchers.append(Fetcher(data.train, seed=config.device.seed))
        for index in taken:
            a, b = (_bytes_of(fetcher, index) for fetcher in fetchers)
            if a != b:
                files = [fetcher.name_of(index) for fetcher in fetchers]
                found.append(f"{index} ({' / '.join(files)})" if any(files) else str(index))
    except ANY_FAILURE as error:  # WHY broad: the user's dataset
        why = f"the samples can't be read again: {error}"
    unknown = [f"{why}; it is some of samples {listed(taken)}"]
    return [f"sample {name} differs" for name in found[:8]] or unknown


def _bytes_of(fetcher: Fetcher, index: int) -> list[bytes]:
    batch = fetcher[(0, torch.tensor([index]))]
    leaves = tensors_of((batch.inputs, batch.targets))
    return [part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in leaves]
