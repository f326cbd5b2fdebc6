"""Hugging Face Accelerate, as its quick tour shows."""

from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.peers.work import (
    build_optimizer,
    collate_of,
    compute_loss,
    model,
    read_task,
    samples_of,
)


def main() -> None:
    """Train with an Accelerator. It saves and logs only when told to; here it does neither."""
    task = read_task()
    accelerator = Accelerator(cpu=True)
    network = model(task.workload.name)
    samples, collate = samples_of(task.workload), collate_of(task.workload)
    network, optimizer, loader = accelerator.prepare(
        network,
        build_optimizer(network),
        DataLoader(samples, task.batch_size, shuffle=True, collate_fn=collate),
    )
    network.train()
    for _ in range(task.num_epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(compute_loss(network(inputs), labels))
            optimizer.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
