"""Every setting of a run: name, type, default, bounds and what it does.

Owns the frozen dataclasses that the other rooms receive. Settings are grouped in sections, but
their names are flat and unique: `batch_size` is a line of a YAML file and `--batch_size` a flag.
The text beside a setting is its only documentation: it feeds --help and config.yaml. WHY not a
docstring under the field: Python throws those away, so there would be a second copy to keep.

Does not own: reading values (cli.py, layers.py), rules that tie two settings (rules.py).
What goes wrong here: nothing at run time. A new field needs a line in config.yaml (see record.py).
Read next: schema.py, which reads these dataclasses as a table.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

T = TypeVar("T")

# Counts end up in C ints somewhere (batch sizes, worker counts); seeds in a signed 64-bit int.
LARGEST_COUNT = 2**31 - 1
LARGEST_SEED = 2**63 - 1
ONE_WEEK_S = 7 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The numbers that a setting may take; an open end does not belong to them."""

    low: float
    high: float
    is_low_open: bool = False
    is_high_open: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a text must look like: a regular expression, and the same in words."""

    pattern: str
    words: str


COUNT = Bounds(low=1, high=LARGEST_COUNT)
COUNT_OR_ZERO = Bounds(low=0, high=LARGEST_COUNT)
SEED = Bounds(low=0, high=LARGEST_SEED)
SECONDS = Bounds(low=0, high=ONE_WEEK_S, is_low_open=True)
SECONDS_OR_ZERO = Bounds(low=0, high=ONE_WEEK_S)
FRACTION = Bounds(low=0, high=1, is_high_open=True)
NOT_NEGATIVE = Bounds(low=0, high=float("inf"))
MEGABYTES = Bounds(low=0, high=65536, is_low_open=True)
NOT_EMPTY = Shape(pattern=".+", words="text that is not empty")
# WHY the first character: a leading dash reads as a flag, a leading dot hides the folder
FOLDER_NAME = Shape(
    pattern=r"([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?",
    words="letters, digits, dots, dashes, underscores; no dot or dash first; 128 at most",
)


AUTO_BATCH_SIZE = 32
"""What batch_size auto counts as where the global batch is not given."""

DURATION = Shape(
    pattern=r"([0-9]+(\.[0-9]+)?d)?([0-9]+(\.[0-9]+)?h)?([0-9]+(\.[0-9]+)?m)?([0-9]+(\.[0-9]+)?s)?",
    words="a time such as 3h55m, 1d12h or 90s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a setting beside its name, type and default."""

    text: str
    bounds: Bounds | None
    bare: str
    shape: Shape
    may_differ: bool


def setting(
    default: T,
    text: str,
    *,
    bounds: Bounds | None = None,
    bare: str = "",
    shape: Shape = NOT_EMPTY,
    may_differ: bool = False,
) -> T:
    """Declare a field: its default, what it does, and what values it takes.

    bare: what the flag means without a value. shape: what a text must look like.
    may_differ: ranks may have different values, such as a path on their own disk.
    """
    facts = Facts(text=text, bounds=bounds, bare=bare, shape=shape, may_differ=may_differ)
    metadata = {"facts": facts}
    if isinstance(default, dict):
        return field(default_factory=partial(copy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    single_gpu: bool = setting(
        False, "Train on one GPU in this one process, without a process group."
    )
    cpu_only: bool = setting(
        False, "Train on the CPU even if there are GPUs. Several ranks then talk over gloo."
    )
    backend: Literal["auto", "nccl", "gloo"] = setting(
        "auto", "What carries the collectives. auto: nccl between GPUs, gloo between CPUs."
    )
    timeout_s: float = setting(
        600.0,
        "Seconds that a collective waits for the other ranks. Too low: a slow disk ends the run; "
        "too high: a dead rank is noticed late.",
        bounds=SECONDS,
    )
    seed: int = setting(
        0,
        "Fixes initial weights, sample order, augmentation and dropout. The same seed gives the "
        "same run.",
        bounds=SEED,
    )
    deterministic: bool = setting(
        False,
        "Ask torch for deterministic kernels, so that two GPU runs agree bit for bit. Slower; "
        "a kernel that has no such form is named in a warning.",
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    model: str = setting(
        "simple_cnn",
        "simple_cnn, mlp, one of torchvision such as resnet18, hf:FOLDER_OR_NAME for an image "
        "classifier of transformers, or your own as package.module:callable.",
    )
    # Any: the arguments are those of a callable that we don't know
    model_args: Mapping[str, Any] = setting(
        {}, "Arguments for the model, as a mapping: {name: value, ...}."
    )
    pretrained: bool = setting(
        False, "Start from torchvision's published weights; only for its models (hf: always does)."
    )
    sync_batchnorm: bool = setting(
        False,
        "Batch normalization over all ranks instead of each rank's own samples. GPU only; "
        "costs one collective per layer.",
    )
    gradient_checkpointing: bool = setting(
        False, "Compute activations again in backward: less memory, about a third more time."
    )
    channels_last: bool | None = setting(
        None,
        "Store images with channels last. auto: measured on the model before a run of more "
        "than ten minutes, and kept when it is at least 1.1 times as fast; off if deterministic.",
    )
    compile: bool = setting(
        False, "Compile the model with torch.compile: a slow first step, faster ones after it."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpConfig:
    find_unused_parameters: Literal["auto", "on", "off"] = setting(
        "auto",
        "Look in each step for parameters that get no gradient. auto: look once, before the "
        "first step. off with such parameters: the run stops.",
        bare="on",
    )
    static_graph: bool = setting(
        False,
        "Promise that every step uses the same parameters in the same way; lets DDP do less. "
        "A broken promise gives wrong gradients.",
    )
    gradient_as_bucket_view: bool = setting(
        True, "Let gradients live in DDP's buckets: saves a copy and the memory of one model."
    )
    bucket_cap_mb: float = setting(
        25.0,
        "MiB of gradients that are sent together. Small: starts earlier, more messages.",
        bounds=MEGABYTES,
    )
    shared_memory: bool = setting(
        True,
        "Sum gradients of CPU ranks on one machine through shared memory, after backward. false: "
        "by DDP's hooks over gloo, as between machines.",
    )
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = setting(
        "none",
        "Compress gradients on their way between ranks. Less to send, rounded gradients; "
        "powersgd also does not resume bit for bit.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    optimizer: Literal["adamw", "adam", "sgd"] = setting("adamw", "What updates the weights.")
    learning_rate: float = setting(
        3e-3,
        "Peak learning rate. Too high: the loss becomes NaN; too low: it hardly falls.",
        bounds=NOT_NEGATIVE,
    )
    weight_decay: float = setting(
        0.01,
        "Pull of the weights to zero; adamw keeps it apart from the gradient.",
        bounds=NOT_NEGATIVE,
    )
    momentum: float = setting(0.9, "Momentum of sgd; the others don't use it.", bounds=FRACTION)
    lr_schedule: Literal["constant", "cosine", "linear", "step"] = setting(
        "cosine",
        "Learning rate after the warm-up. cosine, linear: down to 0 at the end; step: a tenth at "
        "each third of the run.",
    )
    warmup_steps: int = setting(
        0, "Steps in which the learning rate rises to its peak.", bounds=COUNT_OR_ZERO
    )
    accumulation_steps: int = setting(
        1,
        "Backwards before one optimizer step: a larger global batch in the same memory.",
        bounds=COUNT,
    )
    clip_grad_norm: float = setting(
        0.0, "Shorten a gradient that is longer than this. 0: never.", bounds=NOT_NEGATIVE
    )
    label_smoothing: float = setting(
        0.0, "Share of each target that is spread over all classes.", bounds=FRACTION
    )
    amp: Literal["auto", "off", "bf16", "fp16"] = setting(
        "auto",
        "Mixed precision. auto: bf16, or fp16 on a GPU without bf16; off on the CPU. fp16 scales "
        "the loss, because small gradients vanish in it.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    epochs: int = setting(5, "How often to go through the training samples.", bounds=COUNT)
    max_steps: int = setting(
        0, "Stop after this many optimizer steps. 0: no limit.", bounds=COUNT_OR_ZERO
    )
    eval_every: int = setting(
        1, "Evaluate after every so many epochs. 0: never.", bounds=COUNT_OR_ZERO
    )
    log_interval: int = setting(
        50,
        "Steps from one progress report to the next. Each one waits for the GPU once.",
        bounds=COUNT,
    )
    time_limit: str = setting(
        "",
        "Stop by itself so long after the launcher started, saved and ready to go on: 3h55m, 90s. "
        "Choose it a little below the job's limit. Empty: no limit.",
        shape=DURATION,
    )
    stop_grace_s: float = setting(
        30.0,
        "Seconds from the launcher's SIGTERM to its SIGKILL; 30 in torchrun and Slurm. A rank that "
        "still waits for another one after two thirds of them saves by itself and leaves.",
        bounds=SECONDS,
        may_differ=True,
    )
    hang_after_s: float = setting(
        60.0,
        "Seconds in one phase of a step after which a rank counts as hung, if that is also 5 times "
        "the longest such phase so far. Start-up, first steps and evaluation may take 30 times as "
        "long. 0: no watch.",
        bounds=SECONDS_OR_ZERO,
        may_differ=True,
    )
    debug: bool = setting(
        False,
        "Check more and say more: an error in backward names its forward line, torch's "
        "distributed checks, every rank's log. Slow.",
    )
    step_retry: Literal["on", "off"] = setting(
        "on",
        "When one rank fails inside a step, do the window again on all: out of memory with smaller "
        "micro-batches. off: the first exception ends the run.",
    )
    continue_on_error: bool = setting(
        False,
        "Leave a bad sample out, count it and name it, instead of stopping the run.",
    )
    max_errors: int = setting(
        100, "With continue_on_error: stop after more left-out samples than this.", bounds=COUNT
    )
    rollback_after: int = setting(
        3,
        "With continue_on_error: after so many windows in a row whose loss or gradient is not "
        "finite, go back to the last good checkpoint; if they come again, stop. 0: never.",
        bounds=COUNT_OR_ZERO,
    )
    check_replicas_every: int = setting(
        1000,
        "Steps from one comparison of the ranks' weights and optimizer state to the next; there is "
        "one at the end too. A rank that differs is named, and the state mended. 0: never.",
        bounds=COUNT_OR_ZERO,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    output_dir: str = setting("runs", "Folder of the run folders.", may_differ=True)
    run_name: str = setting(
        "",
        "Name of the run folder. Empty: generated from the time. The name of an earlier run "
        "continues it.",
        shape=FOLDER_NAME,
    )
    checkpoint_every_steps: int | None = setting(
        None,
        "Write a checkpoint after every so many steps. auto: as often as costs at most 1 % of the "
        "time, by measurement. 0: never. At the end there is always one.",
        bounds=COUNT_OR_ZERO,
    )
    checkpoint_every_epochs: int = setting(
        0, "Write a checkpoint after every so many epochs too. 0: no.", bounds=COUNT_OR_ZERO
    )
    keep_last: int = setting(
        3, "Checkpoints to keep, the best one aside. Older ones are removed.", bounds=COUNT
    )
    resume: str = setting(
        "auto",
        "auto: continue run_name if it has a checkpoint. never: start anew. newest: the run with "
        "the newest checkpoint. PATH: that run folder, or a checkpoint folder inside one.",
    )
    tensorboard: bool = setting(
        True, "Write curves for TensorBoard into the run folder.", may_differ=True
    )
    progress: bool | None = setting(
        None, "Show a progress line. auto: if the output is a terminal.", may_differ=True
    )
    ledger: bool = setting(
        False,
        "Write down the samples of each step, 4 bytes each; verify-ledger then proves that each "
        "epoch took every sample exactly once.",
    )
    profile: bool = setting(
        False,
        "Record a few steps with torch.profiler into the run folder; those steps are slower.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of one run, by section. The metadata is the section's title."""

    device: DeviceConfig = field(
        default_factory=DeviceConfig, metadata={"title": "Device and process group"}
    )
    data: DataConfig = field(default_factory=DataConfig, metadata={"title": "Data"})
    model: ModelConfig = field(default_factory=ModelConfig, metadata={"title": "Model"})
    ddp: DdpConfig = field(default_factory=DdpConfig, metadata={"title": "DistributedDataParallel"})
    optimizer: OptimizerConfig = field(
        default_factory=OptimizerConfig, metadata={"title": "Optimizer and precision"}
    )
    loop: LoopConfig = field(default_factory=LoopConfig, metadata={"title": "Training loop"})
    run: RunConfig = field(
        default_factory=RunConfig, metadata={"title": "Run folder, checkpoints and reports"}
    )
