"""The command replay: any step of a run again, exactly, in a folder of its own.

It restores the checkpoint before the step, or begins with the seed, and starts the trainer on as
many ranks, with the threads and settings of that time; where the run was resized on the way, one
start follows the other. Then it compares the digests of all steps on the way.
What a rank does is in replay_rank.py.
"""

import contextlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ddp_runs.replay_records import (
    Digests,
    Start,
    differing,
    in_order,
    other_machine,
    read_digests,
)
from hardened_ddp.checkpoint.folder import Found, find_newest, list_steps, step_folder_name
from hardened_ddp.errors import ConfigError, HardenedError, RunFolderError
from hardened_ddp.ranks.launch import environment
from hardened_ddp.reporting.run_json import read_lines
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, SAVED_SETTINGS, find_folder
from hardened_ddp.settings.record import read_back, yaml_word
from hardened_ddp.settings.typed_command import SCRIPT, own_command, torchrun_words
from hardened_ddp.settings.wording import counted

PLAN = "HARDENED_DDP_REPLAY"
"""The variable that names the plan to a rank."""

FOLDER = "replays"
REPLAYED = "replayed-rank-"
_SHOWN = 10
# WHY so long: a rank that hangs is ended by the trainer itself. This is for a launcher that hangs.
_LIMIT_S, _TIMED_OUT = 24 * 3600, 124
# What a replay writes, and where it runs, is its own.
_OF_REPLAY = "--tracker=none --no_ledger --time_limit= --on_event= --checkpoint_every_steps=0"
_OF_REPLAY += " --checkpoint_every_epochs=0"
_OF_MACHINE = ("--single_gpu", "--cpu_only", "--backend", "--timeout_s")

Json = dict[str, Any]  # Any: JSON


@dataclass(kw_only=True)
class Wish:
    """What is asked of a replay."""

    step: int
    ranks: int = 0
    """0: as many as then."""

    flags: Sequence[str] = ()
    """More settings, such as --deterministic."""

    detail: int | None = None
    open: int | None = None
    without: Sequence[int] = ()
    horizon: int = 3
    debug: bool = False
    checks_code: bool = True
    when: str = ""
    blame_from: int | None = None
    first: int | None = None
    """Begin at a checkpoint of this step or before; None: at the newest before the step."""


@dataclass(kw_only=True)
class Replayed:
    """What a replay has shown."""

    folder: Path
    begun_at: int
    ranks: int
    owner: Start
    equal: int
    parted: tuple[int, str] | None
    """The first step that differs from its record, and in what."""

    missing: int
    largest: float
    """The largest relative difference of a loss."""

    found: list[Json]
    """Of each rank."""

    facts: list[str]
    """How this machine differs from that of then."""

    @property
    def main(self) -> Json:
        return self.found[0] if self.found else {}


def run_replay(options: Mapping[str, str], flags: Sequence[str], *, output: TextIO) -> int:
    """Do a step again, and print what it was. Raises HardenedError."""
    run = find_folder(options["run"], Path("runs"))
    step = whole(options["step"], "step")
    wish = Wish(
        step=step,
        detail=step,
        ranks=whole(options["ranks"] or "0", "ranks"),
        flags=flags,
        open=whole(options["open"], "open") if options["open"] else None,
        without=[whole(word, "without") for word in options["without"].split(",") if word],
        debug=bool(options["debug_on"]),
        checks_code=not options["any_code"],
    )
    done = replay(run, wish, output=output)
    print("\n".join(told(run, wish, done)), file=output)
    return 0 if done.parted is None else 1


def whole(text: str, name: str) -> int:
    """Read a whole number. Raises ConfigError."""
    if not text.strip().isdecimal():
        raise ConfigError(
            f"--{name}: found {text!r}, needs a whole number", fix=own_command("replay", "--help")
        )
    return int(text)


def replay(run: Path, wish: Wish, *, output: TextIO) -> Replayed:
    """Do the steps up to the one of a wish again. Raises HardenedError."""
    digests = read_digests(run)
    known = digests.numbers()
    if wish.step > known[-1] + 1:  # the one after the last may have failed
        raise _no_step(run, wish.step, known[-1])
    owner = digests.owner(wish.step) or digests.starts[-1]
    begin = wish.step if wish.first is None else wish.first
    found, rejected = find_newest(run / CHECKPOINTS_NAME, at_most=begin)
    if found is None and (digests.starts[0].first > 0 or digests.owner(0) is None):
        raise RunFolderError(
            f"{run} has no checkpoint from before step {begin}, and no digests from step 0 on",
            fix="; ".join(map(str, rejected))
            or "name a later step; --keep_milestones keeps checkpoints of the whole run",
        )
    first = 0 if found is None else found.step
    folder = _make_folder(run, wish.step)
    print(
        f"replaying {counted(wish.step - first + 1, 'step')} of {run}, from "
        + (f"the checkpoint of step {first}" if found else "the seed"),
        file=output,
        flush=True,
    )
    parts = _segments(digests, first, wish.step, owner)
    for start, begin, end in parts:
        _prepare(run, folder, start, found if begin == first else None, wish.ranks)
        plan = _plan(digests, start, wish, end)
        if wish.blame_from is not None:  # within one start, so that a trial can begin there
            plan["blame_from"] = max(wish.blame_from, begin)
            plan["when"] = wish.when if end == wish.step else ""
        _train(folder, plan, start, wish)
        if json.loads((folder / f"{REPLAYED}0.json").read_text(encoding="utf-8"))["held_at"]:
            break
    done = _compare(digests, folder, wish, owner, first)
    if wish.step > known[-1] and not (done.main.get("step") or done.main.get("newest")):
        raise _no_step(run, wish.step, known[-1])
    return done


def _no_step(run: Path, step: int, last: int) -> ConfigError:
    if any(saved > last + 1 for saved in list_steps(run / CHECKPOINTS_NAME)):
        return ConfigError(
            f"{run} left no digest of step {step}: they end at step {last}, as --digests auto does "
            "where they take more than 1.5 % of a step",
            fix=f"train with --digests on: {own_command('--digests', 'on')}",
        )
    return ConfigError(
        f"{run} has no step {step}: the last one is {last}",
        fix=own_command("replay", run, "--step", str(last)),
    )


def _make_folder(run: Path, step: int) -> Path:
    """Make the folder of a replay, within the run: an older one of this step is replaced."""
    folder = run / FOLDER / f"step-{step}"
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        problem = f"{folder} can't be made: {error}"
        raise RunFolderError(problem, fix="copy the run first") from error
    return folder


def _segments(
    digests: Digests, first: int, last: int, owner: Start
) -> list[tuple[Start, int, int]]:
    """Cut the way into parts that one start of the trainer can do: (its facts, from, to)."""
    parts: list[tuple[Start, int, int]] = []
    for step in range(first, last + 1):
        start = digests.owner(step) or (parts[-1][0] if parts else owner)
        if parts and _are_alike(parts[-1][0], start):
            parts[-1] = parts[-1][0], parts[-1][1], step
        else:
            parts.append((start, step, step))
    return parts


def _are_alike(one: Start, other: Start) -> bool:
    a, b = one.facts["settings"], other.facts["settings"]
    names = {**a, **b}.keys() - {"--resume", "--run_name", "--output_dir"}
    unlike = differing(one.facts, other.facts, ["world_size", "threads", "global_batch"])
    return not unlike and not differing(a, b, names)


def _prepare(run: Path, folder: Path, start: Start, found: Found | None, ranks: int) -> None:
    """Write the settings of a start to the folder, and the checkpoint to begin with."""
    settings = (run / SAVED_SETTINGS).read_text(encoding="utf-8")
    lines = {name: value for name, value, _ in read_back(settings)}
    for name, text in start.facts["settings"].items():
        lines[name.removeprefix("--")] = yaml_word(json.loads(text))
    if found is None and ranks not in (0, start.world_size):
        lines["global_batch_size"] = str(start.facts["global_batch"])
    text = "".join(f"{name}: {value}\n" for name, value in lines.items())
    (folder / SAVED_SETTINGS).write_text(text, encoding="utf-8")
    root = folder / CHECKPOINTS_NAME
    root.mkdir(exist_ok=True)
    if found is not None:
        shutil.copytree(found.path, root / step_folder_name(found.step))


def _plan(digests: Digests, start: Start, wish: Wish, end: int) -> Json:
    """Write down what the ranks do."""
    steps = [step for s in range(end + 1) if (step := digests.step(s)) is not None]
    left_out: dict[int, list[int]] = {}
    problems: list[str] = []
    for entry in read_lines(digests.run / "skipped_samples.jsonl", problems):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            left_out.setdefault(int(entry["step"]), []).append(int(entry["index"]))
    return {
        **asdict(wish),
        "last": end,
        "facts": start.facts,
        "limits": {str(step.number): step.limit for step in steps},
        "left_out": left_out,
        "given_up": [step.number for step in steps if step.is_left_out],
    }


def _train(folder: Path, plan: Json, start: Start, wish: Wish) -> None:
    """Start the trainer on the steps of a plan. Raises the error that it ended with."""
    path, log = folder / "plan.json", folder / "replay.log"
    path.write_text(json.dumps(plan), encoding="utf-8")
    argv = ["--output_dir", str(folder.parent), "--run_name", folder.name]
    for name in _OF_MACHINE:
        argv.append(f"{name}={str(json.loads(start.facts['settings'][name])).lower()}")
    own = {PLAN: str(path.resolve()), "OMP_NUM_THREADS": str(start.facts["threads"])}
    env = {**start.facts.get("variables", {}), **own}
    argv += [*_OF_REPLAY.split(), *wish.flags]
    if status := run_trainer(argv, wish.ranks or start.world_size, env, log):
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
    """Make an error of the last one in a log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    what, has_fix, rest = text.rpartition("[DDP-")[2].partition("] ")[2].partition("\n  next: ")
    if not has_fix:
        return RunFolderError(
            f"the replay ended with status {status}", fix=own_command("explain", log)
        )
    return ConfigError(f"the replay can't be done: {what}", fix=rest.partition("\n")[0])


def _compare(digests: Digests, folder: Path, wish: Wish, owner: Start, first: int) -> Replayed:
    """Compare what the replay left with the records of the run."""
    again = read_digests(folder, may_be_empty=True)
    left = [path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"{REPLAYED}*.json"))]
    found = [dict(json.loads(text)) for text in left]
    ranks = again.starts[-1].world_size if again.starts else owner.world_size
    equal, missing, largest = 0, 0, 0.0
    parted: tuple[int, str] | None = None
    for number in again.numbers():
        mine, then = again.step(number), digests.step(number)
        if mine is None or then is None:
            missing += then is None
            continue
        if then.loss and math.isfinite(then.loss):
            largest = max(largest, abs(mine.loss - then.loss) / abs(then.loss))
        if ranks != then.world_size:
            what = "" if abs(mine.loss - then.loss) <= 1e-3 * max(1.0, abs(then.loss)) else "loss"
        else:
            what = then.parts_from(mine)
        equal += not what
        if what and parted is None:
            parted = number, what
    now = found[0]["facts"] if found else owner.facts
    return Replayed(
        folder=folder,
        begun_at=first,
        ranks=ranks,
        owner=owner,
        equal=equal,
        parted=parted,
        missing=missing,
        largest=largest,
        found=found,
        facts=other_machine(owner.facts, now) + differing(owner.facts, now, ["data"]),
    )


def told(run: Path, wish: Wish, done: Replayed) -> list[str]:
    """Say what a replay has shown, one line after the other."""
    lines = [verdict(wish, done)]
    if done.facts:
        lines.append(f"  then and now differ: {'; '.join(done.facts)}")
    step = done.main.get("step")
    if step is None:
        return lines
    if step["error"]:
        lines.append(f"step {wish.step} fails: {step['error']}")
    else:
        lines.append(
            f"step {wish.step}: loss {step['loss']:.6g}, gradient norm {step['grad_norm']:.4g}, "
            f"learning rate {step['lr']:.3g}"
        )
        layers = sorted(step["layers"].items(), key=lambda pair: -pair[1])[:_SHOWN]
        lines.append("  gradient norm by layer: " + ", ".join(f"{n} {v:.3g}" for n, v in layers))
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
    lines.append(f"state after it:  {done.folder}")
    return lines


def verdict(wish: Wish, done: Replayed) -> str:
    """Say which steps are equal, and what that means."""
    what = "a sixteenth of the gradient in each (16 steps take it all)"
    what = "all of the gradient" if done.owner.facts["parts"] == 1 else what
    number = counted(done.equal, "step")
    more = f"; {counted(done.missing, 'step')} left no digest" if done.missing else ""
    text = f"{number} equal bit for bit: samples, loss, {what}"
    if done.ranks != done.owner.world_size:
        text = f"on {done.ranks} instead of {counted(done.owner.world_size, 'rank')}: the same "
        text += f"samples and the same mean, added up in another order: {number} with the same "
        text += f"loss up to rounding (largest difference {done.largest:.1g})"
    if done.parted is None:
        return text + more
    at, name = done.parted
    why = "Where the device is not deterministic, train and replay with --deterministic"
    if name == "data":
        why = "The dataset gives other samples now: it was changed, or a sample depends on more "
        why += "than its index, the seed and the epoch"
    return (
        f"equality ended at step {at}: its {name} differs from what the run recorded; {number} "
        f"equal. What follows of steps from {at} on is not what the run did. {why}{more}"
    )


def sample_lines(rows: Sequence[Json]) -> list[str]:
    """List the samples that weigh most."""
    if not rows:
        return []
    has_change = any("change" in row for row in rows)
    why = ", by the gradient without each of them" if has_change else ", by gradient norm"
    lines = [f"samples that weigh most, of {len(rows)}{why}:"]
    lines.append(
        "  sample  rank        loss  gradient norm" + "  without it" * has_change + "  file"
    )
    for row in in_order(rows)[:_SHOWN]:
        change = f"  {row.get('change', math.nan):10.4g}" if has_change else ""
        told = row["file"] or row.get("problem", "")
        lines.append(
            f"  {row['sample']:6}  {row['rank']:4}  {row['loss']:10.5g}  {row['norm']:13.5g}"
            f"{change}  {told}".rstrip()
        )
    by_loss = max(rows, key=lambda row: row["loss"] if row["loss"] == row["loss"] else math.inf)
    lines.append(f"  the largest loss: sample {by_loss['sample']}, {by_loss['loss']:.5g}")
    return lines


def _changes(trials: Sequence[Json], step: int) -> list[str]:
    """Compare the steps with and without some samples."""
    if len(trials) < 2:
        return []
    gone = ", ".join(map(str, trials[1]["without"]))
    lines = [f"without sample {gone}:  loss with and without; gradient norm with and without"]
    for one, two in zip(trials[0]["steps"], trials[1]["steps"], strict=False):
        if one["step"] < step:
            continue
        lines.append(
            f"  step {one['step']}:  {one['loss']:.6g} and {two['loss']:.6g};  "
            f"{one['grad_norm']:.4g} and {two['grad_norm']:.4g}"
        )
        sides = ("with", one["error"]), ("without", two["error"])
        lines += [f"    {side}: {error}" for side, error in sides if error]
    return [*lines, "  A model with dropout draws other masks for the rows that are left."]
