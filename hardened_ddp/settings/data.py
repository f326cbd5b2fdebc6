"""Settings of the data: dataset, batches, loading."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hardened_ddp.settings.declare import (
    COUNT,
    COUNT_OR_ZERO,
    SECONDS_OR_ZERO,
    ImportPath,
    setting,
)

AUTO_BATCH_SIZE = 32
"""What batch_size auto counts as where the global batch is not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    dataset: str = setting(
        "digits",
        "digits, synthetic, image_folder, a torchvision dataset such as cifar10, "
        "hf:FOLDER_OR_NAME for a Hugging Face dataset, text:GLOB, parquet:GLOB or tar:GLOB for "
        "files that are read as a stream, or your own as package.module:callable.",
        is_place=True,
    )
    # Any: the arguments are those of a callable that we don't know
    dataset_args: Mapping[str, Any] = setting(
        {}, "Arguments of the dataset, as a mapping: {name: value, ...}."
    )
    collate: Literal["auto"] | ImportPath = setting(
        "auto",
        "How samples become a batch, such as with padding. auto: by the dataset's own collate_fn "
        "if it has one, else by torch's default. Or your own function, which takes a list of "
        "samples and returns (inputs, labels).",
        path="package.module:callable",
    )
    split_by_length: bool | None = setting(
        None,
        "Collate a micro-batch in two parts, its shorter and its longer samples, where that leaves "
        "out 15 % of its values or more, all of them padding. Order, steps and gradient stay as "
        "they are. auto: on the CPU, where a trial shows that padding does not change a sample's "
        "loss, and where enough is saved for this model. true: in any case, also on a GPU.",
    )
    data_dir: str = setting(
        "data", "Folder of the datasets, on each node.", may_differ=True, is_place=True
    )
    download: bool = setting(
        True,
        "Download a missing dataset, once per node. false: a missing dataset is an error.",
        may_differ=True,
    )
    batch_size: int | None = setting(
        32,
        "Samples per rank in one forward and backward. One optimizer step sees batch_size x ranks "
        "x accumulation_steps samples. Too high: out of memory. auto: as many as fit, found by "
        "trial.",
        bounds=COUNT,
    )
    global_batch_size: int | None = setting(
        None,
        "Samples of one optimizer step over all ranks. Each rank splits its share into "
        "micro-batches of batch_size. auto: batch_size x ranks x accumulation_steps, where a "
        "batch_size of auto counts as 32.",
        bounds=COUNT,
    )
    eval_batch_size: int = setting(
        256,
        "Samples per rank in one forward of evaluation. It may be larger than batch_size, because "
        "evaluation keeps no gradients.",
        bounds=COUNT,
    )
    num_workers: int | None = setting(
        None,
        "Processes per rank that load samples. 0: load in the training process. auto: from the "
        "number of CPUs per rank. More workers than CPUs: slower.",
        bounds=COUNT_OR_ZERO,
        may_differ=True,
    )
    prefetch_factor: int = setting(
        2,
        "Batches that each worker loads ahead. Memory per rank: num_workers x prefetch_factor x "
        "one batch.",
        bounds=COUNT,
        may_differ=True,
    )
    pin_memory: bool | None = setting(
        None,
        "Load into page-locked memory, from which copies to a GPU are faster. auto: on with a GPU.",
        may_differ=True,
    )
    persistent_workers: bool = setting(
        True, "Keep the workers alive between epochs.", may_differ=True
    )
    multiprocessing_context: Literal["auto", "fork", "forkserver", "spawn"] = setting(
        "auto",
        "How workers are started. fork is the fastest, but unsafe for datasets that hold threads "
        "or CUDA state. auto: forkserver, or spawn where there is none.",
        may_differ=True,
    )
    loader_timeout_s: float = setting(
        120.0,
        "Seconds to wait for a batch before the workers, or a rank that reads without any, count "
        "as hung. 0: wait as long as it takes (the other ranks wait for timeout_s).",
        bounds=SECONDS_OR_ZERO,
        may_differ=True,
    )
    loader_quiet_s: float = setting(
        300.0,
        "Seconds without a fault before a loader that fell back to fewer workers goes back up by "
        "one level. Doubles each time a new fault shows that this was too early. 0: never go back "
        "up.",
        bounds=SECONDS_OR_ZERO,
        may_differ=True,
    )
    check_inputs: bool = setting(
        True,
        "Treat a sample whose float inputs contain NaN or infinity as a bad sample. false: for a "
        "model that handles such values.",
    )
    shuffle_block: int = setting(
        16,
        "Of a stream: samples are shuffled within so many consecutive ones of a shard, besides "
        "taking turns between shards. Each rank holds some blocks of each of its shards in memory. "
        "1: no shuffling within a shard.",
        bounds=COUNT,
    )
    streaming: bool = setting(
        False,
        "Read a Hugging Face dataset (hf:...) as a stream, from the start to the end of its files, "
        "without a copy in the cache.",
    )
    drop_last: bool = setting(
        False,
        "Leave out the last samples of an epoch if they don't fill a global batch. false: every "
        "sample exactly once per epoch.",
    )
    augment: bool = setting(
        False, "Random crops and flips of the training images. Meant for photos, not for digits."
    )
