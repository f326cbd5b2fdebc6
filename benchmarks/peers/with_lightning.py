"""Lightning's Trainer with its defaults: logger, progress bar, a checkpoint each epoch."""

import lightning
import torch
from torch.utils.data import DataLoader

from benchmarks.peers.work import (
    Sample,
    build_optimizer,
    collate_of,
    compute_loss,
    model,
    read_task,
    samples_of,
)
from benchmarks.workloads import NUM_RANKS


class Classifier(lightning.LightningModule):
    """The network and its loss."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Sample, batch_index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = compute_loss(self.network(inputs), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self)


def main() -> None:
    """Train with lightning.Trainer."""
    task = read_task()
    samples, collate = samples_of(task.workload), collate_of(task.workload)
    loader = DataLoader(samples, task.batch_size, shuffle=True, collate_fn=collate)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy="ddp",
        max_epochs=task.num_epochs,
        default_root_dir=task.output_dir,
    )
    trainer.fit(Classifier(model(task.workload.name)), loader)


if __name__ == "__main__":
    main()
