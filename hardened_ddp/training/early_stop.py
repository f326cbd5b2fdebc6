"""Early stopping: the run ends when a metric of the test set no longer improves.

Owns the decision. It follows from numbers that are equal on all ranks and in every checkpoint, so
all ranks stop at the same evaluation, and a resumed run stops where the unbroken one would have.
"""

import logging

from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.wording import counted
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import NEVER_FINITE, Progress
from hardened_ddp.task.build import metric_of
from hardened_ddp.task.task import Metric
from hardened_ddp.training.evaluation import Evaluation

log = logging.getLogger(__name__)


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
    _metric(parts)


def note_evaluation(parts: Parts, progress: Progress, evaluation: Evaluation) -> None:
    """Count the evaluations since the best one. Rank-local, on all ranks with the same numbers."""
    if not parts.config.loop.stop_when:
        return
    metric = _metric(parts)
    progress.note_for_stop(metric, evaluation.figures[metric.name])
    if stops_early(parts, progress):
        log.info("stopping early after step %d: %s", progress.step, why_stopped(metric, progress))


def why_stopped(metric: Metric, progress: Progress) -> str:
    """Say what did not improve, and for how long."""
    times = counted(progress.num_worse, "evaluation")
    if abs(progress.stop_value) == NEVER_FINITE:
        return f"{metric.name} has been NaN or infinite in {times}"
    return f"{metric.name} has not been better than {progress.stop_value:.6g} in {times}"


def stops_early(parts: Parts, progress: Progress) -> bool:
    """Whether the run is over before its last step. The same on all ranks."""
    loop = parts.config.loop
    is_same = progress.stop_metric == _metric(parts).name if loop.stop_when else False
    return is_same and progress.num_worse >= loop.patience


def _metric(parts: Parts) -> Metric:
    return metric_of(parts.task, parts.config.loop.stop_when, setting="stop_when")
