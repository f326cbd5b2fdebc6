"""Synthetic images of any number and size, generated on demand.

Each class has a fixed random pattern; a sample is its class's pattern plus noise. So a model can
learn it, and a billion samples take no memory: sample i is a function of i alone.
"""

import torch
from torch.utils.data import Dataset

from hardened_ddp.ranks.seeding import mix

_TEST_OFFSET = 2**40  # keeps test samples apart from training samples


class SyntheticImages(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """num_samples images (channels, image_size, image_size) in num_classes classes."""

    def __init__(
        self,
        *,
        train: bool,
        num_samples: int = 10_000,
        test_samples: int = 1_000,
        image_size: int = 32,
        channels: int = 3,
        num_classes: int = 10,
    ) -> None:
        self.size = num_samples if train else test_samples
        self.offset = 0 if train else _TEST_OFFSET
        self.num_classes = num_classes
        generator = torch.Generator().manual_seed(mix(num_classes, channels, image_size))
        self.patterns = torch.randn(
            num_classes, channels, image_size, image_size, generator=generator
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of {self.size}")
        key = mix(index + self.offset)
        label = key % self.num_classes
        generator = torch.Generator().manual_seed(key)
        image = torch.randn(self.patterns.shape[1:], generator=generator)
        return image.add_(self.patterns[label]), torch.tensor(label)
