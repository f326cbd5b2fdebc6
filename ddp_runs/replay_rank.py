"""Replay inside of a rank: steps of a run again, a look into one, and trials without samples.

The command replay starts the trainer with a plan, a JSON file; the trainer then calls replay_steps
in the place of its own loop. What is found goes to replayed-rank-R.json beside the plan.
Read next: replay.py, which writes the plan and reads what is found.
"""

import json
import logging
import math
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hardened_ddp.checkpoint.tensors import specs_of
from hardened_ddp.data.batches.batch import Batch, split, take
from hardened_ddp.data.batches.ledger import DIGESTS
from hardened_ddp.data.batches.nesting import pick
from hardened_ddp.data.batches.read_errors import file_of
from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.errors import ANY_FAILURE, ConfigError, HardenedError
from hardened_ddp.model.effects import untouched
from hardened_ddp.model.precision import clip
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.step.gradient import Attempt, Outcome
from hardened_ddp.step.records import facts_of_attempt
from hardened_ddp.training.run import Ending, Run
from hardened_ddp.training.state import Saved, collect_meta, collect_tensors, restore

log = logging.getLogger(__name__)

STEP_NUMBERS = ("loss", "grad_norm", "lr")
"""What is known of each step; other names of a condition are those of metrics.jsonl."""

MOST_ALONE = 256
"""Samples of a rank that are tried one by one: each costs a forward and a backward."""

_ALWAYS_TRIED = 8  # samples that weigh most: several may have to come together
_STEPS_AFTER = 3  # that are shown of a step without some samples
_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_CONDITION = re.compile(
    r"nan\s+in\s+(?P<nan>weights|loss|grad_norm)"
    r"|(norm\((?P<layer>[^)]+)\)|(?P<name>[\w./-]+))\s*(?P<op>[<>]=?)"
    r"\s*(?P<limit>[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)"
)

Found = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of the command bisect: loss > 3, grad_norm > 100, nan in weights, norm(fc) > 9.

    A step is given by its numbers: {"loss": 0.3, "grad_norm": 1.0, "lr": 0.1, ...}.
    """

    text: str
    name: str
    """loss, grad_norm, lr, a metric; or weights: their norm after the step."""

    layer: str = ""
    """Of the weights; empty: all of them."""

    op: str = ""
    """Empty: whether it is NaN or infinite."""

    limit: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Read a condition. Raises ConfigError."""
        if match := _CONDITION.fullmatch(text.strip()):
            nan, layer, name, op, limit = match.group("nan", "layer", "name", "op", "limit")
            name = nan or name or "weights"
            return cls(text.strip(), name, layer or "", op or "", float(limit or 0))
        raise ConfigError(
            f"--when: found {text!r}, which is no condition",
            fix="one of: loss > 3, grad_norm > 100, lr < 1e-5, accuracy/test < 0.5, nan in loss, "
            "nan in weights, norm(LAYER) > 9 (of its weights)",
        )

    def fits(self, value: float) -> bool:
        """Return whether it holds for a value. NaN holds every one that asks for large numbers."""
        if not self.op or math.isnan(value):
            return not math.isfinite(value) and not self.op.startswith("<")
        return bool(_OPERATORS[self.op](value, self.limit))

    def holds(self, step: Found) -> bool:
        """Return whether it holds after a step. An error counts as NaN."""
        if self.name not in step:
            return False
        return self.fits(step[self.name]) or (bool(step.get("error")) and not self.op)

    def worst(self, steps: Iterable[Found]) -> float:
        """Return how far it went towards this condition in some steps; NaN counts as infinite."""
        sign = -1.0 if self.op.startswith("<") else 1.0
        values = [sign * step[self.name] for step in steps if self.name in step]
        if not all(map(math.isfinite, values)):
            return math.inf
        return max(values, default=0.0) if self.op else 0.0


def replay_steps(run: Run, path: Path) -> Ending:
    """Do the steps of a plan, and write what was found. Collective: all ranks."""
    plan: Found = json.loads(path.read_text(encoding="utf-8"))
    facts = facts_of_attempt(run.parts)
    code, here = plan["facts"].get("code", {}), facts.get("code", {})
    changed = [name for name in code if name in here and code[name] != here[name]]
    if plan["checks_code"] and changed:
        raise ConfigError(
            f"step {plan['last']} was done by other code: {', '.join(changed)} changed since",
            fix=f"check out the code of that time, kept in {path.parents[2] / DIGESTS}; or "
            "--any_code, to see what this code does",
        )
    replay = Replay(run, plan)
    try:
        replay.go()
    finally:
        replay.found["facts"] = {name: facts[name] for name in facts if name != "settings"}
        name = f"replayed-rank-{run.parts.group.launch.rank}.json"
        path.with_name(name).write_text(json.dumps(replay.found), encoding="utf-8")
    return Ending.STOPPED


class Replay:
    """The replay of a plan on this rank."""

    def __init__(self, run: Run, plan: Found) -> None:
        self.run, self.plan, self.parts = run, plan, run.parts
        self.found: Found = {"samples": [], "trials": [], "held_at": None}
        self.condition = Condition.parse(plan["when"]) if plan["when"] else None
        self._without = {int(step): ids for step, ids in plan["left_out"].items()}

    def go(self) -> None:
        """Do the steps up to the last one of the plan. Collective: all ranks."""
        run, plan, found, condition = self.run, self.plan, self.found, self.condition
        state: Saved | None = None
        for step, window, batches in self._steps():
            if step == plan["tries_from"]:
                state = self._state()
            is_looked_at = condition is None and step == plan["step"]
            if is_looked_at:
                found["samples"], found["opened"] = self.look_at(batches), self._open(plan["open"])
            found["newest"] = done = self.do(window, batches, explains=is_looked_at)  # collective
            if condition is not None and condition.holds(done):
                found["held_at"] = step
            if found["held_at"] is not None or done["error"] or step >= plan["last"]:
                break
        if state is None:
            return
        run.stepper.records.close()  # what comes is no step of the run
        end, most = self._state(), self.parts.length.total - 1
        for gone in (list[int](), plan["without"]) if plan["without"] else ():
            last = min(plan["step"] + _STEPS_AFTER, most)
            steps = self.trial(state, last, at=plan["step"], without=gone)  # collective
            found["trials"].append({"without": gone, "steps": steps})
        if (held_at := found["held_at"]) is not None:
            first = plan["tries_from"]
            # WHY further: without a step in between, the damage may only show a few steps later
            last = min(2 * held_at - first + 1, most)
            found["blame"] = blame(self, state, range(first, held_at + 1), last)  # collective
        run.progress.go_back_to(restore(self.parts, end))  # collective: this is saved

    def _steps(self) -> Iterator[tuple[int, Window, Sequence[Batch]]]:
        """Yield the steps from here on, over the ends of epochs."""
        for window, batches in self.run.windows():
            if window is None:
                self.run.stepper.end_epoch()
            else:
                yield self.run.progress.step, window, batches

    def do(
        self,
        window: Window,
        batches: Sequence[Batch],
        *,
        without: Collection[int] | None = (),
        explains: bool = False,
    ) -> Found:
        """Do one step, as it was or without some samples; None: skip it. Collective: all ranks."""
        run, parts, stepper, step = self.run, self.parts, self.run.stepper, self.run.progress.step
        if (limit := self.plan["limits"].get(str(step))) is not None:
            run.progress.max_micro_batch = limit
        found: Found = {"step": step, "error": "", "loss": math.nan, "grad_norm": math.nan}
        if without is None or step in self.plan["given_up"]:
            attempt = Attempt(window, batches, stepper.gradient.totals.mark())
            attempt.outcome = Outcome.LEFT_OUT
            stepper.commit(attempt)
            return {**found, "loss": 0.0, "grad_norm": 0.0}
        used = left(batches, {*self._without.get(step, ()), *without})
        try:
            finds_anomalies = explains and self.plan["debug"]
            with torch.autograd.detect_anomaly() if finds_anomalies else nullcontext():
                attempt = stepper.compute_gradient(window, used)  # collective
            loss = sum(float(each) for each in attempt.losses)
            pair = torch.tensor([loss, float(attempt.count)], dtype=torch.float64)
            total, count = parts.group.sum_(pair.to(parts.device)).tolist()  # collective
            gradients = parts.gradients.local.by_name
            found["loss"] = total / max(1.0, count)
            found["grad_norm"] = float(clip(gradients.values(), max_norm=0))
            found["lr"] = float(parts.optimizer.param_groups[0]["lr"])
            if explains:
                found["layers"] = norms_of(gradients)
            stepper.commit(attempt)
            stepper.confirm_last_step()  # collective
        except HardenedError as error:  # the same on all ranks
            found["error"] = str(error)
        if self.condition is not None and self.condition.name == "weights":
            found["weights"] = norm_of_weights(parts.replica.module, self.condition.layer)
        return found

    def look_at(self, batches: Sequence[Batch]) -> list[Found]:
        """Return loss and gradient norm of each of this rank's samples. Rank-local."""
        parts, progress, rank = self.parts, self.run.progress, self.parts.group.launch.rank
        module, found = parts.replica.module, list[Found]()
        batches = left(batches, self._without.get(progress.step, ()))
        if progress.max_micro_batch:
            batches = split(batches, progress.max_micro_batch)
        mixes = any("BatchNorm" in type(part).__name__ for part in module.modules())
        with untouched(module):
            seed, kind = parts.config.device.seed, parts.device.type
            seed_step(seed, step=progress.step, rank=rank, device_type=kind)
            for batch in batches:
                rows = self._each(parts.replica.inputs.send(batch, parts.device))
                if mixes and len(rows) <= MOST_ALONE:
                    self._leave_each_out(batch, rows)
                found += rows
        parts.optimizer.zero_grad(set_to_none=True)
        for row in found:
            row |= {"rank": rank, "file": file_of(parts.data.train, row["sample"])}
        return found

    def _each(self, batch: Batch) -> list[Found]:
        """Take loss and gradient of each sample within the forward of its batch, or else alone."""
        task, size, found = self.parts.task, batch.num_samples, list[Found]()
        singles = [take(batch, [i]) for i in range(size)]
        try:
            with self.parts.precision.autocast():
                output = task.forward(self.parts.replica.module, batch)
                parts = [pick(output, [i], num_samples=size) for i in range(size)]
                losses = [task.score(*pair).loss_sum for pair in zip(parts, singles, strict=True)]
            is_apart = len({float(loss.detach()) for loss in losses}) > 1 or size == 1
        except ANY_FAILURE:  # WHY broad: of an output that can't be cut by samples, or the user's
            is_apart = False
        for i, single in enumerate(singles):
            row: Found = {"sample": int(batch.indices[i]), "loss": math.nan, "norm": math.nan}
            found.append(row)
            try:
                loss = losses[i] if is_apart else self._loss(single)
                row["loss"] = float(loss.detach())
                row["norm"] = norm(self._gradient(loss, keeps_graph=is_apart))
            except ANY_FAILURE as error:  # WHY broad: as above
                row["problem"] = str(error).partition("\n")[0]
        return found

    def _leave_each_out(self, batch: Batch, rows: list[Found]) -> None:
        """Take how the gradient of a batch changes without each of its samples."""

        def gradient(places: list[int]) -> list[torch.Tensor]:
            part = self.parts.replica.inputs.send(take(batch, places), self.parts.device)
            return self._gradient(self._loss(part))

        every = list(range(batch.num_samples))
        try:
            whole = gradient(every)
            for i, row in enumerate(rows):
                less = gradient([place for place in every if place != i])
                row["change"] = norm([a - b for a, b in zip(whole, less, strict=True)])
        except ANY_FAILURE as error:  # WHY broad: BatchNorm can't train on a single sample
            log.warning("the gradient without each sample is not known: %s", error)

    def _loss(self, batch: Batch) -> torch.Tensor:
        task = self.parts.task
        with self.parts.precision.autocast():
            return task.score(task.forward(self.parts.replica.module, batch), batch).loss_sum

    def _gradient(self, loss: torch.Tensor, *, keeps_graph: bool = False) -> list[torch.Tensor]:
        parameters = self.parts.gradients.local.parameters
        return list(
            torch.autograd.grad(
                loss,
                parameters,
                retain_graph=keeps_graph,
                allow_unused=True,
                materialize_grads=True,
            )
        )

    def _open(self, index: int | None) -> Found:
        if index is None or not self.parts.group.is_main:
            return {}
        dataset = self.parts.data.train
        try:
            sample = dataset[index]
        except ANY_FAILURE as error:  # WHY broad: the user's code
            return {"file": "", "parts": [f"can't be read: {type(error).__name__}: {error}"]}
        parts = sample if isinstance(sample, tuple | list) else [sample]
        return {"file": file_of(dataset, index), "parts": list(map(described, parts))}

    def _state(self) -> Saved:
        tensors = {name: t.detach().clone() for name, t in collect_tensors(self.parts).items()}

        def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
            return {name: tensors[name].clone() for name in names}  # WHY: an optimizer keeps them

        meta = collect_meta(self.parts, self.run.progress)
        return Saved(specs_of(tensors), meta, read=read if self.parts.group.is_main else None)

    def trial(
        self,
        state: Saved,
        last: int,
        *,
        at: int = -1,
        without: Collection[int] | None = (),
        looks: bool = False,
    ) -> list[Found]:
        """Do the steps from a state to the last again. Collective: all ranks.

        at: the step that is done without some samples, or with None not at all; or which is looked
        at: then nothing is done from there on, and its samples are returned.
        """
        run, found = self.run, list[Found]()
        run.progress.go_back_to(restore(self.parts, state))  # collective
        run.stepper.start_over()
        for step, window, batches in self._steps():
            if looks and step == at:
                rows = self.parts.group.gather_json(self.look_at(batches))  # collective
                return [row for own in rows for row in own]
            found.append(self.do(window, batches, without=without if step == at else ()))
            if found[-1]["error"] or step >= last:
                break
        return found


def left(batches: Sequence[Batch], gone: Collection[int]) -> Sequence[Batch]:
    """Return batches without some samples, and without those that are then empty."""
    found = []
    for batch in batches if gone else ():
        kept = [place for place, number in enumerate(batch.indices.tolist()) if number not in gone]
        if kept:
            found.append(batch if len(kept) == batch.num_samples else take(batch, kept))
    return found if gone else batches


def norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm([tensor.float() for tensor in tensors]))


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
    chosen = [name for name in named if not layer or f"{name}.".startswith(f"{layer}.")]
    if not chosen:
        fix = f"it has {', '.join([*named][:6])}"
        raise ConfigError(f"norm({layer}): the model has no such layer", fix=fix)
    squares = sum(float(named[name].detach().double().pow(2).sum()) for name in chosen)
    return math.sqrt(squares) if math.isfinite(squares) else math.nan


def described(part: Any) -> str:  # Any: a dataset's data
    """Describe a part of a sample in a line."""
    if not isinstance(part, torch.Tensor) or not part.numel():
        text = repr(part)
        return text if len(text) <= 200 else f"{text[:200]}..."
    values = part.double()
    finite = values[values.isfinite()]
    text = f"{part.dtype} {tuple(part.shape)}".removeprefix("torch.")
    if len(finite):
        text += f", from {finite.min():.4g} to {finite.max():.4g}, mean {finite.mean():.4g}"
    bad = values.numel() - len(finite)
    return text + (f", {bad} values are NaN or infinite" if bad else "")


def in_order(rows: Iterable[Found]) -> list[Found]:
    """Sort samples by their weight, the largest first; what is not finite weighs most.

    By the change of the gradient without each of them, where samples are not independent.
    """

    def weight(row: Found) -> list[float]:
        # WHY the loss too: where one sample is NaN, all gradients of its batch may be
        values = row["change"] if "change" in row else row["norm"], row["loss"]
        return [-value if math.isfinite(value) else -math.inf for value in values]

    return sorted(rows, key=weight)


def blame(replay: Replay, state: Saved, suspects: Sequence[int], last: int) -> Found:
    """Find the step and the samples without which the condition does not hold.

    Whole steps first, the oldest first; then its samples, one by one; if none of them alone is
    enough, those that weigh most together. last: how far each trial runs. Collective: all ranks.
    """
    condition = replay.condition
    assert condition is not None  # the caller has seen it hold
    found: Found = {"step": None, "alone": [], "together": [], "rows": [], "trials": 0}

    def peak(at: int, without: list[int] | None) -> float:
        steps = replay.trial(state, last, at=at, without=without)  # collective
        found["trials"] += 1
        return math.inf if any(map(condition.holds, steps)) else condition.worst(steps)

    # WHY the best of them: next to a limit any change may do. WHY the oldest: of equally good ones
    # it is where the damage began.
    peaks = {step: peak(step, None) for step in suspects}
    step = min(peaks, key=lambda each: (peaks[each], each))
    if peaks[step] == math.inf:
        return found
    found["step"] = step
    found["rows"] = in_order(replay.trial(state, last, at=step, looks=True))  # collective
    samples = [int(row["sample"]) for row in found["rows"]]
    alone: dict[int, float] = {}
    for place, sample in enumerate(samples[:MOST_ALONE]):
        if place >= _ALWAYS_TRIED and alone:
            break
        if (value := peak(step, [sample])) < math.inf:
            alone[sample] = value
    if alone:
        # WHY not all: next to a limit any change may do. Those that help at least half as much:
        least = (condition.worst(replay.trial(state, last)) + min(alone.values())) / 2
        found["alone"] = sorted((s for s in alone if alone[s] <= least), key=alone.__getitem__)
        return found
    counts = range(2, len(samples))
    together = next((samples[:n] for n in counts if peak(step, samples[:n]) < math.inf), [])
    for sample in together[::-1]:  # which of them are not needed?
        fewer = [each for each in together if each != sample]
        if fewer and peak(step, fewer) < math.inf:
            together = fewer
    found["together"] = together
    return found
