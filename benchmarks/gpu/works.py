"""What gpu_report.py trains: a ResNet-50, a GPT of 124 million parameters, an MLP; and samples.

Owns the models and their data, for the bare loop and for this project alike. Samples are made once
and repeated: reading them should cost little on both sides.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

_DISTINCT = 64


@dataclass(frozen=True, slots=True)
class Size:
    """How large a work is."""

    batch_size: int
    image_size: int = 0
    length: int = 0
    vocabulary: int = 0
    width: int = 0
    depth: int = 0
    steps: int = 40
    """Steps that are timed."""


SIZES = {
    "resnet50": Size(batch_size=128, image_size=224),
    "gpt": Size(batch_size=8, length=1024, vocabulary=50257, width=768, depth=12),
    "mlp": Size(batch_size=256, width=512, depth=4, steps=400),
}
SMALL = {
    "resnet50": Size(batch_size=2, image_size=32, steps=3),
    "gpt": Size(batch_size=2, length=16, vocabulary=64, width=32, depth=2, steps=3),
    "mlp": Size(batch_size=8, width=16, depth=2, steps=3),
}
INPUTS = 64  # of the MLP
CLASSES = 10


class Gpt(nn.Module):
    """GPT-2's shape: tokens (N, T) -> logits (N, T, vocabulary), with tied embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        heads = max(1, size.width // 64)
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Parameter(torch.zeros(size.length, size.width))
        block = nn.TransformerEncoderLayer(
            size.width, heads, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(size.width)
        self.blocks = nn.TransformerEncoder(block, size.depth, norm, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(size.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give the logits of the token after each position."""
        found = self.tokens(tokens) + self.places
        found = self.blocks(found, mask=self.mask, is_causal=True)
        return nn.functional.linear(found, self.tokens.weight)


class Mlp(nn.Module):
    """A few narrow layers: what counts is the time beside them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        widths = [INPUTS, *[size.width] * size.depth]
        hidden = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(size.width, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        logits: torch.Tensor = self.layers(inputs)
        return logits


class Bottleneck(nn.Module):
    """A block of a ResNet-50: convolutions of 1x1, 3x3 and 1x1, and what goes past them."""

    def __init__(self, before: int, width: int, *, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.layers = nn.Sequential(
            *_convolution(before, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(width, after, 1),
        )
        is_same = stride == 1 and before == after
        past = [] if is_same else _convolution(before, after, 1, stride=stride)
        self.past = nn.Sequential(*past)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the activations of the next block."""
        return nn.functional.relu(self.layers(images) + self.past(images), inplace=True)


def _convolution(before: int, after: int, size: int, *, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(after)]


def _resnet50(*, small: bool) -> nn.Module:
    """Build ResNet-50 v1.5 (He et al. 2015; stride in the 3x3). WHY here: without torchvision."""
    blocks: list[nn.Module] = []
    before = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(1 if small else depth):
            stride = 2 if index == 0 and width > 64 else 1
            blocks.append(Bottleneck(before, width, stride=stride))
            before = 4 * width
    stem = [*_convolution(3, 64, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)]
    return nn.Sequential(*stem, *blocks, *head)


class Samples(Dataset[Any]):
    """num_samples samples of a work; the same few again and again."""

    num_classes = CLASSES
    uses_randomness = False

    def __init__(self, *, train: bool, work: str, small: bool, num_samples: int) -> None:
        size = sizes(small)[work]
        generator = torch.Generator().manual_seed(int(train))
        num = min(num_samples, _DISTINCT)
        self.num_samples = num_samples if train else num
        if work == "gpt":
            self.num_classes = size.vocabulary
            tokens = torch.randint(size.vocabulary, (num, size.length + 1), generator=generator)
            self.inputs, self.labels = tokens[:, :-1], tokens[:, 1:]
            return
        shape = (INPUTS,) if work == "mlp" else (3, size.image_size, size.image_size)
        self.inputs = torch.randn(num, *shape, generator=generator)
        self.labels = torch.randint(CLASSES, (num,), generator=generator)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = index % len(self.inputs)
        return self.inputs[place], self.labels[place]


def sizes(small: bool) -> dict[str, Size]:
    """Return the size of each work."""
    return SMALL if small else SIZES


def model(work: str, *, small: bool) -> nn.Module:
    """Build the model of a work."""
    size = sizes(small)[work]
    if work == "gpt":
        return Gpt(size)
    if work == "mlp":
        return Mlp(size)
    return _resnet50(small=small)
