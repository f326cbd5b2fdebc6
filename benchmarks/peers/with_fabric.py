"""Lightning Fabric, as its documentation converts a loop."""

from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from benchmarks.peers.work import (
    build_optimizer,
    collate_of,
    compute_loss,
    model,
    read_task,
    samples_of,
)
from benchmarks.workloads import NUM_RANKS


def main() -> None:
    """Train with Fabric. It saves and logs only when told to; here it does neither."""
    task = read_task()
    fabric = Fabric(accelerator="cpu", devices=NUM_RANKS, strategy="ddp")
    fabric.launch()
    network = model(task.workload.name)
    network, optimizer = fabric.setup(network, build_optimizer(network))
    samples, collate = samples_of(task.workload), collate_of(task.workload)
    loader = fabric.setup_dataloaders(
        DataLoader(samples, task.batch_size, shuffle=True, collate_fn=collate)
    )
    network.train()
    for _ in range(task.num_epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            fabric.backward(compute_loss(network(inputs), labels))
            optimizer.step()


if __name__ == "__main__":
    main()
