"""The work, the same for every contender: data, model, loss, optimizer.

Owns what is trained. `dataset` and `model` are what ddp_training.py is given as import paths; the
other contenders use the same parts in the way that their documentation shows.
Does not own: sizes and batch (workloads.py), how a contender trains (its own file).
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from benchmarks.workloads import NUM_EPOCHS, WORKLOADS, Workload, bench_home

NUM_CLASSES = 10
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
# Mean and standard deviation of MNIST's pixels.
_MNIST_MEAN, _MNIST_DEVIATION = 0.1307, 0.3081

Sample = tuple[torch.Tensor, torch.Tensor]
compute_loss = nn.functional.cross_entropy


@dataclass(frozen=True, slots=True)
class Task:
    """What a contender was asked to do."""

    workload: Workload
    output_dir: Path
    num_epochs: int = NUM_EPOCHS

    @property
    def batch_size(self) -> int:
        """Per rank."""
        return self.workload.batch_size


class Images(Dataset[Sample]):
    """The usual data set in memory, read sample by sample."""

    num_classes = NUM_CLASSES

    def __init__(self, workload: Workload) -> None:
        self.images, self.labels = load_images(workload)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return self.images[index], self.labels[index]


class BatchedImages(Images):
    """The same, read a batch at a time: what ddp_training.py makes use of."""

    uses_randomness = False  # else it would seed torch, random and numpy for each batch

    def __getitems__(self, indices: list[int]) -> Sample:
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]


class SimpleCNN(nn.Module):
    """Two convolutions and two linear layers: 421,642 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 7 * 7, 128)
        self.head = nn.Linear(128, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = nn.functional.max_pool2d(self.conv1(images).relu(), 2)
        features = nn.functional.max_pool2d(self.conv2(features).relu(), 2)
        return self.head(self.hidden(features.flatten(1)).relu())


def read_task() -> Task:
    """Read a contender's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True, choices=WORKLOADS)
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    return Task(WORKLOADS[options.work], options.output_dir)


def dataset(train: bool, *, work: str) -> BatchedImages | None:
    """Give the training set of a work; there is no test set. For --dataset."""
    return BatchedImages(WORKLOADS[work]) if train else None


def model(work: str) -> nn.Module:
    """Build the model of a work, the same on every rank. For --model."""
    torch.manual_seed(0)
    if work == "tiny":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES)
        )
    return SimpleCNN() if work == "mnist" else _resnet18()


def build_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """AdamW as people write it; fused and the like are for a contender to find."""
    return torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def load_images(workload: Workload) -> Sample:
    """Give the images of a work, normalised, and their labels, in whole batches."""
    prefix = bench_home() / "data" / workload.data
    images = torch.from_numpy(np.load(f"{prefix}_images.npy"))
    labels = torch.from_numpy(np.load(f"{prefix}_labels.npy"))
    if images.dtype == torch.uint8:
        images = (images.float() / 255 - _MNIST_MEAN) / _MNIST_DEVIATION
    images, labels = images.repeat(workload.repeat, 1, 1, 1), labels.repeat(workload.repeat)
    size = workload.samples_per_epoch
    return images[:size], labels[:size]


def _resnet18() -> nn.Module:
    # WHY here: it lies beside the venv, so that the peers do not stumble over it; see setup.sh.
    sys.path.append(str(bench_home() / "torchvision"))
    if torch.version.cuda is None:
        # WHY: torchvision's operators are built for CUDA; its import only wants these declared.
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
    from torchvision.models import resnet18

    return resnet18(num_classes=NUM_CLASSES)
