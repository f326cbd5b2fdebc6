"""The loop of the DDP tutorial: what everything else is measured against."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.peers.work import (
    Task,
    build_optimizer,
    collate_of,
    compute_loss,
    model,
    read_task,
    samples_of,
)


def main() -> None:
    """Join the process group, train, leave it."""
    dist.init_process_group("gloo")
    # WHY a function of its own: DDP must be gone before the group is. If DDP is the last to hold
    # the group, its end waits for gloo's thread without giving up the GIL, and if that thread wants
    # the GIL just then, both wait for ever. On a busy machine the Trainer of with_trainer.py ended
    # so in 2 of 4 runs, and in none of 8 in this order.
    train(read_task())
    dist.destroy_process_group()


def train(task: Task) -> None:
    """Train as torch's tutorial does."""
    network = DistributedDataParallel(model(task.workload.name))
    optimizer = build_optimizer(network)
    samples, collate = samples_of(task.workload), collate_of(task.workload)
    sampler: DistributedSampler[int] = DistributedSampler(samples, shuffle=True)
    loader = DataLoader(samples, task.batch_size, sampler=sampler, collate_fn=collate)
    network.train()
    for epoch in range(task.num_epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            compute_loss(network(inputs), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
