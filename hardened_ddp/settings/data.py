"""Settings of the data: dataset, batches, loading."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hardened_ddp.settings.declare import COUNT, COUNT_OR_ZERO, SECONDS_OR_ZERO, setting

AUTO_BATCH_SIZE = 32
"""What batch_size auto counts as where the global batch is not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    dataset: str = setting(
        "digits",
        "A built-in dataset, one of torchvision, hf:FOLDER_OR_NAME for one of the datasets "
        "library, or your own as package.module:callable.",
    )
    # Any: the arguments are those of a callable that we don't know
    dataset_args: Mapping[str, Any] = setting(
        {}, "Arguments for the dataset, as a mapping: {name: value, ...}."
    )
    data_dir: str = setting("data", "Folder where datasets are kept, per node.", may_differ=True)
    download: bool = setting(
        True,
        "Download a missing dataset, once per node. Off: a missing dataset is an error.",
        may_differ=True,
    )
    batch_size: int | None = setting(
        32,
        "Samples per rank in one backward. The optimizer sees batch_size x ranks x "
        "accumulation_steps. Too high: out of memory. auto: as many as fit, by trial.",
        bounds=COUNT,
    )
    global_batch_size: int | None = setting(
        None,
        "Samples of one optimizer step over all ranks; each rank's share is cut into backwards of "
        "batch_size. auto: batch_size x ranks x accumulation_steps, with 32 for a batch_size auto.",
        bounds=COUNT,
    )
    eval_batch_size: int = setting(
        256, "Samples per rank at once in evaluation; needs no memory for gradients.", bounds=COUNT
    )
    num_workers: int | None = setting(
        None,
        "Processes per rank that load samples. 0: none. auto: from the CPUs that a rank has. "
        "More than CPUs: slower.",
        bounds=COUNT_OR_ZERO,
        may_differ=True,
    )
    prefetch_factor: int = setting(
        2,
        "Batches that each worker keeps ready. Memory per rank: num_workers x this x one batch.",
        bounds=COUNT,
        may_differ=True,
    )
    pin_memory: bool | None = setting(
        None,
        "Load into page-locked memory, from which a GPU copies faster. auto: on with a GPU.",
        may_differ=True,
    )
    persistent_workers: bool = setting(
        True, "Keep the workers alive from one epoch to the next.", may_differ=True
    )
    multiprocessing_context: Literal["auto", "fork", "forkserver", "spawn"] = setting(
        "auto",
        "How workers start. fork is fastest, but unsafe for datasets that hold threads or CUDA.",
        may_differ=True,
    )
    loader_timeout_s: float = setting(
        120.0,
        "Seconds to wait for a batch before the workers count as hung. 0: wait for ever.",
        bounds=SECONDS_OR_ZERO,
        may_differ=True,
    )
    loader_quiet_s: float = setting(
        300.0,
        "Seconds without a fault before a loader that went on with fewer workers takes one step "
        "back up. Doubles each time that this was too soon. 0: never.",
        bounds=SECONDS_OR_ZERO,
        may_differ=True,
    )
    check_inputs: bool = setting(
        True,
        "Take a sample whose float inputs are NaN or infinite for a bad one. Off: for a model "
        "that knows what they mean.",
    )
    drop_last: bool = setting(
        False,
        "Leave out the last samples of an epoch that don't fill a global batch. Off: every "
        "sample exactly once.",
    )
    augment: bool = setting(
        False, "Random crops and flips of the training images; meant for photos, not for digits."
    )
