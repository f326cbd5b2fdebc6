"""Replay inside of a rank: steps of a run again, a look into one, and trials without samples.

replay.py starts the trainer with a plan, a JSON file; the trainer then calls replay_steps in the
place of its own loop. What is found goes to replayed.json beside the plan.
"""

import json
import math
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddp_runs.replay_records import STEP_NUMBERS, largeness, side_by_side
from hardened_ddp.checkpoint.tensors import specs_of
from hardened_ddp.data.batches.batch import Batch, cut_by_length, split, take
from hardened_ddp.data.batches.nesting import leaves, pick
from hardened_ddp.data.batches.read_errors import file_of
from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.errors import ANY_FAILURE, ConfigError, HardenedError
from hardened_ddp.model.effects import untouched
from hardened_ddp.model.precision import clip
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.settings.wording import listed
from hardened_ddp.step.gradient import Attempt, Outcome
from hardened_ddp.step.records import facts_of_attempt
from hardened_ddp.training.run import Ending, Run
from hardened_ddp.training.state import Saved, restore

_MOST_ALONE = 256  # samples that are left out one by one: each costs a forward and a backward
_TRIED_ALONE = 8  # always: samples that weigh most, of which several may do it
_STEPS_AFTER, _SHOWN = 3, 10  # steps, samples and layers that are shown
_ROW = "  {sample:6}  {rank:4}  {loss:10.5g}  {weight:10.5g}  {norm:13.5g}  {file}"
_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_CONDITION = re.compile(
    r"nan\s+in\s+(?P<nan>weights|loss|grad_norm)"
    r"|(norm\((?P<layer>[^)]+)\)|(?P<name>[\w./-]+))\s*(?P<op>[<>]=?)"
    r"\s*(?P<limit>[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)"
)

Found = dict[str, Any]  # Any: JSON
Gone = Collection[int] | None  # the samples that a step is done without; None: it is not done


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of the command bisect, for the numbers of a step: {"loss": 0.3, ...}."""

    name: str  # loss, grad_norm, lr, a metric; or weights: their norm after the step
    layer: str  # of the weights; empty: all of them
    op: str  # empty: whether it is NaN or infinite
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Read a condition. Raises ConfigError."""
        if (match := _CONDITION.fullmatch(text.strip())) is None:
            fix = "as loss > 3, accuracy/test < 0.5, nan in weights, norm(LAYER) > 9 (of weights)"
            raise ConfigError(f"--when: found {text!r}, which is no condition", fix=fix)
        nan, layer, name, op, limit = match.group("nan", "layer", "name", "op", "limit")
        name = nan or name or "weights"
        return cls(name, layer or "", op or "", float(limit or 0))

    def holds(self, step: Found) -> bool:
        """Return whether it holds after a step. NaN, as of an error, holds each for large ones."""
        if self.name not in step:
            return False
        value = math.nan if step.get("error") and not self.op else step[self.name]
        if not self.op or math.isnan(value):
            return not math.isfinite(value) and not self.op.startswith("<")
        return bool(_OPERATORS[self.op](value, self.limit))

    def worst(self, steps: Iterable[Found]) -> float:
        """Return how far it went towards this condition in some steps; NaN counts as infinite."""
        sign = -1.0 if self.op.startswith("<") else float(bool(self.op))
        values = [largeness(sign * step[self.name]) for step in steps if self.name in step]
        return max(values, default=0.0)


def replay_steps(run: Run, path: Path) -> Ending:
    """Do the steps of a plan, and write what was found. Collective: all ranks."""
    plan: Found = json.loads(path.read_text(encoding="utf-8"))
    facts, code = facts_of_attempt(run.parts), plan["code"]
    if changed := [name for name, now in facts["code"].items() if code.get(name, now) != now]:
        text = f"step {plan['last']} was done by other code: {', '.join(changed)} changed since"
        raise ConfigError(text, fix="check out that code; --any_code shows what this code does")
    replay = Replay(run, plan)
    replay.go()
    if run.parts.group.is_main:
        text = json.dumps({**replay.found, "facts": facts})
        path.with_name("replayed.json").write_text(text, encoding="utf-8")
    return Ending.STOPPED


class Replay:
    """The replay of a plan on this rank."""

    def __init__(self, run: Run, plan: Found) -> None:
        self.run, self.plan, self.parts = run, plan, run.parts
        self.condition = Condition.parse(plan["when"]) if plan["when"] else None
        self.before: Saved | None = None  # the state before the first step that is tried again
        self.found: Found = {"held_at": None, "lines": []}  # where the condition held first

    def go(self) -> None:
        """Do the steps up to the last one of the plan. Collective: all ranks."""
        run, plan, found, lines = self.run, self.plan, self.found, self.found["lines"]
        for done in self.steps(plan["last"], looks=-1 if self.condition else plan["step"]):
            if "rows" in done:
                lines += [*step_lines(done), *sample_lines(done["rows"]), *self._asked(done)]
            if self.condition is not None and self.condition.holds(done):
                found["held_at"] = done["step"]
                break
        if (before := self.before) is None:
            return
        run.stepper.records.close()  # what comes is no step of the run
        first, end, most = plan["tries_from"], self.state(), self.parts.length.total - 1
        if gone := plan["without"]:
            last = min(first + _STEPS_AFTER, most)
            trials = self.trial(before, last), self.trial(before, last, at=first, gone=gone)
            lines.append(f"with and without sample {listed(gone)}, in it and after it:")
            lines += side_by_side(*trials)
        if (held_at := found["held_at"]) is not None:
            # WHY further: without a step in between, the damage may only show a few steps later
            last = min(2 * held_at - first + 1, most)
            blamed = blame(self, before, range(first, held_at + 1), last)  # collective
            lines.append(f"{blamed['proof']} ({blamed['trials']} trials)")
            lines += sample_lines(blamed["rows"])
        run.progress.go_back_to(restore(self.parts, end))  # collective: this is saved

    def steps(self, last: int, at: int = -1, gone: Gone = (), looks: int = -1) -> Iterator[Found]:
        """Do the steps from here to the last, and yield what each was. Collective: all ranks.

        at: the step that is done without some samples. looks: the one whose samples are looked at.
        """
        for window, batches in self.run.windows():
            if window is None:
                self.run.stepper.end_epoch()
                continue
            step = self.run.progress.step
            if step == self.plan["tries_from"] and self.before is None:
                self.before = self.state()
            without = gone if step == at else ()
            yield (found := self.do(window, batches, without, looks=step == looks))
            if found["error"] or step >= last:
                return

    def trial(self, state: Saved, last: int, **how: Any) -> list[Found]:  # Any: as of steps
        """Do the steps from a state to the last again. Collective: all ranks."""
        self.run.progress.go_back_to(restore(self.parts, state))  # collective
        self.run.stepper.start_over()
        return [*self.steps(last, **how)]

    def do(self, window: Window, batches: list[Batch], without: Gone, *, looks: bool) -> Found:
        """Do one step, as it was or without some samples. Collective: all ranks."""
        plan, parts, stepper, progress = self.plan, self.parts, self.run.stepper, self.run.progress
        step, gradients = progress.step, parts.gradients.local.by_name
        progress.max_micro_batch = plan["limits"].get(str(step), progress.max_micro_batch)
        found: Found = {"step": step, "error": "", "loss": math.nan, "grad_norm": math.nan}
        gone = {sample for at, sample in plan["left_out"] if at == step}.union(without or ())
        used = left(batches, gone) if gone else batches
        if looks:
            found["rows"] = self.look_at(used)  # collective
        if without is None or step in plan["given_up"]:
            totals = stepper.gradient.totals.mark()
            stepper.commit(Attempt(window, batches, totals, outcome=Outcome.LEFT_OUT))
            return {**found, "loss": 0.0, "grad_norm": 0.0}
        try:
            with torch.autograd.detect_anomaly() if looks and plan["debug"] else nullcontext():
                attempt = stepper.compute_gradient(window, used)  # collective
            mine = [sum(map(float, attempt.losses)), float(attempt.count)]
            total, count = map(sum, zip(*parts.group.gather_json(mine), strict=True))  # collective
            found["loss"] = total / max(1.0, count)
            found["grad_norm"] = float(clip(gradients.values(), max_norm=0))
            found["lr"] = float(parts.optimizer.param_groups[0]["lr"])
            if looks:
                found["layers"] = norms_of(gradients)
            stepper.commit(attempt)
            stepper.confirm_last_step()  # collective
        except HardenedError as error:  # the same on all ranks
            found["error"] = str(error)
        if self.condition is not None and self.condition.name == "weights":
            found["weights"] = norm_of_weights(parts.replica.module, self.condition.layer)
        return found

    def look_at(self, batches: Sequence[Batch]) -> list[Found]:
        """Return loss and weight of the samples of all ranks, in order. Collective: all ranks."""
        parts, progress, rank = self.parts, self.run.progress, self.parts.group.launch.rank
        found, seed = list[Found](), parts.config.device.seed
        devices = [] if parts.device.type == "cpu" else [parts.device]
        batches = split(batches, progress.max_micro_batch)
        if least := parts.replica.inputs.least_padding:  # cut as in the step
            ignored = parts.task.ignore_index  # type: ignore[attr-defined]  # it is Tokens
            batches = [p for batch in batches for p in cut_by_length(batch, ignored, least)]
        with untouched(parts.replica.module):
            seed_step(seed, step=progress.step, rank=rank, device_type=parts.device.type)
            for batch in batches:
                batch = parts.replica.inputs.send(batch, parts.device)
                losses = self._losses(batch)
                # WHY: to weigh draws numbers, too; the next micro-batch draws those of the step
                with torch.random.fork_rng(devices), untouched(parts.replica.module):
                    found += self._weigh(batch, losses)
        for row in found:
            row |= {"rank": rank, "file": file_of(parts.data.train, row["sample"]) or row["file"]}
        return in_order(row for own in parts.group.gather_json(found) for row in own)  # collective

    def _losses(self, batch: Batch) -> list[torch.Tensor]:
        """Return the samples' losses in the forward of all, as in the step (dropout), or none."""
        task, every = self.parts.task, range(batch.num_samples)
        batch = replace(batch, read_part=None)  # WHY: read alone, a sample is padded otherwise
        try:
            with self.parts.precision.autocast():
                output = task.forward(self.parts.replica.module, batch)
                cut = [pick(output, [i], num_samples=len(every)) for i in every]
                losses = [task.score(cut[i], take(batch, [i])).loss_sum for i in every]
            # WHY: an output that has one loss for all gives it to each
            is_apart = len(every) == 1 or len({float(loss.detach()) for loss in losses}) > 1
            return losses if is_apart else []
        except ANY_FAILURE:  # WHY broad: of an output that can't be cut by samples, or the user's
            return []

    def _weigh(self, batch: Batch, losses: Sequence[torch.Tensor]) -> list[Found]:
        """Give each sample its loss, and as its weight the norm of its gradient.

        Where BatchNorm lets samples depend on each other, the weight is the norm of what changes in
        the gradient of its batch without it. losses: of all samples; empty: each is taken alone.
        """
        parts, size = self.parts.replica.module.modules(), batch.num_samples
        mixes = 1 < size <= _MOST_ALONE and any("BatchNorm" in type(p).__name__ for p in parts)
        rows, of_all = list[Found](), tuple[torch.Tensor, ...]()  # the gradient of all of them
        for place, sample in enumerate(batch.indices.tolist()):
            rows.append(row := {"sample": sample, "file": "", "mixes": mixes})
            row |= dict.fromkeys(("loss", "norm", "weight"), math.nan)
            try:
                loss = losses[place] if losses else self._loss(take(batch, [place]))
                row["loss"] = float(loss.detach())
                row["norm"] = weight = norm(self._gradient(loss))
                if mixes:
                    others = take(batch, [*range(place), *range(place + 1, size)])
                    of_all = of_all or self._gradient(self._loss(batch))
                    pairs = zip(of_all, self._gradient(self._loss(others)), strict=True)
                    weight = norm(one - other for one, other in pairs)
                row["weight"] = weight
            except ANY_FAILURE as error:  # WHY broad: as above
                row["file"] = str(error).partition("\n")[0]  # if it is in none
        return rows

    def _loss(self, batch: Batch) -> torch.Tensor:
        task = self.parts.task
        with self.parts.precision.autocast():
            return task.score(task.forward(self.parts.replica.module, batch), batch).loss_sum

    def _gradient(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = self.parts.gradients.local.parameters
        return torch.autograd.grad(loss, weights, retain_graph=True, materialize_grads=True)

    def _asked(self, done: Found) -> list[str]:
        """Tell of the samples that were asked for: which the step does not have; what is in one."""
        dataset, index = self.parts.data.train, self.plan["open"]
        of_step, lines = [row["sample"] for row in done["rows"]], list[str]()
        if absent := [number for number in self.plan["without"] if number not in of_step]:
            lines = [f"not among the samples of step {done['step']}: {listed(absent)}"]
        if index is None:
            return lines
        try:
            sample = dataset[index]
        except ANY_FAILURE as error:  # WHY broad: the user's code
            sample = f"can't be read: {type(error).__name__}: {error}"
        place = file_of(dataset, index) or "no file: the dataset makes it"
        told = [f"  {described(part)}" for part in leaves(sample)]
        return [*lines, f"sample {index}: {place}", *told]

    def state(self) -> Saved:
        contents = self.run.saver.contents
        tensors = {name: t.detach().clone() for name, t in contents.tensors().items()}

        def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
            return {name: tensors[name].clone() for name in names}  # WHY: an optimizer keeps them

        meta = contents.meta(self.run.progress)
        return Saved(specs_of(tensors), meta, read=read if self.parts.group.is_main else None)


def left(batches: Sequence[Batch], gone: Collection[int]) -> list[Batch]:
    """Return batches without some samples, and without those that are then empty."""
    found = []
    for batch in batches:
        kept = [place for place, number in enumerate(batch.indices.tolist()) if number not in gone]
        if kept:
            found.append(batch if len(kept) == batch.num_samples else take(batch, kept))
    return found


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(torch.stack([tensor.detach().double().norm() for tensor in tensors]).norm())


def norms_of(gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the norm of the gradient of each layer, by its name."""
    by_layer: dict[str, list[torch.Tensor]] = {}
    for name, parameter in gradients.items():
        if parameter.grad is not None:
            by_layer.setdefault(name.rpartition(".")[0] or name, []).append(parameter.grad)
    return {layer: norm(parts) for layer, parts in by_layer.items()}


def norm_of_weights(module: torch.nn.Module, layer: str) -> float:
    """Return the norm of the weights of a layer, or of a parameter; of all for ''."""
    named = dict(module.named_parameters())
    chosen = [p for name, p in named.items() if not layer or f"{name}.".startswith(f"{layer}.")]
    if not chosen:
        raise ConfigError(f"norm({layer}): no such layer", fix=f"it has {listed([*named], 6)}")
    return norm(chosen)


def described(part: Any) -> str:  # Any: a dataset's data
    """Describe a part of a sample in a line."""
    if not isinstance(part, torch.Tensor) or not part.numel():
        return repr(part)[:200]
    values, kind = part.double(), str(part.dtype).removeprefix("torch.")
    span = f"from {values.min():.4g} to {values.max():.4g}, mean {values.mean():.4g}"
    return f"{kind} {tuple(part.shape)}, {span}"


def step_lines(step: Found) -> list[str]:
    if step["error"]:
        return [f"step {step['step']} fails: {step['error']}"]
    if "layers" not in step:
        return [f"step {step['step']} was left out: it changed no weight"]
    layers = sorted(step["layers"].items(), key=lambda pair: -pair[1])[:_SHOWN]
    numbers = ", ".join(f"{name} {step[name]:.6g}" for name in STEP_NUMBERS)
    by_layer = ", ".join(f"{name} {value:.3g}" for name, value in layers)
    return [f"step {step['step']}: {numbers}", f"  gradient norm by layer: {by_layer}"]


def sample_lines(rows: Sequence[Found]) -> list[str]:
    """List the samples that weigh most."""
    if not rows:
        return []
    why = "the change of the gradient without it" if rows[0]["mixes"] else "its gradient's norm"
    lines = [f"samples that weigh most, of {len(rows)}; weight: {why}"]
    lines.append("  sample  rank        loss      weight  gradient norm  file")
    lines += [_ROW.format(**row).rstrip() for row in rows[:_SHOWN]]
    worst = max(rows, key=lambda row: largeness(row["loss"]))
    return [*lines, f"  the largest loss: sample {worst['sample']}, {worst['loss']:.5g}"]


def in_order(rows: Iterable[Found]) -> list[Found]:
    """Sort samples by their weight, the largest first; what is not finite weighs most."""
    # WHY the loss too: where one sample is NaN, all gradients of its batch may be
    return sorted(rows, key=lambda r: (-largeness(r["weight"]), -largeness(r["loss"])))


def blame(replay: Replay, state: Saved, suspects: Sequence[int], last: int) -> Found:
    """Find the step and the samples without which the condition does not hold.

    Whole steps first, the oldest first; then its samples, one by one; if none of them alone is
    enough, those that weigh most together. last: how far each trial runs. Collective: all ranks.
    """
    condition = replay.condition
    assert condition is not None  # the caller has seen it hold
    found: Found = {"step": None, "samples": [], "rows": [], "trials": 0}
    found["proof"] = "it holds without each of these steps, too: --horizon looks further back"

    def peak(at: int, gone: Gone) -> float:
        steps = replay.trial(state, last, at=at, gone=gone)  # collective
        found["trials"] += 1
        return math.inf if any(map(condition.holds, steps)) else condition.worst(steps)

    # WHY the best of them: next to a limit any change may do. WHY the oldest: of equally good ones
    # it is where the damage began.
    peaks = {step: peak(step, None) for step in suspects}
    step = min(peaks, key=peaks.__getitem__)
    if peaks[step] == math.inf:
        return found
    found["step"] = step
    found["rows"] = replay.trial(state, step, looks=step)[-1]["rows"]  # collective
    samples = [row["sample"] for row in found["rows"]]
    alone: dict[int, float] = {}
    for place, sample in enumerate(samples[:_MOST_ALONE]):
        if place >= _TRIED_ALONE and alone:
            break
        if (at := peak(step, [sample])) < math.inf:
            alone[sample] = at
    if alone:
        # WHY not all: next to a limit any change may do. Those that help at least half as much:
        least = (condition.worst(replay.trial(state, last)) + min(alone.values())) / 2
        gone = sorted((s for s in alone if alone[s] <= least), key=alone.__getitem__)
    else:
        counts = range(2, len(samples))
        gone = next((samples[:n] for n in counts if peak(step, samples[:n]) < math.inf), [])
        for sample in gone[::-1]:  # which of them are not needed?
            fewer = [each for each in gone if each != sample]
            gone = fewer if peak(step, fewer) < math.inf else gone
    found["samples"] = gone
    texts = [*map(str, gone)]
    names = f"sample {' or '.join(texts)}" if alone else f"samples {' and '.join(texts)}"
    found["proof"] = f"without step {step} it does not hold; it is none of its samples"
    if gone:
        found["proof"] = f"proved: step {step} without {names} does not lead to it"
    return found
