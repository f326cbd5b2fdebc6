"""The command bisect: the first step where a condition holds, and the samples that made it so.

Where: from what the run recorded, if it recorded that; by binary search over the checkpoints, if
the condition stays once it holds; else by doing the steps again. Which samples: by doing the steps
without them (replay_rank.py), with those before it too: damage may show some steps later.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import torch

from ddp_runs.replay import Replayed, Wish, replay, sample_lines, verdict, whole
from ddp_runs.replay_condition import STEP_NUMBERS, Condition
from ddp_runs.replay_records import Digests, Step, read_digests
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
    more = {"flags": flags, "checks_code": not options["any_code"]}
    digests = read_digests(run)
    if condition.name not in (*STEP_NUMBERS, "weights", "layer"):
        return _tell_metric(run, condition, output)
    step, how = first_step(run, digests, condition, more, output)
    if step is None:
        print(f"{condition.text} holds at no step: {how}", file=output)
        return 1
    print(f"{condition.text} holds first at step {step}: {how}", file=output, flush=True)
    begin = max(0, step - horizon)
    wish = Wish(step=step, when=condition.text, blame_from=begin, first=begin, **more)  # type: ignore[arg-type]  # as named
    done = replay(run, wish, output=output)
    if done.parted is not None:  # what a trial shows is then no proof for the run
        print(verdict(wish, done), file=output)
        return 1
    print("\n".join(blame_lines(run, done)), file=output)
    return 0


def first_step(
    run: Path, digests: Digests, condition: Condition, more: Mapping[str, object], output: TextIO
) -> tuple[int | None, str]:
    """Return the first step where a condition holds, None if it is none, and how that is known."""
    numbers = digests.numbers()
    steps = [step for number in numbers if (step := digests.step(number)) is not None]
    is_finished = finished_at(run) is not None
    is_recorded = condition.name in ("loss", "lr")
    if condition.name == "grad_norm":  # else each step has none but those that are reported
        clips = [
            json.loads(start.facts["settings"]["--clip_grad_norm"]) for start in digests.starts
        ]
        is_recorded = min(clips) > 0
    if is_recorded:
        found = next((step.number for step in steps if condition.holds(_values(step))), None)
        if found is not None:
            return found, "recorded when it was done"
        if is_finished:
            return None, f"by the records of {len(steps)} steps"
    last = numbers[-1] + (not is_finished)  # the one after the last may have failed
    first: int | None = last
    if not is_recorded:
        first = 0
        if condition.name == "weights":  # NaN in them never goes away
            first, last = _between_checkpoints(run, last)
            if first > last:
                return None, f"the checkpoint of step {first}, the last one, has none"
    wish = Wish(step=last, when=condition.text, first=first, **more)  # type: ignore[arg-type]
    done = replay(run, wish, output=output)
    if done.parted is not None:
        return None, f"not known: {verdict(wish, done)}"
    return done.main.get("held_at"), f"steps {done.begun_at} to {last} were replayed"


def _values(step: Step) -> dict[str, float]:
    norm = 0.0 if step.is_left_out else step.norm
    return {"loss": step.loss, "grad_norm": norm, "lr": step.rate}


def _between_checkpoints(run: Path, last: int) -> tuple[int, int]:
    """Return two steps between which weights become NaN, by binary search over checkpoints."""
    root = run / CHECKPOINTS_NAME
    steps = sorted(list_steps(root))
    low, high = -1, len(steps)
    while high - low > 1:
        middle = (low + high) // 2
        found = verify_checkpoint(root / step_folder_name(steps[middle]))
        if isinstance(found, Found) and _has_nan(found):
            high = middle
        else:
            low = middle
    return steps[low] if low >= 0 else 0, steps[high] - 1 if high < len(steps) else last


def _has_nan(found: Found) -> bool:
    names = [name for name in found.manifest.tensors if name.startswith("model.")]
    tensors, _ = load_checkpoint(found, names=names)
    return not all(bool(torch.isfinite(t).all()) for t in tensors.values() if t.is_floating_point())


def _tell_metric(run: Path, condition: Condition, output: TextIO) -> int:
    """Tell from metrics.jsonl where a metric was first reported so."""
    points = read_run(run).points
    reports = [(p.step, p.values[condition.name]) for p in points if condition.name in p.values]
    if not reports:
        known = ", ".join([*STEP_NUMBERS, *sorted({name for p in points for name in p.values})])
        raise ConfigError(f"--when: {condition.name} was not recorded", fix=f"known: {known}")
    before = 0
    for step, value in reports:
        if condition.fits(value):
            print(
                f"{condition.text} holds first in the report after step {step}, {value:.6g}; the "
                f"one before was after step {before}\n"
                f"look: {own_command('replay', run, '--step', str(step - 1))}",
                file=output,
            )
            return 0
        before = step
    print(f"{condition.text} holds in no report", file=output)
    return 1


def blame_lines(run: Path, done: Replayed) -> list[str]:
    """Say which step and which samples made it so."""
    found = done.main.get("blame")
    if not found:
        return ["replayed, it does not hold: this step is not the same again here"]
    if found["step"] is None:
        return [
            "none of these steps alone makes it so: without any one of them it still holds; "
            "a larger --horizon looks further back"
        ]
    guilty = found["step"]
    lines = [f"without step {guilty} it does not hold ({found['trials']} trials)"]
    if found["alone"]:
        names = ", ".join(map(str, found["alone"]))
        alone = " (each alone)" if len(found["alone"]) > 1 else ""
        lines.append(f"proved: step {guilty} without sample {names}{alone} does not lead to it")
    elif found["together"]:
        names = ", ".join(map(str, found["together"]))
        lines.append(f"proved: step {guilty} without samples {names} together does not lead to it")
    else:
        lines.append("no few of its samples are to blame: the whole step is, such as its rate")
    lines += sample_lines(found["rows"])
    first = (found["alone"] or found["together"] or [""])[0]
    more = ["--open", str(first)] if first != "" else []
    lines.append(f"look at it: {own_command('replay', run, '--step', str(guilty), *more)}")
    return lines
