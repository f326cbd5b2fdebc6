"""The loop of torch's fault-tolerance tutorial: rank 0 saves a snapshot after each epoch.

With --stateful, what torchdata's documentation adds: the loader's state of each rank in the
snapshot, which can then be taken within an epoch, and the optimizer's.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.faults.task import (
    Digits,
    Stream,
    Task,
    build_optimizer,
    compute_loss,
    model,
    read_task,
)


def main() -> None:
    """Join the process group, train, leave it."""
    dist.init_process_group("gloo")
    task = read_task()
    task.output_dir.mkdir(parents=True, exist_ok=True)
    train_stateful(task) if task.is_stateful else train(task)
    dist.destroy_process_group()


def train(task: Task) -> None:
    """Train as the tutorial does."""
    network = model()
    optimizer = build_optimizer(network)
    digits: Any = Stream(dist.get_rank(), task.num_ranks) if task.is_iterable else Digits()
    sampler: Any = None if task.is_iterable else DistributedSampler(digits, shuffle=True)
    loader = DataLoader(digits, task.batch_size, sampler=sampler, num_workers=task.num_workers)
    path, epochs_run = task.output_dir / "snapshot.pt", 0
    if path.exists():
        snapshot = torch.load(path)
        network.load_state_dict(snapshot["MODEL_STATE"])
        epochs_run = snapshot["EPOCHS_RUN"]
    ddp = DistributedDataParallel(network)
    for epoch in range(epochs_run, task.num_epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            _step(ddp, optimizer, batch)
        if dist.get_rank() == 0:
            torch.save({"MODEL_STATE": network.state_dict(), "EPOCHS_RUN": epoch + 1}, path)


def train_stateful(task: Task) -> None:
    """The same with torchdata's loader and sampler, saving each few steps."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    network = model()
    optimizer = build_optimizer(network)
    digits = Digits()
    sampler = StatefulDistributedSampler(digits, shuffle=True)
    loader = StatefulDataLoader(
        digits, task.batch_size, sampler=sampler, num_workers=task.num_workers
    )
    path, first_epoch, num_steps = task.output_dir / "snapshot.pt", 0, 0
    if path.exists():
        snapshot = torch.load(path, weights_only=False)
        network.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first_epoch, num_steps = snapshot["epoch"], snapshot["step"]
        sampler.set_epoch(first_epoch)
        loader.load_state_dict(snapshot["loaders"][dist.get_rank()])
    ddp = DistributedDataParallel(network)
    for epoch in range(first_epoch, task.num_epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            _step(ddp, optimizer, batch)
            num_steps += 1
            if num_steps % task.save_every == 0:
                states: list[Any] = [None] * task.num_ranks
                dist.all_gather_object(states, loader.state_dict())
                saved = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
                _save({**saved, "epoch": epoch, "step": num_steps, "loaders": states}, path)


def _step(ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    optimizer.zero_grad()
    compute_loss(ddp(batch["images"], batch["ids"]), batch["labels"]).backward()
    optimizer.step()


def _save(state: dict[str, Any], path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(state, path)


if __name__ == "__main__":
    main()
