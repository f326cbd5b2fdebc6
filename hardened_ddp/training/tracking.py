"""Which trackers a run has, by --tracker.

Owns their names, and the checks before the ranks meet. Does not own: how they are called
(reporting/trackers.py).
"""

import importlib.util
from functools import partial
from pathlib import Path

from hardened_ddp.data.foreign_code import import_callable
from hardened_ddp.errors import ConfigError, MissingPackageError
from hardened_ddp.reporting.trackers import Tracker, TrackerThread, WandbTracker
from hardened_ddp.settings.config import TENSORBOARD, WANDB, Config, tracker_names
from hardened_ddp.settings.schema import flatten
from hardened_ddp.settings.typed_command import pip_command


def check_trackers(config: Config) -> None:
    """Raise ConfigError or MissingPackageError if a tracker that was asked for can't be there."""
    for name in tracker_names(config.run.tracker):
        if name == WANDB and importlib.util.find_spec(WANDB) is None:
            raise MissingPackageError(
                "tracker wandb: Weights & Biases is not installed",
                fix=pip_command("requirements-extras.txt", "wandb"),
            )
        if ":" in name:
            import_callable(name, setting="tracker", error=ConfigError)


def has_tensorboard(config: Config) -> bool:
    """Whether curves are written for TensorBoard."""
    return config.run.tensorboard and TENSORBOARD in tracker_names(config.run.tracker)


def make_trackers(config: Config, folder: Path, *, is_main: bool) -> list[TrackerThread]:
    """Make the trackers of a run; they start with the first values. None but on rank 0."""
    if not is_main:
        return []
    names = [name for name in tracker_names(config.run.tracker) if name != TENSORBOARD]
    return [TrackerThread(name, partial(_make, name, config, folder)) for name in names]


def _make(name: str, config: Config, folder: Path) -> Tracker:
    settings = flatten(config)
    if name == WANDB:
        return WandbTracker(folder=folder, settings=settings)
    make = import_callable(name, setting="tracker", error=ConfigError)
    tracker: Tracker = make(folder=folder, settings=settings)
    return tracker
