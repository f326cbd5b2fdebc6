"""Images that are in memory as one tensor, fetched a batch at a time.

WHY batch-wise: taking 32 rows of one tensor costs as much as taking one, so it is ten times as fast
as sample by sample, and faster than a worker process could send them.
Augmentation is a function of (seed, epoch, sample index): neither ranks nor workers nor restarts
change it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hardened_ddp.ranks.seeding import mix

Indices = torch.Tensor | Sequence[int]

# What sets of others call the columns of an image and of its label.
IMAGE_COLUMNS = ("image", "img", "pixel_values", "images")
LABEL_COLUMNS = ("label", "labels", "fine_label", "target")


class MemoryImages(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images (N, C, H, W), float or uint8, with labels (N,) int64."""

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        *,
        classes: Sequence[str],
        scale: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        """scale: mean and standard deviation of each channel in [0, 1], for uint8 images."""
        self.images, self.labels, self.classes = images, labels, list(classes)
        self.has_scale = scale is not None
        if scale is not None:
            mean, deviation = (torch.tensor(part).view(1, -1, 1, 1) for part in scale)
            self.shift, self.factor = mean / deviation, 1 / (255 * deviation)
        self.max_shift = 0
        self.flips = False

    def augmented(self) -> "MemoryImages":
        """Return self with augmentation on: random shifts by up to 1/8, and flips of RGB images."""
        self.max_shift = max(1, self.images.shape[-1] // 8)
        self.flips = self.images.shape[1] == 3  # WHY not grey ones: a mirrored digit is not a digit
        return self

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fetch(torch.as_tensor(indices))

    def fetch(
        self, indices: torch.Tensor, *, seed: int = 0, epoch: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and labels of indices, (n,) int64, augmented as in this epoch."""
        images = self.images.index_select(0, indices)
        labels = self.labels.index_select(0, indices)
        if self.max_shift:
            draws = _draws(indices, mix(seed, epoch))
            images = _augment(images, draws, self.max_shift, flips=self.flips)
        if self.has_scale:
            images = images.to(torch.float32).mul_(self.factor).sub_(self.shift)
        return images, labels


def pixels_of(value: Any, image_size: int) -> torch.Tensor:  # Any: a PIL image, or nested numbers
    """Convert an image to a float tensor (C, H, W): -1 is black, 1 is white."""
    if hasattr(value, "convert"):
        value = value if value.mode in ("L", "RGB") else value.convert("RGB")
        if image_size:
            value = value.resize((image_size, image_size))
        pixels = torch.from_numpy(np.array(value))
        pixels = pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        return pixels.to(torch.float32) / 127.5 - 1
    numbers = torch.as_tensor(np.asarray(value), dtype=torch.float32)
    return numbers.unsqueeze(0) if numbers.dim() == 2 else numbers


def _draws(indices: torch.Tensor, key: int) -> torch.Tensor:
    """Return one pseudo-random number in [0, 2**24) for each index and each of 3 uses: (n, 3).

    A multiplicative hash (Knuth: The art of computer programming, vol. 3, 6.4) with xor-shifts, on
    int64 that wraps around.
    """
    words = indices.view(-1, 1) * 3 + torch.arange(3) + key % (1 << 31)
    for factor in (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85):
        words = (words ^ (words >> 29)) * factor
    return (words >> 32) & 0xFFFFFF


def _augment(
    images: torch.Tensor, draws: torch.Tensor, max_shift: int, *, flips: bool
) -> torch.Tensor:
    """Shift each image by up to max_shift pixels, padded with zeros; mirror half of them."""
    count, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, [max_shift] * 4)
    offsets = draws[:, :2] % (2 * max_shift + 1)
    rows = torch.arange(height) + offsets[:, :1]
    columns = torch.arange(width) + offsets[:, 1:]
    if flips:
        columns = torch.where(draws[:, 2:] % 2 == 0, columns, columns.flip(1))
    # WHY one gather: indexing by four tensors is twice as slow.
    places = (rows[:, :, None] * padded.shape[3] + columns[:, None, :]).view(count, 1, -1)
    taken = padded.flatten(2).gather(2, places.expand(-1, channels, -1))
    return taken.view(count, channels, height, width)
