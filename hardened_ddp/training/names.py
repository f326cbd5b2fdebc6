"""What the settings name, checked on every rank before the ranks meet.

Owns the list of what is checked: a name that does not exist, or code of the user's that can't be
imported, ends a run at once, without a process group and without a run folder.
Does not own: the checks (each beside what it names), the call of what was found.
"""

from hardened_ddp.data.foreign_code import import_callable
from hardened_ddp.data.sources.datasets import find_source
from hardened_ddp.errors import DataError, OptimizerError
from hardened_ddp.model.optimizer import find_optimizer
from hardened_ddp.model.zoo import check_model
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.declare import ImportPath
from hardened_ddp.task.build import check_metrics, find_task
from hardened_ddp.training.tracking import check_trackers


def check_names(config: Config) -> None:
    """Raise the HardenedError of whatever a setting names and is not there. Rank-local."""
    check_trackers(config)
    find_source(config.data.dataset, config.data)
    check_model(config.model.model)
    if config.task.task != "auto":
        find_task(config.task.task)
    check_metrics(config.task, stop_when=config.loop.stop_when)
    find_optimizer(config.optimizer)
    if isinstance(config.optimizer.lr_schedule, ImportPath):
        path = config.optimizer.lr_schedule
        import_callable(path, setting="lr_schedule", error=OptimizerError)
    if isinstance(config.data.collate, ImportPath):
        import_callable(config.data.collate, setting="collate", error=DataError)
