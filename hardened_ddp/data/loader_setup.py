"""Build the loaders of a run from its data, its settings and this machine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hardened_ddp.data.batches.checks import Checks
from hardened_ddp.data.batches.collate import find_collate
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.loader import BatchReader, EvalLoader, TrainLoader
from hardened_ddp.data.batches.sampler import RunLength, WindowSampler
from hardened_ddp.data.batches.sampling import build_sampling
from hardened_ddp.data.batches.workers import WorkerPlan, plan_workers
from hardened_ddp.data.sources.datasets import TaskData
from hardened_ddp.data.sources.facts import AnyDataset, is_in_memory, is_view_of_stream
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.config import Config, DataConfig

if TYPE_CHECKING:  # WHY: streams are loaded only where the dataset is one
    from hardened_ddp.streams.shard_loader import ShardLoader
    from hardened_ddp.streams.shard_sampler import ShardSampler

AnySampler: TypeAlias = "WindowSampler | ShardSampler"
AnyLoader: TypeAlias = "TrainLoader | ShardLoader"


def build_sampler(
    data: TaskData,
    config: Config,
    *,
    group: Group,
    global_batch: int,
    saved: Mapping[str, Any] | None,  # Any: the numbers of a checkpoint
) -> AnySampler:
    """Build what deals the samples to steps and ranks. Collective if --sampling has another order.

    Of a map-style dataset it is a DistributedSampler; of a stream it stands where the checkpoint
    does. Raises DataError, or CheckpointMismatchError if it is not the stream of the checkpoint.
    """
    launch, settings = group.launch, config.data
    how: dict[str, Any] = {  # Any: numbers and flags
        "num_replicas": launch.world_size,
        "rank": launch.rank,
        "seed": config.device.seed,
        "global_batch": global_batch,
        "batch_size": settings.batch_size,
        "drop_last": settings.drop_last,
    }
    if is_view_of_stream(data.train):
        # WHY here: streams are loaded only where the dataset is one
        from hardened_ddp.streams.shard_sampler import build_shard_sampler

        return build_shard_sampler(data.train, settings, launch=launch, saved=saved, how=how)
    sampling = build_sampling(data.train, settings, seed=config.device.seed)
    if sampling is not None:
        # WHY: a file of weights, or the user's function, may differ on another node.
        group.check_equal({"sampling": sampling.digest})  # collective
    return WindowSampler(data.train, **how, sampling=sampling)


def build_train_loader(
    data: TaskData, sampler: AnySampler, config: Config, *, group: Group, length: RunLength
) -> AnyLoader:
    """Build the loader of this rank's training windows. Rank-local; reads one sample.

    length: of the run; with a stream it learns the number of steps as soon as that is known.
    """
    fetcher = _build_fetcher(data.train, data, config.data, seed=sampler.seed)
    size = sampler.batch_size if isinstance(sampler, WindowSampler) else sampler.shuffle_block
    plan = _plan(fetcher, config.data, group, batch_size=size)
    pins = _pins_memory(config.data, group)
    if not isinstance(sampler, WindowSampler):
        from hardened_ddp.streams.shard_loader import build_shard_loader

        sampler.length = length
        return build_shard_loader(sampler, fetcher, plan, config, group, pin_memory=pins)
    return TrainLoader(sampler, BatchReader(fetcher, plan, config.data, pin_memory=pins))


def build_eval_loader(
    data: TaskData, config: Config, group: Group, *, measures_all: bool = False
) -> EvalLoader | None:
    """Build the loader of this rank's share of the test set; None without one. Rank-local.

    measures_all: whatever --eval_max_batches says.
    """
    if data.test is None:
        return None
    fetcher = _build_fetcher(data.test, data, config.data, seed=0)
    size = config.data.eval_batch_size
    plan = _plan(fetcher, config.data, group, batch_size=size)
    if getattr(data.test, "is_read_in_order", False):
        # WHY one at most: several would each read all of it.
        plan = replace(plan, num_workers=min(1, plan.num_workers))
    return EvalLoader(
        len(data.test),  # type: ignore[arg-type]  # map-style: it has a length
        BatchReader(fetcher, plan, config.data, pin_memory=_pins_memory(config.data, group)),
        batch_size=size,
        rank=group.launch.rank,
        world_size=group.launch.world_size,
        max_batches=0 if measures_all else config.loop.eval_max_batches,
    )


def _build_fetcher(
    dataset: AnyDataset, data: TaskData, config: DataConfig, *, seed: int
) -> Fetcher:
    """Build what reads batches. Rank-local; checks all of a dataset in memory now."""
    num_classes = data.num_classes if data.labels_are_classes else 0
    checks = Checks.of(dataset, num_classes=num_classes, inputs=config.check_inputs)
    return Fetcher(dataset, seed=seed, checks=checks, collate=find_collate(dataset, config.collate))


def _plan(fetcher: Fetcher, config: DataConfig, group: Group, *, batch_size: int) -> WorkerPlan:
    """Decide the workers of a loader from the size of a sample. Rank-local; reads one sample."""
    sample_bytes = fetcher[(0, torch.zeros(1, dtype=torch.int64))].size_bytes()
    return plan_workers(
        config,
        in_memory=is_in_memory(fetcher.dataset),
        local_world_size=group.launch.local_world_size,
        uses_gpu=group.device.type == "cuda",
        batch_bytes=sample_bytes * batch_size,
    )


def _pins_memory(config: DataConfig, group: Group) -> bool:
    return group.device.type == "cuda" and config.pin_memory is not False
