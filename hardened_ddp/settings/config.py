"""All settings of a run, by section: names, defaults, what each one does and takes.

Each section is a frozen dataclass; the other layers receive the section that they need. Names are
flat and unique over all sections: `batch_size` is a line of a YAML file and `--batch_size` a flag.
A field's type says what the setting takes, the docstring below it what it does: that is its only
documentation, which --help and config.yaml show.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")

LARGEST_COUNT = 2**31 - 1  # counts end up in C ints somewhere: batch sizes, worker counts
ONE_WEEK_S = 7 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The numbers that a setting may take; an open end is not one of them."""

    low: float
    high: float
    is_low_open: bool = False
    is_high_open: bool = False

    def holds(self, value: float) -> bool:
        """Say whether value is a finite number between the ends."""
        is_above = value > self.low if self.is_low_open else value >= self.low
        is_below = value < self.high if self.is_high_open else value <= self.high
        return is_above and is_below and value < math.inf

    def words(self, *, in_full: bool = False) -> str:
        """Say which numbers these are; in_full: also that a count must fit into 32 bits."""
        low = f"above {self.low:g}" if self.is_low_open else f"{self.low:g} or more"
        if math.isinf(self.high) or (self.high >= LARGEST_COUNT and not in_full):
            return low
        return f"{low}, {'below' if self.is_high_open else 'at most'} {self.high}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a text must look like: a regular expression, and the same in words."""

    pattern: str
    words: str


class ImportPath(str):
    """A user's class or function, package.module:name, where a setting also has words."""

    __slots__ = ()


IMPORT_PATH = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
ANY_TEXT = Shape(pattern=".*", words="text")
NOT_EMPTY = Shape(pattern=".+", words="text that is not empty")
IS_PLACE = "it names a folder or a file of this machine, so a URL is refused"
MAY_DIFFER = "ranks may have different values, such as a path on their own disk"

Count = Annotated[int, Bounds(low=1, high=LARGEST_COUNT)]
CountOrZero = Annotated[int, Bounds(low=0, high=LARGEST_COUNT)]
Seconds = Annotated[float, Bounds(low=0, high=ONE_WEEK_S, is_low_open=True)]
SecondsOrZero = Annotated[float, Bounds(low=0, high=ONE_WEEK_S)]
Fraction = Annotated[float, Bounds(low=0, high=1, is_high_open=True)]
NotNegative = Annotated[float, Bounds(low=0, high=math.inf)]
Text = Annotated[str, ANY_TEXT]
Place = Annotated[str, IS_PLACE]
PlaceOrNone = Annotated[str, ANY_TEXT, IS_PLACE]
OwnClass = Annotated[ImportPath, Shape(pattern=IMPORT_PATH, words="package.module:Class")]
OwnCallable = Annotated[ImportPath, Shape(pattern=IMPORT_PATH, words="package.module:callable")]
Arguments = Mapping[str, Any]  # Any: those of a callable that we don't know
Local = Annotated[T, MAY_DIFFER]

Backend = Literal["auto", "nccl", "gloo"]
Seed = Annotated[int, Bounds(low=0, high=2**63 - 1)]  # torch takes a signed 64-bit int

TASKS = ("auto", "classification", "multilabel", "regression", "tokens", "segmentation", "own")
"""The tasks that are built in."""

FindUnused = Literal["auto", "on", "off"]
Megabytes = Annotated[float, Bounds(low=0, high=65536, is_low_open=True)]

OptimizerName = Literal["adamw", "adam", "sgd", "muon"]
LrSchedule = Literal["auto", "constant", "cosine", "linear", "step"]
Amp = Literal["auto", "off", "bf16", "fp16"]

DURATION = Shape(
    pattern=r"([0-9]+(\.[0-9]+)?d)?([0-9]+(\.[0-9]+)?h)?([0-9]+(\.[0-9]+)?m)?([0-9]+(\.[0-9]+)?s)?",
    words="a time such as 3h55m, 1d12h or 90s",
)

# WHY the first character: a leading dash reads as a flag, a leading dot hides the folder
FOLDER_NAME = Shape(
    pattern=r"([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?",
    words="letters, digits, dots, dashes, underscores; no dot or dash first; 128 at most",
)

# WHY no @ and no ?: credentials in it would stand in config.yaml and in logs
MIRROR_URL = Shape(
    pattern=r"([a-z][a-z0-9+.-]*://[^@?#]+)?",
    words="a URL such as s3://bucket/runs or file:///mnt/runs, without credentials",
)

EACH_ONCE, BALANCED, WEIGHTS_FILE = "none", "balanced", "weights:"
SAMPLING = Shape(
    pattern=rf"{EACH_ONCE}|{BALANCED}|{WEIGHTS_FILE}.+|{IMPORT_PATH}",
    words=f"{EACH_ONCE}, {BALANCED}, {WEIGHTS_FILE}FILE, package.module:callable",
)

TENSORBOARD, WANDB, MLFLOW, NO_TRACKER = "tensorboard", "wandb", "mlflow", "none"
_ONE_TRACKER = rf"({TENSORBOARD}|{WANDB}|{MLFLOW}|{IMPORT_PATH})"
TRACKERS = Shape(
    pattern=rf"{NO_TRACKER}|{_ONE_TRACKER}( *, *{_ONE_TRACKER})*",
    words=f"{TENSORBOARD}, {WANDB}, {MLFLOW}, package.module:Class, separated by commas, or "
    f"{NO_TRACKER}",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    single_gpu: bool = False
    """Train on one GPU in this single process, without a process group."""
    cpu_only: bool = False
    """Train on the CPU even if there are GPUs. Several ranks then communicate over gloo."""
    backend: Backend = "auto"
    """Backend of the process group. auto: nccl between GPUs, gloo between CPUs."""
    timeout_s: Seconds = 600.0
    """Seconds that a collective waits for the other ranks. Too low: a slow disk ends the run."""
    seed: Seed = 0
    """Seed of initial weights, sample order, augmentation, dropout: the same seed, the same run."""
    deterministic: bool = False
    """Use deterministic kernels, so that two runs on GPUs agree bit for bit. Slower. A kernel
    without a deterministic version is named in a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    dataset: Place = "digits"
    """digits, synthetic, image_folder, a torchvision dataset such as cifar10, hf:FOLDER_OR_NAME for
    a Hugging Face dataset, text:GLOB, parquet:GLOB or tar:GLOB for files that are read as a stream,
    mix:NAME,NAME for several with weights, or your own as package.module:callable."""
    dataset_args: Arguments = field(default_factory=dict)
    """Arguments of the dataset, as a mapping: {name: value, ...}."""
    collate: Literal["auto"] | OwnCallable = "auto"
    """How samples become a batch, such as with padding. auto: by the dataset's own collate_fn, else
    by torch's. Or your own function, which takes a list of samples and gives (inputs, labels)."""
    data_dir: Local[Place] = "data"
    """Folder of the datasets, on each node."""
    download: Local[bool] = True
    """Download a missing dataset, once per node. false: it is an error."""
    batch_size: Count = 32
    """Samples per rank in one forward and backward. One optimizer step sees batch_size x ranks x
    accumulation_steps samples. What memory does not hold is done in smaller parts."""
    global_batch_size: Count | None = None
    """Samples of one optimizer step over all ranks. Each rank splits its share into micro-batches
    of batch_size. auto: batch_size x ranks x accumulation_steps."""
    eval_batch_size: Count = 256
    """Samples per rank in one forward of evaluation, which keeps no gradients."""
    num_workers: Local[CountOrZero | None] = None
    """Processes per rank that load samples. 0: load in the training process. auto: from the number
    of CPUs per rank. More workers than CPUs: slower."""
    prefetch_factor: Local[Count] = 2
    """Batches that each worker loads ahead: num_workers x prefetch_factor batches per rank."""
    pin_memory: Local[bool | None] = None
    """Load into page-locked memory, from which copies to a GPU are faster. auto: on with a GPU."""
    persistent_workers: Local[bool] = True
    """Keep the workers alive between epochs."""
    multiprocessing_context: Local[Literal["auto", "fork", "forkserver", "spawn"]] = "auto"
    """How workers are started. fork is fast, but unsafe with threads or CUDA. auto: forkserver."""
    loader_timeout_s: Local[SecondsOrZero] = 120.0
    """Seconds to wait for a batch before the workers, or a rank that reads without any, count as
    hung. 0: wait as long as it takes (the other ranks wait for timeout_s)."""
    loader_quiet_s: Local[SecondsOrZero] = 300.0
    """Seconds without a fault before a loader that fell back to fewer workers has all again.
    0: never."""
    check_inputs: bool = True
    """A sample with NaN or infinity in its inputs is a bad one. false: the model can handle it."""
    shuffle_block: Count = 16
    """Of a stream: samples are shuffled within so many of a shard, besides taking turns between
    shards. Each rank holds some blocks of each of its shards in memory. 1: not within a shard."""
    streaming: bool = False
    """Read a Hugging Face dataset (hf:...) as a stream of its files, without a copy of them."""
    drop_last: bool = False
    """Leave out the last samples of an epoch if they don't fill a global batch, and others do."""
    sampling: Annotated[str, SAMPLING] = EACH_ONCE
    """Which samples an epoch has. none: each one once. balanced: each class as often as any other.
    weights:FILE: by a weight per sample, in a .npy file or as text. Or your own function (dataset,
    seed, epoch), which returns indices."""
    replacement: bool = True
    """With sampling balanced or weights: a sample may come several times in an epoch."""
    samples_per_epoch: CountOrZero = 0
    """With sampling balanced or weights, or a mix: samples of an epoch. 0: as many as the data set
    has; without replacement as many as the weights allow."""
    augment: bool = False
    """Random crops and flips of the training images. Meant for photos, not for digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    model: Place = "simple_cnn"
    """simple_cnn, mlp, a torchvision model such as resnet18, hf:FOLDER_OR_NAME for a Hugging Face
    model of images or text, or your own as package.module:callable."""
    model_args: Arguments = field(default_factory=dict)
    """Arguments of the model, as a mapping: {name: value, ...}."""
    adapter: Arguments = field(default_factory=dict)
    """Of an hf: model, train adapters of the library peft: {peft_type: LORA, r: 8, target_modules:
    [c_attn]}. The base is frozen, and in no checkpoint."""
    pretrained: bool = False
    """Start from torchvision's pretrained weights. An hf: model always starts from its own."""
    init_from: Local[PlaceOrNone] = ""
    """Weights that a new run starts from, as far as they fit: an export, a run or a checkpoint, a
    safetensors file, or a folder of Hugging Face. What does not fit is named. Empty: random
    weights. A resumed run has its own."""
    sync_batchnorm: bool = False
    """Batch normalization over all ranks (SyncBatchNorm) instead of over each rank's own samples.
    GPU only. Costs one collective per layer."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    channels_last: bool | None = None
    """Store images in the channels_last memory format. auto: on a GPU with amp; on the CPU where
    the convolutions read and write more values than their kernels have; off with compile."""
    compile: bool = False
    """Compile the model with torch.compile: a slow first step, faster steps after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    task: str = "auto"
    """What the output is compared with: classification, multilabel, regression, tokens,
    segmentation, own (the model returns its loss), or your class as package.module:Class. auto: by
    the labels and the output of the first batch."""
    task_args: Arguments = field(default_factory=dict)
    """Arguments of the task, as a mapping: {loss: l1}, {ignore_index: 255}."""
    label_smoothing: Fraction = 0.0
    """Share of each target that is spread evenly over all classes."""
    metrics: Arguments = field(default_factory=dict)
    """Further metrics of the test set, as a mapping: {name: package.module:Class}. A class has
    update(output, labels), compute() and reset(), as in torchmetrics."""
    best_metric: str = "auto"
    """The metric of the test set that decides which checkpoint is the best: loss, or one of the
    task. auto: the first one of the task, or the loss if it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpConfig:
    find_unused_parameters: FindUnused = "auto"
    """Search in each step for parameters that get no gradient. auto: look once before the first
    step, and search in each step if there are any. off: the run stops if there are any."""
    gradient_as_bucket_view: bool = True
    """Make gradients views into DDP's buckets. Saves a copy, and the gradients' memory."""
    bucket_cap_mb: Megabytes = 25.0
    """Size of DDP's gradient buckets, in MiB. Smaller: earlier all-reduces, but more of them."""
    shared_memory: bool = True
    """Sum the gradients of CPU ranks on one machine through shared memory, after backward. false:
    through DDP's hooks over gloo, as between machines."""
    comm_hook: Literal["none", "bf16", "fp16"] = "none"
    """Compress gradients for the all-reduce. Less to send, but gradients are rounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    optimizer: OptimizerName | OwnClass = "adamw"
    """Which optimizer updates the weights. muon: Muon for the matrices of hidden layers, adamw for
    the rest; optimizer_args may hold patterns of names, {muon: [...], adamw: [...]}. Or any
    torch.optim.Optimizer, such as torch.optim:RAdam; it gets learning_rate as lr, and weight_decay,
    if it takes them."""
    optimizer_args: Arguments = field(default_factory=dict)
    """More arguments of the optimizer, as a mapping: {betas: [0.9, 0.95]}. They override
    learning_rate, weight_decay and momentum."""
    learning_rate: NotNegative = 3e-3
    """Peak learning rate. Too high: the loss becomes NaN. Too low: the loss hardly falls."""
    weight_decay: NotNegative = 0.01
    """Weight decay: decoupled from the gradient in adamw, added to the gradient in the others."""
    no_weight_decay: bool = False
    """No weight decay for norms, biases and other vectors, unless their group sets its own."""
    momentum: Fraction = 0.9
    """Momentum of sgd. The other optimizers don't use it."""
    lr_schedule: LrSchedule | OwnCallable = "auto"
    """Learning rate after the warm-up. auto: cosine, and constant for a stream of unknown length
    without max_steps. cosine, linear: down to 0 at the end. step: divided by 10 after one third,
    and again after two thirds. Or a scheduler, such as torch.optim.lr_scheduler:OneCycleLR, stepped
    after each optimizer step; or your own function (step, total_steps): the share of the peak."""
    lr_schedule_args: Arguments = field(default_factory=dict)
    """Arguments of a schedule of your own, as a mapping: {name: value, ...}."""
    warmup_steps: CountOrZero = 0
    """Steps in which the learning rate rises linearly to its peak."""
    accumulation_steps: Count = 1
    """Micro-batches per optimizer step: a larger batch in the same memory."""
    clip_grad_norm: NotNegative = 0.0
    """Clip gradients to this norm. 0: no clipping."""
    ema: Fraction = 0.0
    """Keep an exponential moving average of the weights, which is measured, saved and exported: its
    decay per step, such as 0.999, rises to that as (1 + step) / (10 + step). 0: none."""
    ema_every: Count = 1
    """With ema: average every this many steps, with the same decay per step."""
    amp: Amp = "auto"
    """Mixed precision. auto: bf16, or fp16 on a GPU without bf16; off on the CPU. fp16 scales the
    loss, because small gradients underflow in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    epochs: Count = 5
    """Number of passes over the training set."""
    max_steps: CountOrZero = 0
    """Stop after this many optimizer steps. 0: no limit."""
    eval_every: CountOrZero = 1
    """Evaluate every this many epochs, and at the end. 0: never."""
    eval_every_steps: CountOrZero = 0
    """Evaluate every this many steps too, and at the end. 0: only as eval_every says."""
    eval_max_batches: CountOrZero = 0
    """Measure only so many batches of eval_batch_size in each evaluation: samples spread evenly
    over the test set, the first ones of a stream, the same each time. Its figures are named
    partial_NAME. 0: the whole test set."""
    evaluate_ema: bool = True
    """With ema: each evaluation measures the averages too, as ema_NAME beside NAME, in twice the
    time; best_metric and stop_when then take theirs."""
    stop_when: Text = ""
    """Stop early when this metric of the test set no longer improves: loss, or one of the task;
    auto: the one that best_metric auto takes. Empty: never."""
    patience: Count = 3
    """With stop_when: so many evaluations in a row without a better value."""
    log_interval: Count = 50
    """Steps between progress reports. Each report waits for the GPU once."""
    time_limit: Annotated[str, DURATION] = ""
    """Stop this long after the launcher started, saved and ready to resume: 3h55m, 90s. Choose it a
    little below the job's limit. Empty: no limit."""
    stop_status: Local[Annotated[int, Bounds(low=0, high=3)] | None] = None
    """Exit status of a run that was stopped, saved and ready to resume. 3 tells a scheduler to
    start it again. auto: 3 in a pod of Kubernetes, which would count 0 as finished; else 0."""
    stop_grace_s: Local[Seconds] = 30.0
    """Seconds between the launcher's SIGTERM and its SIGKILL: 30 in torchrun and Slurm. A rank that
    still waits for another rank after two thirds of them saves on its own and exits."""
    hang_after_s: Local[SecondsOrZero] = 60.0
    """Seconds in one phase of a step after which a rank counts as hung, if that is also 5 times the
    longest such phase so far; start-up, first steps, evaluation: 30 times as long. 0: never."""
    debug: bool = False
    """More checks and more messages: an error in backward names its line of forward,
    TORCH_DISTRIBUTED_DEBUG is set to INFO, and every rank logs to the console. CPU ranks of one
    machine sum gradients by DDP's hooks, as everywhere else, not through shared memory. Slow."""
    step_retry: Literal["on", "off"] = "on"
    """When one rank fails inside a step, retry the step on all ranks; after an out-of-memory error,
    with smaller micro-batches. off: the first exception ends the run."""
    continue_on_error: bool = False
    """Leave out a bad sample, count it and name it, instead of stopping the run."""
    max_errors: Count = 100
    """With continue_on_error: stop if more samples than this were left out."""
    rollback_after: CountOrZero = 3
    """With continue_on_error: after this many steps in a row whose loss or gradient is not finite,
    roll back to the last good checkpoint. If it happens again, stop. 0: never."""
    check_replicas_every: CountOrZero = 1000
    """Steps between two comparisons of weights and optimizer state over all ranks; they are
    compared at the end too. A rank that differs is named, and its state is repaired. 0: never."""

    @property
    def evaluates(self) -> bool:
        """Whether the run measures its test set at all."""
        return self.eval_every > 0 or self.eval_every_steps > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    output_dir: Local[Place] = "runs"
    """Folder that holds the run folders."""
    run_name: Annotated[str, FOLDER_NAME] = ""
    """Name of the run folder. Empty: made from the time, the model and the dataset. The name of an
    earlier run continues that run. It can't rename the run that resume names."""
    checkpoint_every_steps: CountOrZero | None = None
    """Steps between checkpoints, besides the last one. auto: measured, so that they cost at most
    1 % of the time, and write during 10 % of it; the first after 10 minutes at most. 0: never."""
    checkpoint_every_epochs: CountOrZero = 0
    """Write a checkpoint every this many epochs too. 0: no."""
    keep_last: Count = 3
    """Checkpoints to keep, besides the best one. Older ones are removed."""
    keep_milestones: CountOrZero = 0
    """Checkpoints to keep besides, for replay and bisect, spread over a run of S steps: each step
    is at most 2 S / keep_milestones steps, plus the time between two saves, behind one of them."""
    resume: Place = "auto"
    """auto: continue run_name if it has a checkpoint. never: start a new run. newest: continue the
    run with the newest checkpoint. PATH: that run folder, or a checkpoint folder inside one."""
    tensorboard: Local[bool] = True
    """Write curves for TensorBoard to the run folder if tracker names it."""
    tracker: Local[Annotated[str, TRACKERS]] = "tensorboard"
    """Where the curves go besides metrics.jsonl, separated by commas: tensorboard, wandb (Weights &
    Biases; WANDB_MODE=offline needs no network), mlflow, or your class with log(step, values) and
    close() as package.module:Class. none: nowhere. A tracker that fails never stops training."""
    mirror: Annotated[str, MIRROR_URL] = ""
    """URL below which each checkpoint is copied in the background, with settings, metrics and
    ledger: s3://bucket/runs, file:///mnt/runs, any of fsspec. A start of this run_name on an empty
    machine fetches the newest valid one. Credentials belong to the environment."""
    on_event: Local[Text] = ""
    """Command for a shell, run beside training by rank 0 at each event: started, restart,
    checkpoint, fault, retry, rollback, stopped, finished, failed. It gets JSON on stdin, and
    HDDP_EVENT, HDDP_STATUS, HDDP_RUN. If it fails or takes 30 s, that is a warning."""
    metrics_file: Local[PlaceOrNone] = ""
    """File of the newest values for Prometheus, in the text format of node_exporter's textfile
    collector; replaced as a whole at each report. Empty: none."""
    ledger: bool = False
    """Record the samples of each step, 4 bytes per sample. verify-ledger then proves that each
    epoch used every sample exactly once."""
    digests: Literal["auto", "on", "off"] = "auto"
    """Leave a digest of each step, for replay, bisect and diff. auto: of a sixteenth of the
    gradient in each step, and not where that takes more than 1.5 % of a step. on: of all of it."""


def _section(kind: Callable[[], T], title: str) -> T:
    # WHY no docstring of the class: under python -OO it would be none
    return field(default_factory=kind, metadata={"title": title})


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of one run, by section."""

    device: DeviceConfig = _section(DeviceConfig, "Device and process group")
    data: DataConfig = _section(DataConfig, "Data")
    model: ModelConfig = _section(ModelConfig, "Model")
    task: TaskConfig = _section(TaskConfig, "Task and metrics")
    ddp: DdpConfig = _section(DdpConfig, "DistributedDataParallel")
    optimizer: OptimizerConfig = _section(OptimizerConfig, "Optimizer and precision")
    loop: LoopConfig = _section(LoopConfig, "Training loop")
    run: RunConfig = _section(RunConfig, "Run folder, checkpoints and reports")


def tracker_names(tracker: str) -> list[str]:
    """Split the setting tracker into names, each once."""
    names = [name.strip() for name in tracker.split(",")]
    return [name for name in dict.fromkeys(names) if name != NO_TRACKER]
