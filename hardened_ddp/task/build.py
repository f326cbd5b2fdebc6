"""Building a run's task, and which one fits the labels and the output of a batch: --task auto.

Also whether a score of it, which may be the user's, can be added up.
Where labels fit two tasks, or none, it refuses: a wrong guess would train, and wrongly.
Does not own: the first batch (preflight/probe.py).
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.checks import Limit
from hardened_ddp.data.foreign_code import import_callable, told_as
from hardened_ddp.data.sources.datasets import TaskData
from hardened_ddp.errors import ConfigError, ModelError
from hardened_ddp.settings.config import TASKS, TaskConfig
from hardened_ddp.task.classification import Classification
from hardened_ddp.task.multilabel import Multilabel
from hardened_ddp.task.output import (
    are_shares,
    described,
    described_labels,
    refuse_several_losses,
    split_output,
)
from hardened_ddp.task.own import Own
from hardened_ddp.task.own_metrics import OwnMetrics
from hardened_ddp.task.regression import Regression
from hardened_ddp.task.segmentation import Segmentation
from hardened_ddp.task.task import LOSS, LOSS_METRIC, Metric, Score, Task
from hardened_ddp.task.tokens import IGNORED, Tokens

CHOICES = TASKS[1:]
BUILT_IN: Mapping[str, type[Task]] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "tokens": Tokens,
    "segmentation": Segmentation,
    "own": Own,
}


def check_metrics(config: TaskConfig, *, stop_when: str) -> None:
    """Raise ConfigError for metrics that can't be built, or names that no metric has. Rank-local.

    Before any data are seen: of a task that is built in, or of all of them where auto chooses.
    """
    name = config.task
    OwnMetrics(config.metrics)  # raises if one can't be built
    if ":" in name:
        return  # what it measures is known when it is built
    tasks = BUILT_IN.values() if name == "auto" else [BUILT_IN[name]]
    known = {*config.metrics, LOSS, *(metric.name for task in tasks for metric in task.metrics)}
    asked = {"best_metric": config.best_metric, "stop_when": stop_when}
    for setting, wanted in asked.items():
        if wanted not in {"", "auto", *known}:
            raise ConfigError(
                f"{setting}: there is no metric {wanted!r} with --task {name}",
                fix=f"known: {', '.join(sorted(known))}",
            )


def find_task(name: str) -> Callable[..., Any]:
    """Return what builds a task, a built-in one or the user's. Rank-local. Raises ConfigError."""
    if ":" in name:
        return import_callable(name, setting="task", error=ConfigError)
    return BUILT_IN[name]


def build_task(name: str, model: nn.Module, data: TaskData, config: TaskConfig) -> Task:
    """Build the task called name. Rank-local. Raises ConfigError."""
    build = find_task(name)
    facts = {
        "model": model,
        "num_classes": data.num_classes,
        "num_labels": data.num_classes,
        "num_outputs": data.label_size,
        "class_names": data.class_names,
        "input_shape": data.input_shape,
        "label_smoothing": config.label_smoothing,
    }
    what = f"--task {name} can't be built with task_args {dict(config.task_args)}"
    with told_as(ConfigError, what, fix="check --task_args against the constructor of the task"):
        wanted = inspect.signature(build).parameters
        known = {key: value for key, value in facts.items() if key in wanted}
        task: object = build(**{**known, **config.task_args})
    if not isinstance(task, Task):
        raise ConfigError(
            f"--task {name} returned a {type(task).__name__}, which is no Task",
            fix="derive it from hardened_ddp.task.task.Task, and define score(output, batch)",
        )
    taken = {"samples", LOSS, *(metric.name for metric in task.metrics)}
    if twice := sorted(taken & config.metrics.keys()):
        raise ConfigError(
            f"metrics: {', '.join(twice)} is measured by the task {name} itself, or stands for "
            "something else in its results",
            fix="give your metric another name",
        )
    task.attach(model, name, OwnMetrics(config.metrics))
    metric_of(task, config.best_metric, setting="best_metric")  # raises if there is none
    return task


def check_score(task: Task, score: Any) -> Score:  # Any: whatever a user's task returned
    """Return score, or raise ModelError if it can't be added up or has no gradient.

    It reads values, so it waits for the device: trials before training call it, no step does.
    """
    if not isinstance(score, Score):
        raise _wrong(task, f"score() returned a {type(score).__name__}, not a Score")
    loss, count = score.loss_sum, score.count
    if not _is_scalar(loss) or not isinstance(loss, torch.Tensor):
        raise _wrong(task, f"loss_sum is not a scalar tensor but {described(loss)}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise _wrong(task, "loss_sum does not depend on any parameter that is trained")
    if not _is_scalar(count) or not 0 <= float(count) < float("inf"):
        found = f"{float(count):g}" if _is_scalar(count) else described(count)
        raise _wrong(task, f"count is {found}, not a number from 0")
    missing = [metric.name for metric in task.metrics if metric.name not in score.metrics]
    has_own_sums = (type(task).sums, type(task).sums_of) != (Task.sums, Task.sums_of)
    if missing and not has_own_sums:
        raise _wrong(task, f"score() did not return {', '.join(missing)}")
    return score


def _wrong(task: Task, found: str) -> ModelError:
    return ModelError(
        f"task {type(task).__name__}: {found}",
        fix="return Score(losses.sum(), batch.num_samples, metrics): the sum of the losses, with "
        "its graph; what it is a mean over; of each metric the sum, or (sum, count): docs/TASKS.md",
    )


def _is_scalar(value: Any) -> bool:  # Any: as above
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def label_limit(task: Task) -> Limit | None:
    """Return what labels may be, if another one would raise in the loss; None: anything."""
    match task:
        case Tokens() if not task.uses_model_loss:
            return Limit(None, task.vocabulary, "the vocabulary", task.ignore_index)
        case Segmentation():
            return Limit(None, task.num_classes, "the task", task.ignore_index)
        case Classification():
            return Limit(None, task.num_classes, "the task", IGNORED)
    return None


def metric_of(task: Task, name: str, *, setting: str) -> Metric:
    """Return the metric of the test set that a setting names.

    name: loss, or one of the task's; auto: the task's first one, or the loss. Raises ConfigError.
    """
    known = {metric.name: metric for metric in (*task.test_metrics, LOSS_METRIC)}
    if name == "auto":
        return next(iter(known.values()))
    if name not in known:
        raise ConfigError(
            f"{setting}: this task has no metric {name!r}", fix=f"--{setting} {' | '.join(known)}"
        )
    return known[name]


def task_that_fits(output: Any, batch: Batch) -> tuple[str, str]:  # Any: whatever a model returned
    """Return the name of the task that fits output and batch.targets, and why.

    Raises ModelError with the choices if none does, or more than one.
    """
    refuse_several_losses(output)
    logits, loss = split_output(output)
    labels = batch.targets
    if logits is None or not isinstance(labels, torch.Tensor):
        found = "no logits" if logits is None else f"the labels are {described_labels(labels)}"
        if loss is not None:
            return "own", f"the model returns its loss, and {found}"
        raise _undecided(f"{found}, and the model returns no loss", output)
    shapes = f"labels {described_labels(labels)}, output {tuple(logits.shape)}"
    name = _by_shape(logits, labels)
    if name:
        return name, shapes
    if loss is not None:
        return "own", f"the model returns its loss, and no other task fits: {shapes}"
    raise _undecided(f"{shapes}: they fit no task, or more than one", output)


def _by_shape(logits: torch.Tensor, labels: torch.Tensor) -> str:
    """Return the one task that fits; empty if none does, or more than one."""
    if not labels.is_floating_point() and labels.dtype != torch.bool:
        if labels.dim() == 1 and logits.dim() == 2 and logits.shape[1] > 1:
            return "classification"
        if labels.dim() == 2 and logits.dim() == 3 and logits.shape[:2] == labels.shape:
            return "tokens"
        if labels.dim() in (3, 4) and logits.dim() == labels.dim() + 1:
            is_map = logits.shape[0] == labels.shape[0] and logits.shape[2:] == labels.shape[1:]
            return "segmentation" if is_map else ""
    is_binary = bool(((labels == 0) | (labels == 1)).all())
    is_table = labels.dim() == 2 and labels.shape == logits.shape and labels.shape[1] > 1
    if is_table and is_binary and bool(labels.any()) and not bool(labels.all()):
        return "multilabel"
    if not labels.is_floating_point():
        return ""
    is_alike = logits.numel() == labels.numel() and len(logits) == len(labels)
    return "regression" if is_alike and not is_binary and not are_shares(labels) else ""


def _undecided(why: str, output: Any) -> ModelError:
    return ModelError(
        f"--task auto can't decide: {why} (the model returned {described(output)})",
        fix=f"choose one: --task {' | '.join(CHOICES)} | package.module:Class; docs/TASKS.md has "
        "what each takes",
    )
