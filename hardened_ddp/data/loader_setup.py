"""Build the loaders of a run from its data, its settings and this machine."""

import torch

from hardened_ddp.data.checks import Checks
from hardened_ddp.data.collate import find_collate
from hardened_ddp.data.datasets import AnyDataset, TaskData
from hardened_ddp.data.fetch import Fetcher
from hardened_ddp.data.loader import BatchStream, EvalLoader, TrainLoader
from hardened_ddp.data.sampler import WindowSampler
from hardened_ddp.data.workers import plan_workers
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.settings.data import DataConfig


def build_train_loader(
    data: TaskData,
    sampler: WindowSampler,
    config: DataConfig,
    *,
    launch: Launch,
    device: torch.device,
) -> TrainLoader:
    """Build the loader of this rank's training windows. Rank-local; reads one sample."""
    checks = _checks_of(data.train, data, config)
    collate = find_collate(data.train, config.collate)
    fetcher = Fetcher(data.train, seed=sampler.seed, checks=checks, collate=collate)
    stream = _build_stream(
        fetcher, data, config, launch=launch, device=device, batch_size=sampler.batch_size
    )
    return TrainLoader(sampler, stream)


def build_eval_loader(
    data: TaskData, config: DataConfig, *, launch: Launch, device: torch.device
) -> EvalLoader | None:
    """Build the loader of this rank's share of the test set; None without one. Rank-local."""
    if data.test is None:
        return None
    collate = find_collate(data.test, config.collate)
    stream = _build_stream(
        Fetcher(data.test, seed=0, checks=_checks_of(data.test, data, config), collate=collate),
        data,
        config,
        launch=launch,
        device=device,
        batch_size=config.eval_batch_size,
    )
    return EvalLoader(
        len(data.test),  # type: ignore[arg-type]  # map-style: it has a length
        stream,
        batch_size=config.eval_batch_size,
        rank=launch.rank,
        world_size=launch.world_size,
    )


def _checks_of(dataset: AnyDataset, data: TaskData, config: DataConfig) -> Checks:
    """Choose what to check in samples. Rank-local; checks all of a dataset in memory now."""
    num_classes = data.num_classes if data.labels_are_classes else 0
    return Checks.of(dataset, num_classes=num_classes, inputs=config.check_inputs)


def _build_stream(
    fetcher: Fetcher,
    data: TaskData,
    config: DataConfig,
    *,
    launch: Launch,
    device: torch.device,
    batch_size: int,
) -> BatchStream:
    uses_gpu = device.type == "cuda"
    sample_bytes = fetcher[(0, torch.zeros(1, dtype=torch.int64))].size_bytes()
    plan = plan_workers(
        config,
        in_memory=data.in_memory,
        local_world_size=launch.local_world_size,
        uses_gpu=uses_gpu,
        batch_bytes=sample_bytes * batch_size,
    )
    pin_memory = uses_gpu if config.pin_memory is None else config.pin_memory and uses_gpu
    return BatchStream(fetcher, plan, config, pin_memory=pin_memory)
