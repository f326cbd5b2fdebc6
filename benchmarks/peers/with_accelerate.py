"""Hugging Face Accelerate, as its quick tour shows."""

from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.peers.work import Images, build_optimizer, compute_loss, model, read_task


def main() -> None:
    """Train with an Accelerator. It saves and logs only when told to; here it does neither."""
    task = read_task()
    accelerator = Accelerator(cpu=True)
    network = model(task.workload.name)
    network, optimizer, loader = accelerator.prepare(
        network,
        build_optimizer(network),
        DataLoader(Images(task.workload), batch_size=task.batch_size, shuffle=True),
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
