"""The work under faults, the same for every contender: digits, a small model, AdamW.

`dataset` and `model` are what ddp_training.py is given as import paths; the peers' scripts use the
same parts. A sample carries its id, for the log of what was trained on (incident.py).
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from benchmarks.faults.cases import BATCH_SIZE, NUM_EPOCHS, SAVE_EVERY
from benchmarks.faults.incident import StepLog, check_sample, fire

Sample = dict[str, torch.Tensor]
compute_loss = nn.functional.cross_entropy
_LAPSE_S = 0.05  # what a step takes: long enough for a signal to be heard before the end


@dataclass(frozen=True, slots=True)
class Task:
    """What a peer was asked to do."""

    output_dir: Path
    num_ranks: int
    num_epochs: int
    num_workers: int
    is_stateful: bool
    """Load with torchdata's StatefulDataLoader."""

    is_iterable: bool
    """Load from an IterableDataset, which divides itself among ranks and workers."""

    batch_size: int = BATCH_SIZE
    save_every: int = SAVE_EVERY


class Digits(Dataset[Sample]):
    """The digits that peer_faults.py laid out."""

    num_classes = 10

    def __init__(self) -> None:
        with np.load(os.environ["FAULT_DATA"]) as file:
            self.images, self.labels = map(torch.from_numpy, (file["images"], file["labels"]))
        self.main_pid = os.getpid()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        check_sample(index, main_pid=self.main_pid)
        ids = torch.tensor(index)
        return {"images": self.images[index], "ids": ids, "labels": self.labels[index]}


class Stream(IterableDataset[Sample]):
    """The digits in their order, as torch's documentation divides such a dataset."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.digits, self.rank, self.num_ranks = Digits(), rank, num_ranks

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        place, num = (worker.id, worker.num_workers) if worker else (0, 1)
        first, step = self.rank * num + place, self.num_ranks * num
        return (self.digits[index] for index in range(first, len(self.digits), step))


class Classifier(nn.Module):
    """An MLP whose layer `side` can be left out, and in which the fault strikes."""

    steps_done: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side = nn.Linear(64, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)
        self.register_buffer("steps_done", torch.tensor(0))
        self.log = StepLog(self.steps_done, self)

    def forward(self, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(_LAPSE_S)
        self.log.begin_forward()
        effect = fire(int(self.steps_done) + 1) if self.training else ""
        hidden = self.first(images.flatten(1)).relu()
        if effect != "unused":
            hidden = hidden + self.side(hidden).relu()
        logits: torch.Tensor = self.head(hidden)
        if effect == "nan":
            logits = logits * float("nan")
        if effect == "backward":
            hidden.register_hook(_raise)
        if logits.requires_grad:
            logits.register_hook(lambda _: self._note(ids))
        return logits

    def _note(self, ids: torch.Tensor) -> None:
        self.log.ids += ids.tolist()


def _raise(gradient: torch.Tensor) -> None:
    raise RuntimeError("an error in backward (injected)")


def dataset(train: bool) -> Digits | None:
    """Give the training set; there is no test set. For --dataset."""
    return Digits() if train else None


def model() -> Classifier:
    """Build the model, the same on every rank. For --model."""
    torch.manual_seed(0)
    return Classifier()


def build_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=1e-3)


def read_task() -> Task:
    """Read a peer's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=NUM_EPOCHS)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--stateful", action="store_true")
    parser.add_argument("--iterable", action="store_true")
    found = parser.parse_args()
    return Task(
        output_dir=found.output_dir,
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        num_epochs=found.epochs,
        num_workers=found.num_workers,
        is_stateful=found.stateful,
        is_iterable=found.iterable,
    )
