"""Settings of the task: what the model learns, what is measured, and which state is the best."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardened_ddp.settings.declare import setting

TASKS = ("auto", "classification", "multilabel", "regression", "tokens", "segmentation", "own")
"""The tasks that are built in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    task: str = setting(
        "auto",
        "What the output is compared with: classification, multilabel, regression, tokens, "
        "segmentation, own (the model returns its loss), or your class as package.module:Class. "
        "auto: by the labels and the output of the first batch.",
    )
    # Any: the arguments are those of a class that we don't know
    task_args: Mapping[str, Any] = setting(
        {}, "Arguments of the task, as a mapping: {loss: l1}, {ignore_index: 255}."
    )
    metrics: Mapping[str, Any] = setting(
        {},
        "Further metrics of the test set, as a mapping: {name: package.module:Class}. A class has "
        "update(output, labels), compute() and reset(), as in torchmetrics.",
    )
    best_metric: str = setting(
        "auto",
        "The metric of the test set that decides which checkpoint is the best: loss, or one of the "
        "task. auto: the first one of the task, or the loss if it has none.",
    )
