"""Evaluation: every test sample once, over all ranks, also if their shares differ in size.

In a run between its steps, and by the command evaluate, which also compares the count of samples
with the size of the set. The loop runs the plain module, never the DDP wrapper: ranks may have
different numbers of batches, and only the sums at the end are exchanged. Early stopping follows
from figures that are equal on all ranks and in every checkpoint: all ranks stop at the same
evaluation, and a resumed run where the unbroken one would.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardened_ddp.checkpoint.folder import Best, Found, open_checkpoint
from hardened_ddp.data.batches.batch import BadSample, Batch
from hardened_ddp.data.batches.loader import EvalLoader
from hardened_ddp.data.loader_setup import build_eval_loader
from hardened_ddp.data.sources.datasets import TaskData, build_data, prepare_data
from hardened_ddp.errors import (
    ANY_FAILURE,
    ConfigError,
    DataError,
    HardenedError,
    SampleError,
    StepError,
)
from hardened_ddp.model.average import AVERAGE
from hardened_ddp.model.moving_attributes import MovingAttributes
from hardened_ddp.model.precision import Precision
from hardened_ddp.model.replica import DEFAULT_INPUTS, Inputs
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.resources import collect_as_usual
from hardened_ddp.reporting.summary import tell_report
from hardened_ddp.settings.commands import AVERAGED
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.layers import Resolved
from hardened_ddp.settings.wording import counted
from hardened_ddp.step.failure import explain_failure
from hardened_ddp.step.gradient import Totals
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import NEVER_FINITE, Progress
from hardened_ddp.step.step import is_due
from hardened_ddp.task.build import build_task, metric_of
from hardened_ddp.task.task import LOSS, Metric, Task, described, number_text, with_loss
from hardened_ddp.training.run_folder import share_checkpoint
from hardened_ddp.training.state import receive
from hardened_ddp.training.weights import MODEL_PREFIX, model_tensors, rebuild_model

log = logging.getLogger(__name__)

# Begin the names of figures of a part of the test set, and of the averaged weights.
PARTIAL, EMA = "partial_", "ema_"

# Of the table that the command evaluate prints. Of more rows single ones say little, and the file
# has all.
MAX_ROWS, _NAME_WIDTH, _WIDTH = 20, 20, 11


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome over the whole test set."""

    # The loss and the metrics of the task, by name; those of the averages begin with ema_, of a
    # part of the test set with partial_.
    figures: Mapping[str, float]
    num_samples: int
    # Under --continue_on_error: the samples left out on all ranks, each with its error.
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationLoop:
    """The loop over the test set, and what it needs to measure a model."""

    loader: EvalLoader
    task: Task
    precision: Precision
    group: Group
    leaves_out: bool  # go on without samples that can't be read, and name them: --continue_on_error
    # Check that each output and its labels fit. Waits for the device once per batch.
    checks: bool = False
    inputs: Inputs = DEFAULT_INPUTS

    @torch.no_grad()
    def run(
        self,
        module: nn.Module,
        totals: Totals,
        *,
        should_stop: Callable[[], object] = lambda: False,
    ) -> tuple[dict[str, float], list[BadSample]] | None:
        """Measure module; return the figures and the samples left out. Collective: all ranks.

        should_stop is called between batches, on all ranks equally often; if it is true, returns
        None. Raises SampleError, or an error that names the rank whose model or data failed.
        """
        left_out: list[BadSample] = []
        if self.task.own:
            self.task.own.reset()
        try:
            batches = iter(self.loader)
            for _ in range(self.loader.most_batches):
                self.group.tracker.enter(Phase.EVALUATION)
                if should_stop():  # collective
                    return None
                batch = next(batches, None)
                if batch is None:
                    self._add_own(None, None)  # collective
                    continue
                if batch.bad and not self.leaves_out:
                    raise SampleError(
                        f"test sample {batch.bad[0].name} can't be read: {batch.bad[0].error}",
                        fix="fix it, or leave such samples out with --continue_on_error",
                    )
                left_out += batch.bad
                output = None
                if batch.num_samples:
                    batch = self.inputs.send(batch, self.group.device)
                    with self.precision.autocast():
                        output = self.task.forward(module, batch)
                        if self.checks:
                            self.task.check(output, batch)
                        score = self.task.score(output, batch)
                    totals.add(score, batch.num_samples)
                self._add_own(output, batch)  # collective
            next(batches, None)  # WHY: the stream then reaches its end, and keeps its idle workers
            figures = totals.read(self.group)  # collective
            if self.task.own:
                figures |= self.task.own.compute(self.group)  # collective
            if not self.leaves_out:
                return figures, []
            everyone = self.group.gather_json([asdict(bad) for bad in left_out])  # collective
            return figures, [BadSample(**bad) for part in everyone for bad in part]
        except HardenedError:
            raise
        except ANY_FAILURE as error:  # WHY broad: the model and the test set are the user's code
            fix = "lower --eval_batch_size, then --resume the run"
            raise explain_failure(error, self.group, "evaluation failed", memory_fix=fix) from error

    def _add_own(self, output: Any, batch: Batch | None) -> None:  # Any: of the model
        """Count a batch in the user's metrics, if there are any. Collective: all ranks."""
        if self.task.own:
            has_any = batch is not None and batch.num_samples > 0
            self.task.own.add(output, batch if has_any else None, self.group)  # collective


def evaluate(
    parts: Parts, lock: threading.Lock, *, should_stop: Callable[[], object] = lambda: False
) -> Evaluation | None:
    """Measure loss and metrics on the test set in a run, as EvaluationLoop.run. Collective.

    With --evaluate_ema also those of the averaged weights. lock: Live.lock of the stepper.
    """
    assert parts.eval_loader is not None  # it is due for an evaluation
    loader = parts.eval_loader
    found = _evaluate_weights(parts, loader, should_stop)  # collective
    if found is None or parts.average is None or not parts.config.loop.evaluate_ema:
        return found
    with parts.average.in_model(lock):
        averaged = _evaluate_weights(parts, loader, should_stop)  # collective
    return averaged and replace(found, figures={**found.figures, **averaged.figures})


def _evaluate_weights(
    parts: Parts, loader: EvalLoader, should_stop: Callable[[], object]
) -> Evaluation | None:
    module, task = parts.replica.module, parts.task
    loop = EvaluationLoop(
        loader=loader,
        task=task,
        precision=parts.precision,
        group=parts.group,
        leaves_out=parts.config.loop.continue_on_error,
        inputs=parts.replica.inputs,
    )
    module.eval()
    try:
        totals = Totals(task, parts.device)
        with parts.group.tracker.within(Phase.EVALUATION), parts.replica.attributes.kept():
            found = loop.run(module, totals, should_stop=should_stop)  # collective
    finally:
        module.train()
    if found is None:
        return None
    figures, left_out = found
    names, kind = [LOSS, *(metric.name for metric in task.test_metrics)], _kind(parts)
    if parts.average is not None and parts.average.is_in_model:
        kind += EMA
    return Evaluation(
        {f"{kind}{name}": figures[name] for name in names if name in figures},
        int(figures["samples"]),
        tuple(f"{bad.name}: {bad.error}" for bad in left_out),
    )


def is_due_for_evaluation(parts: Parts, progress: Progress, *, ends_epoch: bool = False) -> bool:
    """Whether to measure the test set before the next step. The same on all ranks.

    WHY by evaluated_step: a run that was killed in an evaluation does it at its next start.
    """
    loop, step = parts.config.loop, progress.step
    if parts.eval_loader is None or progress.evaluated_step == step:
        return False
    is_last = step >= parts.length.total and loop.evaluates
    by_epochs = ends_epoch and (is_last or is_due(progress.epoch, loop.eval_every))
    return by_epochs or (step > 0 and is_due(step, loop.eval_every_steps))


def check_stop_when(parts: Parts) -> None:
    """Raise ConfigError if --stop_when names a metric that is never measured."""
    name = parts.config.loop.stop_when
    if not name:
        return
    if parts.eval_loader is None:
        raise ConfigError(
            f"stop_when {name}: dataset {parts.config.data.dataset} has no test set to measure it",
            fix="leave --stop_when out, or give a dataset that has one",
        )
    _stop_metric(parts)


def note_evaluation(parts: Parts, progress: Progress, evaluation: Evaluation) -> Best | None:
    """Note an evaluation for stop_when and best; return what to record if it is the best."""
    best = _decider(parts, parts.config.task.best_metric, setting="best_metric")
    value = evaluation.figures[best.name]
    progress.evaluated_step = progress.step
    is_best = progress.note_best(best, value)
    if parts.config.loop.stop_when:
        metric = _stop_metric(parts)
        progress.note_for_stop(metric, evaluation.figures[metric.name])
        if stops_early(parts, progress):
            why = why_stopped(metric, progress)
            log.info("stopping early after step %d: %s", progress.step, why)
    return best.record(value) if is_best else None


def why_stopped(metric: Metric, progress: Progress) -> str:
    times = counted(progress.num_worse, "evaluation")
    if abs(progress.stop_value) == NEVER_FINITE:
        return f"{metric.name} has been NaN or infinite in {times}"
    return f"{metric.name} has not been better than {progress.stop_value:.6g} in {times}"


def is_over(parts: Parts, progress: Progress) -> bool:
    return progress.step >= parts.length.total or stops_early(parts, progress)


def stops_early(parts: Parts, progress: Progress) -> bool:
    """Whether the run is over before its last step. The same on all ranks."""
    loop = parts.config.loop
    is_same = bool(loop.stop_when) and progress.stop_metric == _stop_metric(parts).name
    return is_same and progress.num_worse >= loop.patience


def _stop_metric(parts: Parts) -> Metric:
    return _decider(parts, parts.config.loop.stop_when, setting="stop_when")


def _decider(parts: Parts, name: str, *, setting: str) -> Metric:
    """Return the metric that a setting names: of the averages, where they are measured."""
    metric = metric_of(parts.task, name, setting=setting)
    is_averaged = parts.average is not None and parts.config.loop.evaluate_ema
    return replace(metric, name=f"{_kind(parts)}{EMA if is_averaged else ''}{metric.name}")


def _kind(parts: Parts) -> str:
    return PARTIAL if parts.eval_loader is not None and parts.eval_loader.is_partial else ""


def evaluate_run(settings: Resolved, group: Group, options: Mapping[str, str]) -> None:
    """Evaluate the best or newest checkpoint of what --resume names; report it. Collective."""
    config, output, averaged = settings.config, options["output"], options["weights"] == AVERAGED
    saved: list[Found] = []  # on rank 0

    def choose() -> Found:
        saved.append(open_checkpoint(Path(config.run.resume), prefer_best=True))
        return saved[0]

    shared = share_checkpoint(group, choose)  # collective
    assert shared is not None  # choose raises if there is none
    prefixes = (MODEL_PREFIX, AVERAGE) if averaged else (MODEL_PREFIX,)
    names = [name for name in shared.specs if name.startswith(prefixes)]
    weights = receive(group, shared, names, torch.device("cpu"))  # collective
    group.run_on_local_main(lambda: prepare_data(config.data), what="preparing data")  # collective
    saved_task = shared.meta["task"]
    leaves_out = config.loop.continue_on_error
    data = build_data(config.data, leaves_out=leaves_out, task=saved_task["name"])
    model = rebuild_model(model_tensors(weights, shared.meta), shared.meta).to(group.device)
    if shared.meta["channels_last"]:  # WHY: the same order of additions as in training
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch
    task = build_task(saved_task["name"], model, data, config.task)
    task.take_over(saved_task["learned"])
    MovingAttributes(model, task).load(shared.meta.get("attributes", {}))
    task.in_detail = True
    report = measure(model, task, data, config, group)  # collective
    report |= {
        "dataset": config.data.dataset,
        "is_data_of_training": data.fingerprint == shared.meta["dataset_fingerprint"],
        "is_averaged": any(name.startswith(AVERAGE) for name in names),
        "step": shared.meta["step"],
        "epoch": shared.meta["epoch"],
        "world_size": group.world_size,
    }

    def tell() -> None:
        path = saved[0].path
        run, name = path.parent.parent, f"evaluation-{path.name}.json"
        # WHY: the run of a colleague may be read, and not written to
        place = run / name if os.access(run, os.W_OK) else Path(f"{run.name}-{name}")
        place = Path(output) if output else place
        report["checkpoint"] = str(path)
        metrics = with_loss(report["loss"], described(task.test_metrics, report))
        table = report_lines(report)
        tell_report(report, metrics=metrics, table=table, place=place, output=sys.stdout)

    group.run_on_main(tell, what="writing the report")  # collective


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Format the rows that a task reports, which have equal keys, as a table if they are few."""
    rows = report.get("classes") or report.get("rows")
    if not rows:
        return []
    names = [name for name in rows[0] if name != "name"]
    if len(rows) > MAX_ROWS:
        return [f"{', '.join(names)} of each of {len(rows)}: in the full report"]
    table = [["", *names]]
    table += [[str(row["name"]), *(_shown(row[name]) for name in names)] for row in rows]
    lines = []
    for first, *cells in table:
        columns = "".join(f"{cell:>{_WIDTH}}" for cell in cells)
        lines.append(f"{first[:_NAME_WIDTH]:<{_NAME_WIDTH}}{columns}")
    return ["", *lines]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return number_text(value) if isinstance(value, float) else str(value)


def measure(
    model: nn.Module, task: Task, data: TaskData, config: Config, group: Group
) -> dict[str, Any]:
    loader = build_eval_loader(data, config, group, measures_all=True)
    if loader is None:
        raise DataError(
            f"dataset {config.data.dataset} has no test set to evaluate on",
            fix="choose one that has: --dataset NAME, or a callable that takes train=False",
        )
    loop = EvaluationLoop(
        loader=loader,
        task=task,
        precision=Precision(config.optimizer.amp, group.device),
        group=group,
        leaves_out=config.loop.continue_on_error,
        checks=True,
    )

    # WHY float64: a sum over many batches would lose digits in float32.
    totals = Totals(task, group.device, loss_dtype=torch.float64)
    collect_as_usual()
    try:
        found = loop.run(model, totals)  # collective
    finally:
        loader.close()
    assert found is not None  # no should_stop is given
    figures, bad = found
    report = task.report(*totals.gather(group))  # collective
    num_samples, expected = int(figures.pop("samples")), len(data.test)  # type: ignore[arg-type]  # it has one
    if num_samples + len(bad) != expected:
        raise StepError(f"{num_samples} of {expected} test samples were counted: a bug, report it")
    return {
        "num_samples": num_samples,
        "left_out": [
            {"sample": sample.index, "file": sample.file, "error": sample.error}
            for sample in sorted(bad, key=lambda sample: sample.index)
        ],
        **figures,
        **report,
    }
