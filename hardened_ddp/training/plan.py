"""The plan of a run: its steps, its global batch, and what must be equal on all ranks.

Owns the numbers that follow from settings, data and the checkpoint, before the first step.
"""

import functools
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import hardened_ddp
from hardened_ddp.data.batches.run_length import UNKNOWN_STEPS, RunLength
from hardened_ddp.data.loader_setup import AnySampler
from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.config import AUTO_BATCH_SIZE, Config
from hardened_ddp.settings.wording import counted

log = logging.getLogger(__name__)


def choose_global_batch(
    config: Config,
    *,
    world_size: int,
    saved: Mapping[str, Any] | None,  # Any: the numbers of a checkpoint
    sources: Mapping[str, str],
) -> int:
    """Return the number of samples of one step. Pure except for a log line.

    global_batch_size, or batch_size x world_size x accumulation_steps; a resumed run keeps its own
    on any number of ranks, so that each step takes the same samples, unless another batch setting
    was given. The same value again, as in a restart by the same command, does not count.
    """
    settings = {
        "batch_size": config.data.batch_size,
        "accumulation_steps": config.optimizer.accumulation_steps,
        "global_batch_size": config.data.global_batch_size,
    }
    of_one_rank = (config.data.batch_size or AUTO_BATCH_SIZE) * config.optimizer.accumulation_steps
    asked = config.data.global_batch_size or of_one_rank * world_size
    if saved is None or saved["global_batch"] == asked:
        return asked
    given = [
        name
        for name, value in settings.items()
        if sources.get(name) == "command line" and value != saved[name]
    ]
    if given:
        log.warning(
            "the global batch changes from %d to %d, because %s was given",
            saved["global_batch"],
            asked,
            " and ".join(f"--{name}" for name in given),
        )
        return asked
    kept = int(saved["global_batch"])
    log.warning(
        "the global batch stays %d, as with %s before: %s samples of every step on %s",
        kept,
        counted(saved["world_size"], "rank"),
        kept if world_size == 1 else f"about {-(-kept // world_size)}",
        "the one rank" if world_size == 1 else f"each of {world_size} ranks",
    )
    return kept


def count_steps(
    config: Config, sampler: AnySampler, saved: Mapping[str, Any] | None = None
) -> RunLength:
    """Return the optimizer steps of the whole run: those done, and those left in its epochs.

    WHY not steps per epoch x epochs: the steps done may have had another size. Of a stream they may
    be known only later: then max_steps is what the learning rate's schedule is stretched over.
    A run that auto gave a constant rate keeps it, when its length is known later, too.
    Raises ConfigError if the schedule needs a length that nobody knows.
    """
    done, epoch, cursor = 0, 0, 0
    if saved is not None:
        done, epoch, cursor = int(saved["step"]), int(saved["epoch"]), int(saved["cursor"])
    most = config.loop.max_steps or UNKNOWN_STEPS
    left = sampler.steps_left(epoch, cursor, epochs=config.loop.epochs)
    total = most if left is None else min(done + left, most)
    if sampler.declares_length:
        return RunLength(total, schedule=total, most=most)
    schedule = config.optimizer.lr_schedule
    if schedule == "auto":
        # WHY as before: where a run continues, its rate must not jump.
        before = None if saved is None else saved.get("lr_schedule")
        schedule = before or ("constant" if most == UNKNOWN_STEPS else "cosine")
        if schedule == "constant":
            return RunLength(total, schedule=UNKNOWN_STEPS, most=most)
    if most == UNKNOWN_STEPS and schedule != "constant":
        raise ConfigError(
            f"lr_schedule {schedule} needs the number of steps, and this stream does not say how "
            "many samples it has",
            fix="--max_steps N, or --lr_schedule constant, or give the stream sizes, the samples "
            "of each shard",
        )
    return RunLength(total, schedule=most, most=most)


def facts_of_rank(settings: Mapping[str, str], dataset: str, precision: str) -> dict[str, str]:
    """Return what must be equal on all ranks before they may train together. Rank-local."""
    return {
        "code": code_hash(),
        "torch": torch.__version__,
        **settings,
        "dataset": dataset,
        "precision": precision,  # WHY: with amp auto it depends on the GPU
    }


@functools.cache
def code_hash() -> str:
    """Hash this program's own source files, as they are when this process asks first."""
    digest = hashlib.sha256()
    root = Path(hardened_ddp.__file__).parent
    for path in [root.parent / "ddp_training.py", *sorted(root.rglob("*.py"))]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
