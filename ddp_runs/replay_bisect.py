"""The command bisect: the first step where a condition holds, and the samples that made it so.

Where: from what the run recorded, if it recorded that; by binary search over the checkpoints, if
the condition stays once it holds; else by doing the steps again. Which samples: by doing the steps
without them (replay_rank.py), with those before it too: damage may show some steps later.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from ddp_runs.replay import Replayed, Wish, replay, sample_lines, whole
from ddp_runs.replay_rank import STEP_NUMBERS, Condition
from ddp_runs.replay_records import Digests, read_digests
from ddp_runs.run_files import read_run
from hardened_ddp.checkpoint.folder import (
    Found,
    list_steps,
    load_checkpoint,
    step_folder_name,
    verify_checkpoint,
)
from hardened_ddp.errors import ConfigError
from hardened_ddp.reporting.summary import finished_at
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, find_folder
from hardened_ddp.settings.typed_command import own_command


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
