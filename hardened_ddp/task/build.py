"""The choice of a run's task, by its data and settings."""

from torch import nn

from hardened_ddp.data.datasets import TaskData
from hardened_ddp.settings.optimizer import OptimizerConfig
from hardened_ddp.task.classification import Classification
from hardened_ddp.task.task import Task


def build_task(model: nn.Module, data: TaskData, config: OptimizerConfig) -> Task:
    """Build the task that model is trained on data for. Rank-local."""
    return Classification(
        model,
        num_classes=data.num_classes,
        class_names=data.class_names,
        label_smoothing=config.label_smoothing,
    )
