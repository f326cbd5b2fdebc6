"""What a run is made of, before its first step: its numbers, and its model with task and DDP.

The model is built, given its task, tried without DDP, and wrapped in it.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardened_ddp.checkpoint.mirror import check_mirror
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.sampler import UNKNOWN_STEPS, RunLength
from hardened_ddp.data.foreign_code import import_callable, import_extra
from hardened_ddp.data.loader_setup import AnyLoader, AnySampler
from hardened_ddp.data.sources.datasets import TaskData, find_source
from hardened_ddp.errors import DataError, OptimizerError
from hardened_ddp.gradients.by_ddp import sum_gradients_of
from hardened_ddp.gradients.sums import GradientSum
from hardened_ddp.model.average import WeightAverage
from hardened_ddp.model.base import check_base, find_base
from hardened_ddp.model.effects import untouched
from hardened_ddp.model.moving_buffers import MovingBuffers
from hardened_ddp.model.optimizer import find_optimizer
from hardened_ddp.model.replica import Inputs, Replica, check_same_model, compile_model
from hardened_ddp.model.zoo import build_model, check_model, place_model
from hardened_ddp.preflight.memory_format import choose_channels_last
from hardened_ddp.preflight.padding import choose_least_padding
from hardened_ddp.preflight.probe import choose_find_unused, choose_task, probe
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.config import Config, ImportPath, OptimizerConfig
from hardened_ddp.settings.record import agreed_settings, code_hash
from hardened_ddp.settings.wording import counted
from hardened_ddp.step.parts import ASYNC_DEVICES
from hardened_ddp.task.build import check_metrics, find_task, label_limit
from hardened_ddp.task.task import Task
from hardened_ddp.training.run_report import check_trackers
from hardened_ddp.training.weights import build_from_source, load_initial_weights

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
    data, parts = config.data, config.optimizer.accumulation_steps
    asked = data.global_batch_size or data.batch_size * parts * world_size
    if saved is None or (kept := int(saved["global_batch"])) == asked:
        return asked
    now: dict[str, int | None] = {"batch_size": data.batch_size, "accumulation_steps": parts}
    now["global_batch_size"] = data.global_batch_size
    typed = {name: value for name, value in now.items() if sources.get(name) == "command line"}
    given = [f"--{name}" for name, value in typed.items() if value != saved[name]]
    if given:
        why = " and ".join(given)
        log.warning("the global batch changes from %d to %d, because of %s", kept, asked, why)
        return asked
    before, each = counted(saved["world_size"], "rank"), -(-kept // world_size)
    text = (
        "the global batch stays %d, as with %s before: about %d samples of every step on each of %s"
    )
    log.warning(text, kept, before, each, counted(world_size, "rank"))
    return kept


def count_steps(
    config: Config, sampler: AnySampler, saved: Mapping[str, Any] | None = None
) -> RunLength:
    """Return the optimizer steps of the whole run: those done, and those left in its epochs.

    WHY not steps per epoch x epochs: the steps done may have had another size. Raises ConfigError
    if the schedule needs a length that nobody knows, as of some streams.
    """
    done, epoch, cursor = 0, 0, 0
    if saved is not None:
        done, epoch, cursor = int(saved["step"]), int(saved["epoch"]), int(saved["cursor"])
    most = config.loop.max_steps or UNKNOWN_STEPS
    left = sampler.steps_left(epoch, cursor, epochs=config.loop.epochs)
    total = most if left is None else min(done + left, most)
    if sampler.declares_length:
        return RunLength(total, schedule=total, most=most)
    from hardened_ddp.streams.shard_sampler import length_of_run  # WHY here: only for a stream

    return length_of_run(config, saved, total=total, most=most)


def facts_of_rank(config: Config, dataset: str, precision: str) -> dict[str, str]:
    """Return what must be equal on all ranks before they may train together. Rank-local."""
    return {
        "code": code_hash(),
        "torch": torch.__version__,
        **agreed_settings(config),
        "dataset": dataset,
        "precision": precision,  # WHY: with amp auto it depends on the GPU
    }


def check_names(config: Config) -> None:
    """Raise the HardenedError of whatever a setting names and is not there. Rank-local."""
    check_trackers(config.run)
    if config.run.mirror:
        check_mirror(config.run.mirror)
    find_source(config.data.dataset, config.data)
    if config.model.adapter:
        import_extra("peft", what="--adapter")
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


def model_and_task(
    config: Config,
    group: Group,
    data: TaskData,
    loader: AnyLoader,
    *,
    saved: Mapping[str, Any] | None,
) -> tuple[nn.Module, Task, Sequence[Batch]]:
    """Build the model, its task, and two small batches to try both on. Collective."""
    # The same model on every rank: seeded alike, and DDP sends rank 0's weights to all.
    model = build_model(
        config.model,
        num_classes=data.num_classes,
        input_shape=data.input_shape,
        task=config.task.task,
    )
    samples = loader.sample_batches(group.device)
    base = (saved or {}).get("base")
    loads = not saved or base
    load_initial_weights(model, config.model.init_from if loads else "", group)  # collective
    if base:
        group.run_on_main(lambda: check_base(model, base), what="the frozen base")  # collective
    model = place_model(model, config.model, device=group.device, world_size=group.world_size)
    # The task makes a loss and metrics of the output. auto: the first batch says which task it is.
    task = choose_task(model, samples[0], data, config.task, group, saved=saved)  # collective
    return model, task, samples


def build_replica(
    config: Config, trial: Trial, samples: Sequence[Batch], *, saved: Mapping[str, Any] | None
) -> tuple[Replica, GradientSum]:
    """Try the model, and wrap it in DDP. Collective: all ranks."""
    model, task, group = trial.model, trial.task, trial.group
    check_same_model(model, group)  # collective
    # Try it on a few samples without DDP: which parameters get no gradient, and on which rank?
    # DDP would wait for those for ever, unless find_unused_parameters is on.
    findings = probe(trial, samples)  # collective
    find_unused = choose_find_unused(config.ddp.find_unused_parameters, findings)
    # Images with channels last: as asked, as the run began, or by a rule.
    began_with = None if saved is None else saved["channels_last"]
    channels_last = choose_channels_last(  # collective
        trial, samples[0], config=config, began_with=began_with
    )
    least_padding = choose_least_padding(  # collective
        trial, samples, findings, config=config, saved=saved
    )
    buffers = MovingBuffers(
        model, findings.moving_buffers, own=findings.own_tensors, outputs=findings.outputs
    )
    is_async = group.device.type in ASYNC_DEVICES
    limits = [limit for limit in (*findings.limits, label_limit(task)) if limit and is_async]
    replica = Replica(
        model,
        buffers,
        trial.attributes,
        inputs=Inputs(channels_last, findings.changes_inputs, limits, least_padding),
        collectives=findings.collectives,
    )
    # DDP sends gradients while backward runs; CPU ranks of one machine add them up after it.
    sums = sum_gradients_of(  # collective
        model,
        group,
        config,
        finds_unused=find_unused,
        counts=not task.counts_samples,
        calls_collectives=bool(findings.collectives),
    )
    sums.warm_up(lambda call: _run_once(call, trial, samples[0].copied()))  # collective
    if config.model.compile:
        compile_model(model)  # after the trials, which have other sizes
    return replica, sums


def build_average(
    config: OptimizerConfig, replica: Replica, sums: GradientSum
) -> WeightAverage | None:
    """Build the averages of --ema, which begin with the weights as they are. Rank-local."""
    if not config.ema:
        return None
    moving, trained = replica.buffers.names, sums.local.by_name
    return WeightAverage(
        replica.module, trained=trained, moving=moving, decay=config.ema, every=config.ema_every
    )


def describe_base(
    config: Config, model: nn.Module, data: TaskData, group: Group, saved: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """Say which frozen weights are left out of checkpoints, as JSON, and whose. Collective.

    Only those of a file or a hub: what a model's own code makes may be lost with another version.
    """
    chosen = config.model
    has_source = chosen.model.startswith("hf:") or chosen.init_from or chosen.pretrained
    if saved is not None or not has_source:
        return (saved or {}).get("base") or {}

    init_from = str(Path(chosen.init_from).absolute()) if chosen.init_from else ""
    shape, task = data.input_shape, config.task.task
    build = functools.partial(build_from_source, chosen, data.num_classes, shape, task, init_from)
    what = "looking for frozen weights"
    hashes = group.run_on_main(lambda: find_base(model, build), what=what)  # collective
    revision = getattr(getattr(getattr(model, "net", None), "config", None), "_commit_hash", None)
    source = chosen.init_from or f"{chosen.model}{f' revision {revision}' if revision else ''}"
    return {"source": source, "init_from": init_from, "sha256": hashes} if hashes else {}


def _run_once(call: nn.Module, trial: Trial, sample: Batch) -> None:
    """Run forward and backward of a sample; discard what they change. Collective if call is DDP."""
    with untouched(trial.model):
        with trial.precision.autocast():
            score = trial.task.score(trial.task.forward(call, sample), sample)
        score.loss_sum.backward()  # type: ignore[no-untyped-call]  # collective
    trial.model.zero_grad(set_to_none=True)
