"""MixUp and CutMix: a collate function mixes the images of a batch, and their labels as much.

    torchrun --nproc_per_node=2 ddp_training.py --config examples/mixup/config.yaml

The training set has it as its method collate_fn; the test set has none. Random numbers are torch's
own: a retry, or a resume on as many ranks, mixes alike. Partners are of this rank's batch.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import Dataset

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.task.task import Metric, Score, Task

Sample = tuple[torch.Tensor, torch.Tensor]
ALPHA = 0.4


def mix(images: torch.Tensor, labels: torch.Tensor) -> Sample:
    """Mix each image with another one: by its values (MixUp), or by a box (CutMix)."""
    partner = torch.randperm(len(images))
    share = float(torch.distributions.Beta(ALPHA, ALPHA).sample())  # of the image itself
    if torch.rand(()) < 0.5:
        images = share * images + (1 - share) * images[partner]
    else:
        height, width = images.shape[-2:]
        size = (1 - share) ** 0.5
        top, left = (int(torch.randint(side, ())) for side in (height, width))
        box = (..., slice(top, top + round(size * height)), slice(left, left + round(size * width)))
        images = images.clone()
        images[box] = images[partner][box]
        share = 1 - images[box][0, 0].numel() / (height * width)
    return images, share * labels + (1 - share) * labels[partner]


class SoftLabels(Task):
    """Cross-entropy with a share of each class; tests have the class itself."""

    metrics = (Metric("accuracy", form=".2%"),)
    counts_samples = True

    def score(self, output: torch.Tensor, batch: Batch) -> Score:
        loss, labels = cross_entropy(output, batch.targets, reduction="sum"), batch.targets
        classes = labels.argmax(dim=1) if labels.dim() == 2 else labels
        return Score(loss, batch.num_samples, {"accuracy": (output.argmax(dim=1) == classes).sum()})


class Digits(Dataset[Sample]):
    """Handwritten digits of scikit-learn: image (1, 8, 8), label."""

    num_classes = 10

    def __init__(self, first: int, last: int) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[first:last], dtype=torch.float32)[:, None] / 16
        self.labels = torch.tensor(digits.target[first:last])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return self.images[index], self.labels[index]


class Mixed(Digits):
    """The training set."""

    def collate_fn(self, samples: list[Sample]) -> Sample:
        images, labels = (torch.stack(part) for part in zip(*samples, strict=True))
        return mix(images, one_hot(labels, self.num_classes).float())


def digits(train: bool) -> Digits:
    return Mixed(0, 1400) if train else Digits(1400, 1797)
