"""The commands replay, bisect and diff: steps of a run again, exactly, and where two runs part.

replay restores the checkpoint before the step, or begins with the seed, and starts the trainer in a
folder of its own, on as many ranks, with the threads and settings of that time. bisect takes what
the run recorded; binary search over checkpoints, if the condition stays once it holds; else all
steps again. diff trains nothing. What a rank does is in replay_rank.py.
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
from ddp_runs.replay_records import STEP_NUMBERS, Digests, differences, read_digests, side_by_side
from ddp_runs.run_events import FAULTS
from ddp_runs.run_files import read_run
from ddp_runs.tools import as_flag
from hardened_ddp.checkpoint.folder import find_newest, list_steps, load_checkpoint
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.sampler import EpochOrder
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import ANY_FAILURE, ConfigError, RunFolderError
from hardened_ddp.ranks.launch import environment
from hardened_ddp.reporting.run_json import Json, read_lines
from hardened_ddp.settings.cli import Request
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, SAVED_SETTINGS, find_folder
from hardened_ddp.settings.layers import resolve
from hardened_ddp.settings.typed_command import SCRIPT, own_command, torchrun_words
from hardened_ddp.settings.wording import counted, listed
from hardened_ddp.step.records import hash_of

PLAN = "HARDENED_DDP_REPLAY"  # the variable that names the plan to a rank
# What a replay writes, and where it runs, is its own. Of each flag the last one counts.
_OF_REPLAY = "--resume=auto --tracker=none --mirror= --ledger=false --time_limit= --on_event= "
_OF_REPLAY += "--checkpoint_every_steps=0 --checkpoint_every_epochs=0"

_PARTED = {
    "samples": "it takes other samples",
    "left out": "one run left it out: see skipped_samples.jsonl",
    "data": "the same samples, of other bytes",
    "ranks": "the same samples on other ranks: added up in another order, with other dropout",
    "loss": "the same samples, of the same bytes, give another loss",
    "gradient": "the same loss, another gradient",
}
_NOTHING = "nothing recorded differs: a device that is not deterministic (see --deterministic)?"


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
    told = done["verdict"], *done["lines"], f"state after it: {done['folder']}"
    print(*told, sep="\n", file=output)
    return int(bool(done["parted"]))


def replay(run: Path, wish: Wish, *, output: TextIO) -> Json:
    """Do the steps up to the one of a wish again. Raises HardenedError.

    Returned is what replay_rank.py has found, and: folder; begun_at, a step; equal, how many steps
    are; parted, the first step that is not, and in what; verdict, what that means.
    """
    digests, at_most = read_digests(run), min(wish.first, wish.step)
    newest = max(digests.steps)
    text = f"{run} has no step {wish.step} with a digest: the last one is {newest}"
    missing = ConfigError(text, fix=own_command("replay", run, "--step", str(newest)))
    if wish.step > digests.last:
        raise missing
    found, _ = find_newest(run / CHECKPOINTS_NAME, at_most=at_most)
    if found is None and 0 not in digests.steps:
        text = f"{run} has no valid checkpoint from before step {at_most}, and no digest of step 0"
        fix = "name a later step; --keep_milestones keeps checkpoints of the whole run"
        raise RunFolderError(text, fix=fix)
    first, folder = found.step if found else 0, run / "replays" / f"step-{wish.step}"
    print(f"replaying steps {first} to {wish.step} of {run}", file=output, flush=True)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / CHECKPOINTS_NAME).mkdir(parents=True)
        shutil.copy(run / SAVED_SETTINGS, folder)
        if found is not None:
            shutil.copytree(found.path, folder / CHECKPOINTS_NAME / found.path.name)
        # one start of the trainer for those of the run that were alike
        for _, alike in groupby(range(first, wish.step + 1), digests.shape_at):
            done = _train(folder, digests, wish, [*alike])
            if done["held_at"] is not None:
                break
    except OSError as error:
        raise RunFolderError(f"{folder}: {error}", fix="copy the run first") from error
    if not (wish.when or done["lines"]):  # the run was killed after its last step
        raise missing
    return done | {"folder": folder, "begun_at": first} | _compare(digests, folder, done["facts"])


def _train(folder: Path, digests: Digests, wish: Wish, steps: Sequence[int]) -> Json:
    """Have one start of the trainer do steps; return what it found. Raises what ended it."""
    path, log, facts = folder / "plan.json", folder / "replay.log", digests.facts_at(steps[0])
    records = [digests.steps[step].main for step in steps if step in digests.steps]
    entries = read_lines(digests.run / "skipped_samples.jsonl", [])
    first = max(wish.first, steps[0]) if wish.blames else wish.step if wish.without else None
    plan = asdict(wish) | {
        "tries_from": first,
        "last": steps[-1],
        "code": facts["code"] if wish.checks_code else {},
        "limits": {record.step: record.limit for record in records},
        "left_out": [[entry["step"], entry["index"]] for entry in entries if "index" in entry],
        "given_up": [record.step for record in records if record.left_out],
    }
    path.write_text(json.dumps(plan), encoding="utf-8")
    argv = [as_flag(name, json.loads(text)) for name, text in facts["settings"].items()]
    if wish.ranks not in (0, facts["world_size"]):
        argv.append(f"--global_batch_size={facts['global_batch']}")
    argv += [*_OF_REPLAY.split(), f"--output_dir={folder.parent}", f"--run_name={folder.name}"]
    argv += wish.flags
    env = {PLAN: str(path.resolve()), "OMP_NUM_THREADS": str(facts["threads"])}
    if status := run_trainer(argv, wish.ranks or facts["world_size"], env, log):
        text = log.read_text(encoding="utf-8", errors="replace")
        why = re.findall(r"\[DDP-\w+\] (.*)", text) or [f"its status is {status}"]
        raise ConfigError(f"the replay can't be done: {why[-1]}", fix=own_command("explain", log))
    return dict(json.loads((folder / "replayed.json").read_text(encoding="utf-8")))


def run_trainer(argv: Sequence[str], ranks: int, env: Mapping[str, str], log: Path) -> int:
    """Run the trainer on this machine; return its status. Its output is added to a log."""
    words = [*torchrun_words(), "--standalone", f"--nproc_per_node={ranks}"]
    words = [*(words if ranks > 1 else [sys.executable]), str(SCRIPT), *argv]
    null, both, own = subprocess.DEVNULL, subprocess.STDOUT, {**environment(), **env}
    with log.open("ab") as file:
        return subprocess.run(words, stdin=null, stdout=file, stderr=both, env=own).returncode


def _compare(digests: Digests, folder: Path, now: Json) -> Json:
    """Compare a replay with the records of the run."""
    shared, at, what = digests.parting(read_digests(folder, may_be_empty=True), rounds=True)
    then, equal = digests.facts_at(at), shared.index(at) if what else len(shared)
    steps = counted(equal, "step")
    if what:
        text = f"equality ended at step {at}: its {what} differs from what the run recorded; "
        text += f"{steps} equal. What follows of steps from {at} on is not what the run did. If "
        text += "the data is as it was: train and replay with --deterministic"
    elif then["world_size"] != now["world_size"]:
        text = f"on {now['world_size']} instead of {counted(then['world_size'], 'rank')}: the same "
        text += f"samples, added up in another order: {steps} with the same loss up to rounding"
    else:
        share = "all" if then["settings"]["--digests"] == '"on"' else "in each step a share"
        text = f"{steps} equal bit for bit: samples, loss, {share} of the gradient"
    unlike = differences(then, now)
    if names := unlike["machine"] + unlike["data"]:
        text += f"\n  then and now differ: {'; '.join(names)}"
    return {"equal": equal, "parted": (at, what) if what else None, "verdict": text}


def run_bisect(options: Mapping[str, str], flags: Sequence[str], *, output: TextIO) -> int:
    """Print where a condition holds first, and why. Raises HardenedError."""
    run = find_folder(options["run"], Path("runs"))
    when, horizon = options["when"].strip(), whole(options["horizon"], "horizon")
    wish = Wish(step=0, when=when, flags=flags, checks_code=not options["any_code"])
    step, how = _first_step(read_digests(run), wish, output)
    holds = "holds at no step" if step is None else f"holds first at step {step}"
    print(f"{when} {holds}: {how}", file=output, flush=True)
    if step is None or Condition.parse(when).name not in (*STEP_NUMBERS, "weights"):
        return int(step is None)
    wish = replace(wish, step=step, first=max(0, step - horizon), blames=True)
    done = replay(run, wish, output=output)
    if done["parted"]:  # then what a trial shows is no proof for the run
        done["lines"] = []
    return show(done, output)


def _first_step(digests: Digests, wish: Wish, output: TextIO) -> tuple[int | None, str]:
    """Find the first step where a condition holds; say how that is known. Raises HardenedError."""
    run, condition, records = digests.run, Condition.parse(wish.when), list[Json]()
    name = condition.name
    if is_metric := name not in (*STEP_NUMBERS, "weights"):
        view = read_run(run)
        records = [{"step": s, name: value} for s, value in zip(*view.curve(name), strict=True)]
        if not records:
            known = sorted({*STEP_NUMBERS, *(each for p in view.points for each in p.values)})
            raise ConfigError(f"--when: {name} was not recorded", fix=f"known: {', '.join(known)}")
    # without clipping each step has no norm but those that are reported
    clips = [json.loads(facts["settings"]["--clip_grad_norm"]) for facts in digests.starts]
    if name in ("loss", "lr") or (name == "grad_norm" and min(clips) > 0):
        records = [step.numbers for step in digests.steps.values()]
    if held := [each["step"] for each in records if condition.holds(each)]:
        return held[0], "by a report up to it" if is_metric else "recorded when it was done"
    begin, end = digests.last if records else 0, digests.last
    if is_metric or (records and end in digests.steps):
        return None, f"by {counted(len(records), 'report' if is_metric else 'record')}"
    if name == "weights" and not condition.op:  # NaN in them never goes away
        begin, end = _between_checkpoints(run, end)
        if begin > end:
            return None, f"the checkpoint of step {begin}, the last one, has none"
    done = replay(run, replace(wish, first=begin, step=end), output=output)
    if done["parted"]:
        return None, f"not known: {done['verdict']}"
    return done["held_at"], f"steps {done['begun_at']} to {end} were replayed"


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
        weights = load_checkpoint(found, names=names)[0].values()
        return not all(bool(t.isfinite().all()) for t in weights if t.is_floating_point())

    at = bisect_left(steps, True, key=has_nan)
    return steps[at - 1] if at else 0, steps[at] - 1 if at < len(steps) else last


def run_diff(options: Mapping[str, str], *, output: TextIO) -> int:
    """Print where two runs part; return 0 if they do nowhere, else 1. Raises RunFolderError."""
    names = options["run"].splitlines()
    if len(names) != 2:
        raise ConfigError(f"diff compares two runs, found {len(names)}", fix="name two run folders")
    folders = [find_folder(name, Path("runs")) for name in names]
    one, two = map(read_digests, folders)
    shared, step, what = one.parting(two)
    if not shared:
        spans = [f"{min(digests.steps)} to {max(digests.steps)}" for digests in (one, two)]
        text = f"no step has digests in both runs: one has those of {', the other '.join(spans)}"
        raise RunFolderError(text, fix="compare runs that did the same steps")
    a, b = one.facts_at(step), two.facts_at(step)
    unlike = differences(a, b)
    faults = [sum(event.kind in FAULTS for event in read_run(folder).events) for folder in folders]
    lines = [f"{name + ':':10}{listed(found) or 'the same'}" for name, found in unlike.items()]
    lines.append(f"{'faults:':10}{faults[0]} in the first run, {faults[1]} in the second")
    if not what:
        lines.append(f"equal in all {counted(len(shared), 'step')} that both have")
    else:
        orders = [(facts["settings"].get("--seed"), facts.get("num_samples")) for facts in (a, b)]
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
    if "is_drawn" in facts or "num_samples" not in facts:
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
            batches = [fetcher[(0, torch.tensor([index]))] for fetcher in fetchers]
            if hash_of(batches[:1]) != hash_of(batches[1:]):
                files = [fetcher.name_of(index) for fetcher in fetchers]
                found.append(f"{index} ({' / '.join(files)})" if any(files) else str(index))
    except ANY_FAILURE as error:  # WHY broad: the user's dataset
        why = f"the samples can't be read again: {error}"
    unknown = [f"{why}; it is some of samples {listed(taken)}"]
    return [f"sample {name} differs" for name in found[:8]] or unknown
