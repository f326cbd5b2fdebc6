"""Lightning's Trainer with a ModelCheckpoint each few steps and ckpt_path="last"."""

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.faults.task import Digits, build_optimizer, compute_loss, model, read_task


class Module(lightning.LightningModule):
    """The network and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = model()

    def training_step(self, batch: dict[str, Any], batch_index: int) -> torch.Tensor:
        return compute_loss(self.network(batch["images"], batch["ids"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self)


def main() -> None:
    """Train with lightning.Trainer, from last.ckpt if there is one."""
    task = read_task()
    # WHY first: torchdata's sampler draws its seed when it is made, and ranks must draw the same.
    lightning.seed_everything(0)
    kind: Any = DataLoader
    if task.is_stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    loader = kind(Digits(), task.batch_size, shuffle=True, num_workers=task.num_workers)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=task.num_ranks,
        strategy="ddp",
        max_epochs=task.num_epochs,
        default_root_dir=task.output_dir,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(
                dirpath=task.output_dir,
                every_n_train_steps=task.save_every,
                save_top_k=-1,
                save_last=True,
            )
        ],
    )
    trainer.fit(Module(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
