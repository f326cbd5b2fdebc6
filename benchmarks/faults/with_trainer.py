"""Hugging Face's Trainer as its examples resume: get_last_checkpoint, resume_from_checkpoint.

Its checkpoint on SIGTERM (enable_jit_checkpoint) is on, which it is not by default.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.faults.task import Digits, Task, build_optimizer, compute_loss, model, read_task


class WithLoss(nn.Module):
    """The network with its loss in forward, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = model()

    def forward(
        self, images: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, Any]:
        logits = self.network(images, ids)
        return {"loss": compute_loss(logits, labels), "logits": logits}


def main() -> None:
    """Train, then leave the process group; see ../peers/bare.py for this order."""
    train(read_task())
    dist.destroy_process_group()


def train(task: Task) -> None:
    """Train with transformers.Trainer, from the newest checkpoint-N if there is one."""
    network = WithLoss()
    arguments = TrainingArguments(
        output_dir=str(task.output_dir),
        per_device_train_batch_size=task.batch_size,
        num_train_epochs=task.num_epochs,
        lr_scheduler_type="constant",
        use_cpu=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
        dataloader_num_workers=task.num_workers,
        remove_unused_columns=False,
        save_strategy="steps",
        save_steps=task.save_every,
        enable_jit_checkpoint=True,
        report_to="none",
        seed=0,
    )
    trainer = Trainer(
        model=network,
        args=arguments,
        train_dataset=Digits(),
        optimizers=(build_optimizer(network), None),
    )
    task.output_dir.mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(task.output_dir)))


if __name__ == "__main__":
    main()
