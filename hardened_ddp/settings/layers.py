"""The settings of this run, put together from all places, and where each one came from.

The order: default < config.yaml beside the script < settings saved with the run that is continued <
--config FILE < command line; a later one wins. config.yaml lists every setting, so what it has as
the default counts as not set there. One ConfigError lists all problems of all places, and of
settings that contradict each other: it says from where each came.
Does not own: whether one value fits (schema.py); what depends on the machine or on the disk.
Read next: record.py, which writes the result beside the run.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.cli import Request
from hardened_ddp.settings.commands import TRAIN
from hardened_ddp.settings.config import EACH_ONCE, TASKS, Config, ImportPath
from hardened_ddp.settings.document import Misfit, read_file
from hardened_ddp.settings.earlier_run import NOT_INHERITED, SAVED_SETTINGS, WHICH_RUN, find_run
from hardened_ddp.settings.record import read_back, yaml_word
from hardened_ddp.settings.schema import COMMAND_LINE, DEFAULT, RUN, SETTINGS, Layer, assemble, fit
from hardened_ddp.settings.typed_command import own_command
from hardened_ddp.settings.wording import advice, as_word, counted

LEAVE_OUT = "leave one of them out"

Contradiction = tuple[tuple[str, ...], str]  # the settings that a broken rule ties, and why


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The settings of this run, and where they came from."""

    config: Config
    sources: Mapping[str, str]  # for each setting: default, run, FILE:LINE or command line

    # The earlier run that is continued, whose saved settings were taken; None: a new one.
    run_folder: Path | None

    # What config.yaml sets and the continued run has another value for: its FILE:LINE.
    not_used: Mapping[str, str] = field(default_factory=dict)


def resolve(request: Request, *, world_size: int = 1) -> Resolved:
    """Put the settings together. Rank-local: reads the --config file and the earlier run's.

    Raises ConfigError with all problems: of the command line, the files, and across settings.
    """
    edited = _edited_layer(request.edited_file)
    file = _layer(request.config_file) if request.config_file else Layer()
    chosen = _merge(_defaults(), edited, file, request.settings)
    folder, run = _earlier_run(chosen, is_named=request.command != TRAIN)
    merged = _merge(_defaults(), edited, run, file, request.settings)
    config = assemble(merged.values)
    problems = list(merged.problems)
    for names, why in contradictions(config, world_size):
        if merged.is_complete and merged.bad_names.isdisjoint(names):
            values = {place(name, merged.sources[name]): merged.values[name] for name in names}
            found = " with ".join(f"{name} {yaml_word(value)}" for name, value in values.items())
            ranks = f" with {world_size} ranks" if len(names) == 1 < world_size else ""
            problems.append(f"{found}{ranks}: {why}")
    if problems:
        count = counted(len(problems), "problem")
        is_edited = edited.sources or edited.problems
        ignored = f" (--no_config ignores {request.edited_file})" if is_edited else ""
        fix = f"correct the above{ignored}; every setting is listed by: {own_command('--help')}"
        head = f"{count} in the settings; nothing has been started"
        raise ConfigError("\n  ".join([head, *problems]), fix=fix)
    # WHY repr: as in _edited_layer
    not_used = {
        name: edited.sources[name]
        for name, value in edited.values.items()
        if merged.sources[name] == RUN and repr(merged.values[name]) != repr(value)
    }
    return Resolved(config=config, sources=merged.sources, run_folder=folder, not_used=not_used)


def _defaults() -> Layer:
    values = {name: setting.default for name, setting in SETTINGS.items()}
    return Layer(values=values, sources=dict.fromkeys(values, DEFAULT))


def _edited_layer(path: str) -> Layer:
    """Give what config.yaml beside the script changes; nothing if there is no such file."""
    if not path or not Path(path).exists():
        return Layer()
    layer = _layer(path)
    for name, value in list(layer.values.items()):
        # WHY repr: 1 is no 1.0 for a setting, and a NaN inside of model_args does not equal itself
        if repr(value) == repr(SETTINGS[name].default):
            del layer.values[name], layer.sources[name]
    return layer


def _merge(*layers: Layer) -> Layer:
    """Lay layers over each other; the last one wins."""
    merged = Layer(is_complete=all(layer.is_complete for layer in layers))
    for layer in layers:
        merged.values.update(layer.values)
        merged.sources.update(layer.sources)
        merged.problems.extend(layer.problems)
        merged.bad_names.update(layer.bad_names)
    return merged


def _earlier_run(chosen: Layer, *, is_named: bool) -> tuple[Path | None, Layer]:
    """Find the run to continue, and give what is inherited from its saved settings.

    is_named: a command named it by a bare word, so no message may speak of --resume.
    """
    if not chosen.is_complete or chosen.bad_names.intersection(WHICH_RUN):
        return None, Layer(is_complete=False)
    where = "RUN" if is_named else place("resume", chosen.sources["resume"])
    try:
        folder = find_run(**{name: chosen.values[name] for name in WHICH_RUN})
        if folder is None:
            return None, Layer()
        name, by_command = chosen.values["run_name"], chosen.sources["resume"] == COMMAND_LINE
        # A run_name of a file says nothing where the command line says which run is continued.
        counts = bool(name) and not (by_command and chosen.sources["run_name"] != COMMAND_LINE)
        if counts and name not in (folder.name, folder.resolve().name):
            told = f"{where} continues {folder}, which is another run; leave out one of them"
            where = place("run_name", chosen.sources["run_name"])
            raise Misfit(told)
        text = (folder / SAVED_SETTINGS).read_text("utf-8", "replace")
    except (Misfit, OSError) as error:
        return None, Layer(problems=[f"{where}: {error}"], is_complete=False)
    # WHY: what another version saved with its default, and this one has no more, changes nothing
    gone = {n for n, _, source in read_back(text) if source == DEFAULT and n not in SETTINGS}
    layer = _layer(str(folder / SAVED_SETTINGS), apart_from={*NOT_INHERITED, *gone})
    return folder, replace(layer, sources=dict.fromkeys(layer.values, RUN))


def _layer(path: str, *, apart_from: Collection[str] = ()) -> Layer:
    """Read a file, and check each entry against its setting; those in apart_from are not taken."""
    layer = Layer()
    try:
        entries = read_file(path)
    except Misfit as error:
        return Layer(problems=[str(error)], is_complete=False)
    for entry in entries:
        where = f"{path}:{entry.line}"
        try:
            if entry.problem:
                raise Misfit(entry.problem)
            where = f"{where}: {as_word(entry.key)}"
            if entry.key in apart_from:
                continue
            if entry.key not in SETTINGS:
                meant = advice(entry.key.lstrip("-").replace("-", "_"), SETTINGS)
                raise Misfit(f"no such setting; {meant}")
            layer.values[entry.key] = fit(SETTINGS[entry.key], entry.value)
            layer.sources[entry.key] = f"{path}:{entry.line}"
        except Misfit as misfit:
            layer.problems.append(f"{where}: {misfit}")
            layer.bad_names.add(entry.key)
    return layer


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
    if data.streaming and not data.dataset.startswith("hf:"):
        why = "streaming is for hf:FOLDER_OR_NAME; text:GLOB, parquet:GLOB, tar:GLOB and your own"
        yield ("streaming", "dataset"), f"{why} iterable datasets are streams in any case"
    has_length = data.dataset.startswith("mix:") or data.sampling not in (EACH_ONCE, "")
    if data.samples_per_epoch and not has_length:
        why = "each sample comes once per epoch; choose a sampling, or leave it out"
        yield ("samples_per_epoch", "sampling"), why
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
    if optimizer.ema_every > 1 and not optimizer.ema:
        yield ("ema_every", "ema"), "nothing is averaged; add --ema 0.999"
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
