"""Segmentation: which pixels of a noisy picture belong to a digit, and to which one?

    torchrun --nproc_per_node=2 ddp_training.py --config examples/segmentation/config.yaml

Each picture is made when it is read: a handwritten digit of scikit-learn, 8x8 pixels, at a random
place on noise. Its label names for each pixel the digit there; 10: none.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

SIZE, NOTHING = 16, 10


class Pictures(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """(picture (1, SIZE, SIZE), label of each pixel (SIZE, SIZE)). The same for one index."""

    num_classes = NOTHING + 1
    classes = (*map(str, range(10)), "nothing")
    uses_randomness = False  # none but its own generator's

    def __init__(self, first: int, last: int, num_pictures: int) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[first:last], dtype=torch.float32) / 16
        self.labels = torch.tensor(digits.target[first:last])
        self.num_pictures = num_pictures

    def __len__(self) -> int:
        return self.num_pictures

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(index)
        picture = 0.2 * torch.rand(1, SIZE, SIZE, generator=random)
        label = torch.full((SIZE, SIZE), NOTHING)
        number = int(torch.randint(len(self.images), (1,), generator=random))
        top, left = torch.randint(SIZE - 8, (2,), generator=random).tolist()
        part = (slice(top, top + 8), slice(left, left + 8))
        ink = self.images[number] > 0.3
        picture[0][part] = torch.where(ink, self.images[number], picture[0][part])
        label[part] = torch.where(ink, self.labels[number], NOTHING)
        return picture, label


def pictures(train: bool) -> Pictures:
    """Return the training or the test set; they have no digit in common."""
    return Pictures(0, 1400, 3000) if train else Pictures(1400, 1797, 300)


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """(N, 1, H, W) -> (N, num_classes, H, W): down twice, up twice, with skips between."""

    def __init__(self, num_classes: int, width: int = 24) -> None:
        super().__init__()
        self.top = conv(1, width)
        self.middle = nn.Sequential(conv(width, 2 * width, 2), conv(2 * width, 2 * width))
        self.bottom = nn.Sequential(conv(2 * width, 4 * width, 2), conv(4 * width, 4 * width))
        self.up = nn.ModuleList([conv(6 * width, 2 * width), conv(3 * width, width)])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        top = self.top(pictures)
        middle = self.middle(top)
        found = self.bottom(middle)
        for skip, up in zip((middle, top), self.up, strict=True):
            found = up(torch.cat([interpolate(found, scale_factor=2.0), skip], dim=1))
        logits: torch.Tensor = self.head(found)
        return logits
