"""The work, the same for every contender: data, model, loss, optimizer, and batches of texts.

Owns what is trained. `dataset` and `model` are what ddp_training.py is given as import paths; the
other contenders use the same parts in the way that their documentation shows.
Does not own: sizes and batch (workloads.py), how a contender trains (its own file).
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from benchmarks.workloads import NUM_EPOCHS, WORKLOADS, Workload, bench_home

NUM_CLASSES = 10
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
# Mean and standard deviation of MNIST's pixels.
_MNIST_MEAN, _MNIST_DEVIATION = 0.1307, 0.3081

# Of the texts: bytes in a sample, and what marks a place without a label.
_SHORTEST, _LONGEST, _NO_LABEL = 16, 128, -100
_NUM_BYTES = 256

Sample = tuple[torch.Tensor, torch.Tensor]
Collate = Callable[[list[Sample]], Sample]


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
    """The same, read a batch at a time, of which ddp_training.py makes use."""

    uses_randomness = False  # else it would seed torch, random and numpy for each batch

    def __getitems__(self, indices: list[int]) -> Sample:
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]


class Texts(Dataset[Sample]):
    """Pieces of Python's help texts, 16 to 128 bytes each: (bytes, the byte after each)."""

    uses_randomness = False  # as above

    def __init__(self, workload: Workload) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        generator = torch.Generator().manual_seed(0)
        sizes = torch.randint(_SHORTEST, _LONGEST + 1, (workload.num_images,), generator=generator)
        self.starts = torch.randint(len(text) - _LONGEST - 1, sizes.shape, generator=generator)
        self.sizes = sizes[: workload.samples_per_epoch].tolist()
        self.codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Sample:
        start = int(self.starts[index])
        piece = self.codes[start : start + self.sizes[index] + 1]
        return piece[:-1], piece[1:]

    @staticmethod
    def collate_fn(samples: list[Sample]) -> Sample:
        """Pad a batch to its longest text."""
        inputs, labels = zip(*samples, strict=True)
        return (
            pad_sequence(list(inputs), batch_first=True),
            pad_sequence(list(labels), batch_first=True, padding_value=_NO_LABEL),
        )


class GPT(nn.Module):
    """Four layers of attention to the bytes before: (N, T) -> (N, T, 256)."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(_NUM_BYTES, width), nn.Embedding(_LONGEST, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, activation="gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(block, depth, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, _NUM_BYTES)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        length = codes.shape[1]
        hidden = self.embed(codes) + self.place(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


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


def dataset(train: bool, *, work: str, batched: bool = False) -> Images | Texts | None:
    """Give the training set of a work; there is no test set. For --dataset.

    batched: images have __getitems__ too; else they are read as the other contenders read them.
    """
    if not train:
        return None
    workload = WORKLOADS[work]
    if batched and workload.data != "text":
        return BatchedImages(workload)
    return samples_of(workload)


def samples_of(workload: Workload) -> Images | Texts:
    """Give the training set of a work as the other contenders read it: sample by sample."""
    return Texts(workload) if workload.data == "text" else Images(workload)


def collate_of(workload: Workload) -> Collate | None:
    """Return what makes a batch of samples; None: torch's way."""
    return Texts.collate_fn if workload.data == "text" else None


def compute_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, of texts over the bytes of this batch, as people write it."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


def model(work: str) -> nn.Module:
    """Build the model of a work, the same on every rank. For --model."""
    torch.manual_seed(0)
    if work == "tiny":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES)
        )
    if work == "gpt":
        return GPT()
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
