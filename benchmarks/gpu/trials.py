"""The models of runs.py, by --model benchmarks.gpu.trials:build."""

from pathlib import Path

import torch
from torch import nn

_CLASSES = 10
_ASSERT_AT = 6


class Wide(nn.Module):
    """Square layers: width * width * depth parameters, whose gradients need little computation."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        found = self.first(images.flatten(1))
        for layer in self.layers:
            found = found + layer(found).relu()
        logits: torch.Tensor = self.head(found)
        return logits


class Asserts(Wide):
    """In one step of training, once, it looks up a row that its table does not have."""

    def __init__(self, inputs: int, mark: str) -> None:
        super().__init__(inputs, 32, 1)
        self.table = nn.Embedding(4, 32)
        self.mark = Path(mark)
        self.num_forwards = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the logits; a kernel fails in the chosen forward."""
        self.num_forwards += self.training
        place = 0
        if self.num_forwards == _ASSERT_AT and not self.mark.exists():
            self.mark.touch()
            place = 1_000_000
        places = torch.full((len(images),), place, dtype=torch.int64, device=images.device)
        found = self.first(images.flatten(1)) + self.table(places)
        logits: torch.Tensor = self.head(found)
        return logits + self.layers[0](found).sum() * 0


def build(
    input_shape: tuple[int, ...], kind: str, width: int = 64, depth: int = 1, mark: str = ""
) -> nn.Module:
    """Build one of the models: wide, asserts, images."""
    inputs = torch.Size(input_shape).numel()
    if kind == "wide":
        return Wide(inputs, width, depth)
    if kind == "asserts":
        return Asserts(inputs, mark)
    convolutions = [nn.Conv2d(input_shape[0], 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(
        *convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, _CLASSES)
    )
