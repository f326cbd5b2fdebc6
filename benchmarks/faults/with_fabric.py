"""Lightning Fabric as its documentation saves and loads: fabric.save and fabric.load of a state.

The order of a resumed epoch begins anew: the batches that it had used are skipped by hand.
"""

from itertools import islice
from typing import Any

from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from benchmarks.faults.task import Digits, build_optimizer, compute_loss, model, read_task


def main() -> None:
    """Train with Fabric, from checkpoint.ckpt if there is one."""
    task = read_task()
    fabric = Fabric(accelerator="cpu", devices=task.num_ranks, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    network = model()
    network, optimizer = fabric.setup(network, build_optimizer(network))
    loader: Any = fabric.setup_dataloaders(
        DataLoader(Digits(), task.batch_size, shuffle=True, num_workers=task.num_workers)
    )
    state = {"model": network, "optimizer": optimizer, "step": 0}
    path = task.output_dir / "checkpoint.ckpt"
    if path.exists():
        fabric.load(path, state)
    first_epoch, num_used = divmod(state["step"], len(loader))
    network.train()
    for epoch in range(first_epoch, task.num_epochs):
        loader.sampler.set_epoch(epoch)
        for batch in islice(loader, num_used if epoch == first_epoch else 0, None):
            optimizer.zero_grad()
            fabric.backward(compute_loss(network(batch["images"], batch["ids"]), batch["labels"]))
            optimizer.step()
            state["step"] += 1
            if state["step"] % task.save_every == 0:
                fabric.save(path, state)


if __name__ == "__main__":
    main()
