"""Build the loaders of a run from its data, its settings and this machine."""

import logging
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
from hardened_ddp.errors import CheckpointMismatchError, DataError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.settings.config import EACH_ONCE, Config, DataConfig

if TYPE_CHECKING:  # WHY: streams are loaded only where the dataset is one
    from hardened_ddp.streams.shard_loader import ShardLoader
    from hardened_ddp.streams.shard_sampler import ShardSampler

log = logging.getLogger(__name__)

AnySampler: TypeAlias = "WindowSampler | ShardSampler"
AnyLoader: TypeAlias = "TrainLoader | ShardLoader"

_WINDOWS_HELD = 4  # of a stream, if parts of a batch may be collated again: step/async_device.py


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
        return _build_shard_sampler(data.train, settings, launch=launch, saved=saved, how=how)
    sampling = build_sampling(data.train, settings, seed=config.device.seed)
    if sampling is not None:
        # WHY: a file of weights, or the user's function, may differ on another node.
        group.check_equal({"sampling": sampling.digest})  # collective
    found = WindowSampler(data.train, **how, sampling=sampling)
    if settings.drop_last and not found.drop_last and launch.is_main:
        log.warning(
            "drop_last: off, because all %d samples are fewer than the %d of a step: each epoch is "
            "this one short step. A smaller --batch_size makes full ones",
            *(found.size, global_batch),
        )
    return found


def _build_shard_sampler(
    view: Any,  # a StreamView
    config: DataConfig,
    *,
    launch: Launch,
    saved: Mapping[str, Any] | None,
    how: Mapping[str, Any],
) -> "ShardSampler":
    from hardened_ddp.streams.shard_sampler import ShardSampler

    if config.sampling != EACH_ONCE:
        raise DataError(
            f"--sampling {config.sampling}: {config.dataset} is a stream, which is read in its own "
            "order",
            fix="leave --sampling out, or give a map-style data set",
        )
    block = config.shuffle_block
    sampler = ShardSampler(view.stream, **how, shuffle_block=block, digests=view.digests)
    if config.drop_last and not sampler.declares_length:
        raise DataError(
            "drop_last: which samples of this stream are the last ones is known only after it was "
            "read once",
            fix="leave --drop_last out, or give the stream sizes, the samples of each shard",
        )
    if sampler.is_shared and launch.is_main:
        log.warning(
            "%d shards for %d ranks: each rank reads all samples and trains on its part of them; "
            "from %d shards on, each would read only its own",
            *(sampler.num_shards, launch.world_size, launch.world_size),
        )
    if saved is not None:
        if problems := sampler.problems_with(saved.get("stream")):
            raise CheckpointMismatchError(
                f"the checkpoint of step {saved['step']} belongs to another run: "
                + "; ".join(problems),
                fix="resume with the data and the settings of that run; or start a new run: "
                "without --resume, with another --run_name",
            )
        sampler.restore(saved["stream"], epoch=int(saved["epoch"]), cursor=int(saved["cursor"]))
    return sampler


def build_train_loader(
    data: TaskData, sampler: AnySampler, config: Config, *, group: Group, length: RunLength
) -> AnyLoader:
    """Build the loader of this rank's training windows. Rank-local; reads one sample.

    length: of the run; with a stream it learns the number of steps as soon as that is known.
    """
    fetcher = _build_fetcher(data.train, data, config.data, seed=sampler.seed)
    if not isinstance(sampler, WindowSampler):
        sampler.length = length
        return _build_shard_loader(fetcher, sampler, config, group=group)
    plan = _plan(fetcher, config.data, group, batch_size=sampler.batch_size)
    pins = _pins_memory(config.data, group)
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


def _build_shard_loader(
    of_stream: Fetcher, sampler: "ShardSampler", config: Config, *, group: Group
) -> "ShardLoader":
    from hardened_ddp.streams.block_reader import BlockReader
    from hardened_ddp.streams.shard_loader import ShardLoader
    from hardened_ddp.streams.stream_batches import HeldSamples

    plan = _plan(of_stream, config.data, group, batch_size=sampler.shuffle_block)
    num_mine = sampler.num_shards // (1 if sampler.is_shared else sampler.num_replicas)
    plan = replace(plan, num_workers=min(plan.num_workers, num_mine))
    checks, collate = of_stream.checks, of_stream.collate
    held = HeldSamples(sampler.stream, num_windows=1 if collate is None else _WINDOWS_HELD)
    blocks = BlockReader(sampler.stream, seed=sampler.seed)
    return ShardLoader(
        sampler,
        BatchReader(blocks, plan, config.data, pin_memory=False),
        Fetcher(held, seed=sampler.seed, checks=checks, collate=collate),
        group,
        epochs=config.loop.epochs,
        pin_memory=_pins_memory(config.data, group),
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
