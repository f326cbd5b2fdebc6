"""Rules that tie settings to each other and to the number of ranks; schema.py checks one setting.

Two settings that contradict each other may come from two places: the message says from which.
Does not own: the error (layers.py); what depends on the machine (GPUs, memory) or on the disk.
"""

from collections.abc import Iterator

from hardened_ddp.settings.config import EACH_ONCE, TASKS, Config, ImportPath
from hardened_ddp.settings.schema import COMMAND_LINE
from hardened_ddp.settings.wording import url_problem

LEAVE_OUT = "leave one of them out"

Contradiction = tuple[tuple[str, ...], str]  # the settings that a broken rule ties, and why


def contradictions(config: Config, world_size: int) -> Iterator[Contradiction]:
    """Give each rule that is broken."""
    device, model, data = config.device, config.model, config.data
    if config.task.task not in TASKS and ":" not in config.task.task:
        why = f"there is no such task; choose {', '.join(TASKS)}, or package.module:Class"
        yield ("task",), why
    if device.single_gpu and device.cpu_only:
        yield ("single_gpu", "cpu_only"), f"one asks for a GPU, the other for the CPU; {LEAVE_OUT}"
    if device.single_gpu and world_size > 1:
        why = "a launcher started several processes; leave it out, or start with python"
        yield ("single_gpu",), why
    if device.backend == "nccl" and device.cpu_only:
        yield ("backend", "cpu_only"), "nccl needs GPUs; choose backend auto or gloo"
    if config.optimizer.amp == "fp16" and device.cpu_only:
        yield ("amp", "cpu_only"), "fp16 training needs a GPU; choose amp off or bf16"
    if model.sync_batchnorm and device.cpu_only:
        why = "torch's SyncBatchNorm does not run on the CPU; leave it out"
        yield ("sync_batchnorm", "cpu_only"), why
    if model.init_from and model.pretrained:
        why = f"both say which weights the run starts from; {LEAVE_OUT}"
        yield ("init_from", "pretrained"), why
    if model.adapter and not model.model.startswith("hf:"):
        yield ("adapter", "model"), "adapters are for hf: models; add them in your own model's code"
    if model.compile and world_size > 1 and config.ddp.bucket_cap_mb < 1:
        why = "torch's compiler splits the model by DDP's buckets, and needs them to hold 1 MB"
        yield ("compile", "bucket_cap_mb"), f"{why} at least; {LEAVE_OUT}"
    if data.streaming and not data.dataset.startswith("hf:"):
        why = "streaming is for hf:FOLDER_OR_NAME; text:GLOB, parquet:GLOB, tar:GLOB and your own"
        yield ("streaming", "dataset"), f"{why} iterable datasets are streams in any case"
    has_length = data.dataset.startswith("mix:") or data.sampling not in (EACH_ONCE, "")
    if data.samples_per_epoch and not has_length:
        why = "each sample comes once per epoch; choose a sampling, or leave it out"
        yield ("samples_per_epoch", "sampling"), why
    is_of_files = data.dataset.startswith(("text:", "parquet:", "tar:"))
    if is_of_files and url_problem(str(data.dataset_args.get("test", ""))):
        yield ("dataset", "dataset_args"), "test needs files of this machine; copy them here first"
    yield from _contradictions_of_steps(config)


def _contradictions_of_steps(config: Config) -> Iterator[Contradiction]:
    """Give each broken rule about what a step does, and how many there are."""
    optimizer, loop = config.optimizer, config.loop
    if config.data.global_batch_size is not None and optimizer.accumulation_steps > 1:
        why = f"global_batch_size already says how many micro-batches a step has; {LEAVE_OUT}"
        yield ("global_batch_size", "accumulation_steps"), why
    if optimizer.lr_schedule_args and not isinstance(optimizer.lr_schedule, ImportPath):
        why = "a built-in schedule takes no arguments; leave them out, or choose lr_schedule"
        yield ("lr_schedule", "lr_schedule_args"), f"{why} package.module:callable"
    run = config.run
    if run.mirror and not run.run_name and run.resume in ("auto", "never"):
        why = "a start on an empty machine looks there for the run by its name; add --run_name"
        yield ("mirror",), why
    if loop.stop_status in (1, 2):
        yield ("stop_status",), "1 and 2 are failures; needs 0, 3 or auto"
    if loop.stop_when and not loop.evaluates:
        why = "stopping early needs evaluations; set eval_every or eval_every_steps above 0"
        yield ("stop_when", "eval_every"), why
    if 0 < loop.max_steps <= optimizer.warmup_steps:
        why = "the run would end before the learning rate reaches its peak"
        yield ("warmup_steps", "max_steps"), f"{why}; needs warmup_steps below max_steps"


def place(name: str, source: str) -> str:
    """Name a setting by where its value came from: a flag, or a line of a file."""
    return f"--{name}" if source == COMMAND_LINE else f"{source}: {name}"
