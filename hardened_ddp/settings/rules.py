"""Rules that tie settings to each other and to the number of ranks.

Owns every check across settings; schema.py owns those of one setting. A rule is a row of RULES.
What goes wrong here: two settings, each valid by itself, contradict each other. They may come from
two places, so the message says where each one came from.

Does not own: what depends on the machine (GPUs, memory) or on the disk.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.config import TASKS, Config
from hardened_ddp.settings.declare import ImportPath
from hardened_ddp.settings.schema import AUTO, flatten
from hardened_ddp.settings.typed_command import own_command
from hardened_ddp.settings.wording import shown, url_problem

_FILES = ("text:", "parquet:", "tar:")
COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule: the settings that it ties, when it is broken, and why that can't run."""

    names: tuple[str, ...]
    is_broken: Callable[[Config, int], bool]
    """Given the settings and world_size."""

    why: str


RULES: tuple[Rule, ...] = (
    Rule(
        names=("task",),
        is_broken=lambda config, _: config.task.task not in TASKS and ":" not in config.task.task,
        why=f"there is no such task; choose {', '.join(TASKS)}, or package.module:Class",
    ),
    Rule(
        names=("single_gpu", "cpu_only"),
        is_broken=lambda config, _: config.device.single_gpu and config.device.cpu_only,
        why="one asks for a GPU, the other for the CPU; leave one of them out",
    ),
    Rule(
        names=("single_gpu",),
        is_broken=lambda config, world_size: config.device.single_gpu and world_size > 1,
        why="a launcher started several processes; leave it out, or start with python",
    ),
    Rule(
        names=("backend", "cpu_only"),
        is_broken=lambda config, _: config.device.backend == "nccl" and config.device.cpu_only,
        why="nccl needs GPUs; choose backend auto or gloo",
    ),
    Rule(
        names=("amp", "cpu_only"),
        is_broken=lambda config, _: config.optimizer.amp == "fp16" and config.device.cpu_only,
        why="fp16 training needs a GPU; choose amp off or bf16",
    ),
    Rule(
        names=("sync_batchnorm", "cpu_only"),
        is_broken=lambda config, _: config.model.sync_batchnorm and config.device.cpu_only,
        why="torch's SyncBatchNorm does not run on the CPU; leave it out",
    ),
    Rule(
        names=("static_graph", "find_unused_parameters"),
        is_broken=lambda config, _: (
            config.ddp.static_graph and config.ddp.find_unused_parameters == "on"
        ),
        why="static_graph promises that no step differs, and the other searches in each step what "
        "differs; leave one of them out",
    ),
    Rule(
        names=("static_graph", "split_by_length"),
        is_broken=lambda config, _: config.ddp.static_graph and bool(config.data.split_by_length),
        why="static_graph promises that no step differs, and the other makes one or two micro-"
        "batches as the lengths of the samples are; leave one of them out",
    ),
    Rule(
        names=("compile", "bucket_cap_mb"),
        is_broken=lambda config, world_size: (
            config.model.compile and world_size > 1 and config.ddp.bucket_cap_mb < 1
        ),
        why="torch's compiler splits the model by DDP's buckets, and needs them to hold 1 MB at "
        "least; leave one of them out",
    ),
    Rule(
        names=("global_batch_size", "accumulation_steps"),
        is_broken=lambda config, _: (
            config.data.global_batch_size is not None and config.optimizer.accumulation_steps > 1
        ),
        why="global_batch_size already says how many micro-batches a step has; leave one of them "
        "out",
    ),
    Rule(
        names=("init_from", "pretrained"),
        is_broken=lambda config, _: bool(config.model.init_from) and config.model.pretrained,
        why="both say which weights the run starts from; leave one of them out",
    ),
    Rule(
        names=("lr_schedule", "lr_schedule_args"),
        is_broken=lambda config, _: (
            bool(config.optimizer.lr_schedule_args)
            and not isinstance(config.optimizer.lr_schedule, ImportPath)
        ),
        why="a built-in schedule takes no arguments; leave them out, or choose lr_schedule "
        "package.module:callable",
    ),
    Rule(
        names=("streaming", "dataset"),
        is_broken=lambda config, _: (
            config.data.streaming and not config.data.dataset.startswith("hf:")
        ),
        why="streaming is for hf:FOLDER_OR_NAME; text:GLOB, parquet:GLOB, tar:GLOB and your own "
        "iterable datasets are streams in any case",
    ),
    Rule(
        names=("dataset", "dataset_args"),
        is_broken=lambda config, _: (
            config.data.dataset.startswith(_FILES)
            and bool(url_problem(str(config.data.dataset_args.get("test", ""))))
        ),
        why="test needs files of this machine; copy them here first",
    ),
    Rule(
        names=("stop_when", "eval_every"),
        is_broken=lambda config, _: bool(config.loop.stop_when) and config.loop.eval_every == 0,
        why="stopping early needs evaluations; set eval_every above 0",
    ),
    Rule(
        names=("warmup_steps", "max_steps"),
        is_broken=lambda config, _: 0 < config.loop.max_steps <= config.optimizer.warmup_steps,
        why="the run would end before the learning rate reaches its peak; needs warmup_steps below "
        "max_steps",
    ),
)


def broken_rules(
    config: Config,
    *,
    world_size: int,
    sources: Mapping[str, str],
    apart_from: Collection[str] = (),
) -> list[str]:
    """Say which rules are broken; a rule about a name in apart_from is not checked."""
    values = flatten(config)
    problems = []
    for rule in RULES:
        is_known = not any(name in apart_from for name in rule.names)
        if is_known and rule.is_broken(config, world_size):
            found = " with ".join(
                f"{place(name, sources.get(name, COMMAND_LINE))} {_word(values[name])}"
                for name in rule.names
            )
            ranks = f" with {world_size} ranks" if len(rule.names) == 1 < world_size else ""
            problems.append(f"{found}{ranks}: {rule.why}")
    return problems


def place(name: str, source: str) -> str:
    """Name a setting by where its value came from: a flag, or a line of a file."""
    return f"--{name}" if source == COMMAND_LINE else f"{source}: {name}"


def problems_error(problems: Sequence[str], *, edited_file: str = "") -> ConfigError:
    """Make the one error that lists all problems.

    edited_file: config.yaml beside the script, if it sets anything.
    """
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError(
        "\n  ".join([f"{count} in the settings; nothing has been started", *problems]),
        fix="correct the above"
        + (f" (--no_config ignores {edited_file})" if edited_file else "")
        + f"; every setting is listed by: {own_command('--help')}",
    )


def _word(value: object) -> str:
    return AUTO if value is None else shown(value).strip("'")
