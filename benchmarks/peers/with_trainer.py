"""Hugging Face's Trainer: logs to TensorBoard, saves each epoch, otherwise its defaults."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from benchmarks.peers.work import (
    Images,
    Task,
    Texts,
    build_optimizer,
    collate_of,
    compute_loss,
    model,
    read_task,
    samples_of,
)


class NamedSamples(Dataset[dict[str, torch.Tensor]]):
    """The same samples as the Trainer wants them: each is a dict."""

    def __init__(self, samples: Images | Texts) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, labels = self.samples[index]
        return {"inputs": inputs, "labels": labels}


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make a batch of texts."""
    inputs, labels = Texts.collate_fn([(row["inputs"], row["labels"]) for row in samples])
    return {"inputs": inputs, "labels": labels}


class Classifier(nn.Module):
    """The network with its loss in forward, as the Trainer wants it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(inputs)
        return {"loss": compute_loss(logits, labels), "logits": logits}


def main() -> None:
    """Train, then leave the process group; see bare.py for this order."""
    train(read_task())
    dist.destroy_process_group()


def train(task: Task) -> None:
    """Train with transformers.Trainer."""
    network = Classifier(model(task.workload.name))
    arguments = TrainingArguments(
        output_dir=str(task.output_dir),
        per_device_train_batch_size=task.batch_size,
        num_train_epochs=task.num_epochs,
        lr_scheduler_type="constant",
        max_grad_norm=0,  # WHY: clipping is work that the others don't do
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        save_strategy="epoch",
        logging_steps=50,  # as often as Lightning's default
        report_to="tensorboard",
        seed=0,
    )
    trainer = Trainer(
        model=network,
        args=arguments,
        train_dataset=NamedSamples(samples_of(task.workload)),
        data_collator=pad if collate_of(task.workload) else None,
        optimizers=(build_optimizer(network), None),
    )
    trainer.train()


if __name__ == "__main__":
    main()
