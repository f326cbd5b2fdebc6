"""Replay inside of a rank: steps of a run again, a look into one, and trials without samples.

The command replay starts the trainer with a plan, a JSON file; the trainer then calls replay_steps
in the place of its own loop. What is found goes to replayed-rank-R.json beside the plan.
Read next: replay.py, which writes the plan and reads what is found.
"""

import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ddp_runs.replay_condition import Condition, weights_of
from ddp_runs.replay_records import in_order
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
from hardened_ddp.step.attempt_facts import facts_of_attempt
from hardened_ddp.step.gradient import Attempt, Outcome
from hardened_ddp.training.run import Ending, Run
from hardened_ddp.training.state import Saved, collect_meta, collect_tensors, restore

log = logging.getLogger(__name__)

MOST_ALONE = 256
"""Samples of a rank that are tried one by one: each costs a forward and a backward."""

_ALWAYS_TRIED = 8  # samples that weigh most: several may have to come together

Found = dict[str, Any]  # Any: JSON


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
        text = json.dumps(replay.found)
        name = f"replayed-rank-{run.parts.group.launch.rank}.json"
        path.with_name(name).write_text(text, encoding="utf-8")
    return Ending.STOPPED


class Replay:
    """The replay of a plan on this rank."""

    def __init__(self, run: Run, plan: Found) -> None:
        self.run, self.plan, self.parts = run, plan, run.parts
        self.found: Found = {"error": "", "samples": [], "trials": [], "held_at": None}
        self._condition = Condition.parse(plan["when"]) if plan["when"] else None
        self._without = {int(step): ids for step, ids in plan["left_out"].items()}

    def go(self) -> None:
        """Do the steps up to the last one of the plan. Collective: all ranks."""
        run, plan = self.run, self.plan
        detail, blame_from = plan["detail"], plan["blame_from"]
        state: Saved | None = None
        for step, window, batches in self._steps():
            if step > plan["last"]:
                return
            if state is None and step == (detail if blame_from is None else blame_from):
                state = self._state()
            if step == detail:
                self.found["samples"] = self.look_at(batches)
                self.found["opened"] = self._open(plan["open"])
            done = self.do(window, batches, explains=step == detail)
            self.found["step" if step == detail else "newest"] = done
            if self._condition is not None and self._condition.holds(done):
                self.found["held_at"] = step
                break
            if done["error"] or step == plan["last"]:
                break
        if state is not None and (plan["without"] or blame_from is not None):
            run.stepper.records.close()  # what comes is no step of the run
            end = self._state()
            self._try_without(state)
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
        without: Collection[int] = (),
        skips: bool = False,
        explains: bool = False,
    ) -> Found:
        """Do one step, as it was or without some samples, or skip it. Collective: all ranks."""
        run, stepper, step = self.run, self.run.stepper, self.run.progress.step
        limit = self.plan["limits"].get(str(step))
        if limit is not None:
            run.progress.max_micro_batch = limit
        gone = {*self._without.get(step, ()), *without}
        found: Found = {"step": step, "error": "", "loss": math.nan, "grad_norm": math.nan}
        if skips or step in self.plan["given_up"]:
            attempt = Attempt(window, batches, stepper.gradient.totals.mark())
            attempt.outcome = Outcome.LEFT_OUT
            stepper.commit(attempt)
            return {**found, "loss": 0.0, "grad_norm": 0.0}
        try:
            watch = torch.autograd.detect_anomaly() if explains and self.plan["debug"] else None
            with watch or nullcontext():
                attempt = stepper.compute_gradient(window, left(batches, gone))  # collective
            loss = sum(float(each) for each in attempt.losses)
            pair = torch.tensor([loss, float(attempt.count)], dtype=torch.float64)
            total, count = self.parts.group.sum_(pair.to(self.parts.device)).tolist()  # collective
            gradients = self.parts.gradients.local.by_name
            found["loss"] = total / max(1.0, count)
            found["grad_norm"] = float(clip(gradients.values(), max_norm=0))
            found["lr"] = float(self.parts.optimizer.param_groups[0]["lr"])
            if explains:
                found["layers"] = norms_of(gradients)
            stepper.commit(attempt)
            stepper.confirm_last_step()  # collective
        except HardenedError as error:  # the same on all ranks
            found["error"] = str(error)
        if self._condition is not None:
            found |= self._condition.measure(weights_of(self.parts.replica.module))
        return found

    def look_at(self, batches: Sequence[Batch]) -> list[Found]:
        """Return loss and gradient norm of each of this rank's samples. Rank-local."""
        parts, progress = self.parts, self.run.progress
        module, found = parts.replica.module, list[Found]()
        batches = left(batches, self._without.get(progress.step, ()))
        if progress.max_micro_batch:
            batches = split(batches, progress.max_micro_batch)
        mixes = any("BatchNorm" in type(part).__name__ for part in module.modules())
        with untouched(module):
            seed = parts.config.device.seed, parts.group.launch.rank
            seed_step(seed[0], step=progress.step, rank=seed[1], device_type=parts.device.type)
            for batch in batches:
                sent = parts.replica.inputs.send(batch, parts.device)
                rows = self._each(sent)
                if mixes and len(rows) <= MOST_ALONE:
                    self._leave_each_out(batch, rows)
                found += rows
        parts.optimizer.zero_grad(set_to_none=True)
        for row in found:
            row["rank"] = parts.group.launch.rank
            row["file"] = file_of(parts.data.train, row["sample"])
        return found

    def _each(self, batch: Batch) -> list[Found]:
        """Take loss and gradient of each sample within the forward of its batch."""
        task, module, size = self.parts.task, self.parts.replica.module, batch.num_samples
        found = []
        try:
            with self.parts.precision.autocast():
                output = task.forward(module, batch)
                scores = [
                    task.score(pick(output, [i], num_samples=size), take(batch, [i]))
                    for i in range(size)
                ]
            is_apart = len({float(score.loss_sum.detach()) for score in scores}) > 1 or size == 1
        except ANY_FAILURE:  # WHY broad: of an output that can't be cut by samples, or the user's
            is_apart = False
        for i in range(size):
            row: Found = {"sample": int(batch.indices[i]), "loss": math.nan, "norm": math.nan}
            found.append(row)
            try:
                if is_apart:
                    loss = scores[i].loss_sum
                else:
                    single = take(batch, [i])
                    with self.parts.precision.autocast():
                        loss = task.score(task.forward(module, single), single).loss_sum
                row["loss"] = float(loss.detach())
                row["norm"] = norm(self._gradient(loss, keeps_graph=is_apart))
            except ANY_FAILURE as error:  # WHY broad: as above
                row["problem"] = str(error).partition("\n")[0]
        return found

    def _leave_each_out(self, batch: Batch, rows: list[Found]) -> None:
        """Take how the gradient of a batch changes without each of its samples."""
        task, module = self.parts.task, self.parts.replica.module

        def gradient(places: list[int]) -> list[torch.Tensor]:
            part = self.parts.replica.inputs.send(take(batch, places), self.parts.device)
            with self.parts.precision.autocast():
                loss = task.score(task.forward(module, part), part).loss_sum
            return self._gradient(loss)

        every = list(range(batch.num_samples))
        try:
            whole = gradient(every)
            for i, row in enumerate(rows):
                less = gradient([place for place in every if place != i])
                row["change"] = norm([a - b for a, b in zip(whole, less, strict=True)])
        except ANY_FAILURE as error:  # WHY broad: BatchNorm can't train on a single sample
            log.warning("the gradient without each sample is not known: %s", error)

    def _gradient(self, loss: torch.Tensor, *, keeps_graph: bool = False) -> list[torch.Tensor]:
        parameters = self.parts.gradients.local.parameters
        found = torch.autograd.grad(loss, parameters, retain_graph=keeps_graph, allow_unused=True)
        pairs = zip(found, parameters, strict=True)
        return [torch.zeros_like(p) if g is None else g for g, p in pairs]

    def _open(self, index: int | None) -> Found:
        """Describe a sample as the dataset gives it. Rank-local."""
        if index is None or not self.parts.group.is_main:
            return {}
        try:
            sample = self.parts.data.train[index]
        except ANY_FAILURE as error:  # WHY broad: the user's code
            return {"file": "", "parts": [f"can't be read: {type(error).__name__}: {error}"]}
        parts = sample if isinstance(sample, tuple | list) else [sample]
        return {
            "file": file_of(self.parts.data.train, index),
            "parts": [described(part) for part in parts],
        }

    def _state(self) -> Saved:
        """Copy the state at this step boundary."""
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
        without: Collection[int] | None = None,
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
            gone: Collection[int] | None = without if step == at else ()
            skips = gone is None
            done = self.do(window, batches, without=gone or (), skips=skips)  # collective
            found.append(done)
            if done["error"] or step >= last:
                break
        return found

    def _try_without(self, state: Saved) -> None:
        """Do the step without the samples of the plan, or find those to blame. Collective."""
        plan, total = self.plan, self.parts.length.total
        if plan["without"]:
            last = min(plan["last"] + plan["horizon"], total - 1)
            for gone in (list[int](), plan["without"]):
                steps = self.trial(state, last, at=plan["detail"], without=gone)  # collective
                self.found["trials"].append({"without": gone, "steps": steps})
        elif self._condition is not None and self.found["held_at"] is not None:
            held_at = self.found["held_at"]
            # WHY further: without a step in between, the damage may only show a few steps later
            last = min(2 * held_at - plan["blame_from"] + 1, total - 1)
            suspects = range(plan["blame_from"], held_at + 1)
            blamed = blame(self, state, self._condition, suspects=suspects, last=last)  # collective
            self.found["blame"] = blamed


def left(batches: Sequence[Batch], gone: Collection[int]) -> Sequence[Batch]:
    """Return batches without some samples, and without those that are then empty."""
    if not gone:
        return batches
    found = []
    for batch in batches:
        numbers = batch.indices.tolist()
        kept = [place for place, number in enumerate(numbers) if number not in gone]
        if len(kept) == len(numbers):
            found.append(batch)
        elif kept:
            found.append(take(batch, kept))
    return found


def norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm([tensor.float() for tensor in tensors]))


def norms_of(gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the norm of the gradient of each layer, by its name."""
    by_layer: dict[str, list[torch.Tensor]] = {}
    for name, parameter in gradients.items():
        if parameter.grad is not None:
            layer = name.rpartition(".")[0] or name
            by_layer.setdefault(layer, []).append(parameter.grad)
    return {layer: norm(parts) for layer, parts in by_layer.items()}


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


def blame(
    replay: Replay, state: Saved, condition: Condition, *, suspects: Sequence[int], last: int
) -> Found:
    """Find the step and the samples without which a condition does not hold. Collective: all ranks.

    Whole steps first, the oldest first; then its samples, one by one; if none of them alone is
    enough, those that weigh most together.
    """

    def peak(at: int, without: list[int] | None) -> float:
        steps = replay.trial(state, last, at=at, without=without)  # collective
        found["trials"] += 1
        return math.inf if any(map(condition.holds, steps)) else condition.worst(steps)

    found: Found = {"step": None, "alone": [], "together": [], "rows": [], "trials": 0}
    # WHY the best of them: next to a limit any change may do. WHY the oldest: of equally good ones
    # it is where the damage began.
    peaks = {step: peak(step, None) for step in suspects}
    step = min(peaks, key=lambda each: (peaks[each], each))
    if peaks[step] == math.inf:
        return found
    found["step"] = step
    rows = replay.trial(state, last, at=step, looks=True)  # collective
    found["rows"] = rows = in_order(rows)
    samples = [int(row["sample"]) for row in rows]
    alone: dict[int, float] = {}
    for place, sample in enumerate(samples[:MOST_ALONE]):
        if place >= _ALWAYS_TRIED and alone:
            break
        if (value := peak(step, [sample])) < math.inf:
            alone[sample] = value
    if alone:
        # WHY not all: next to a limit any change may do. Those that help at least half as much:
        least = (condition.worst(replay.trial(state, last)) + min(alone.values())) / 2
        clear = [sample for sample, value in alone.items() if value <= least]
        found["alone"] = sorted(clear, key=lambda sample: alone[sample])
        return found
    counts = range(2, len(samples))
    together = next((samples[:n] for n in counts if peak(step, samples[:n]) < math.inf), [])
    for sample in together[::-1]:  # which of them are not needed?
        fewer = [each for each in together if each != sample]
        if fewer and peak(step, fewer) < math.inf:
            together = fewer
    found["together"] = together
    return found
