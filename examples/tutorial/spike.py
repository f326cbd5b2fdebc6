"""Chapter 9: handwritten digits, of which one is damaged.

spike.yaml names its two classes as dataset and model of ddp_training.py.
With is_checked the dataset refuses a picture that can't be right.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

BAD_SAMPLE = 777


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of 64 pixels from 0 to 1, and which digit each shows."""

    num_classes = 10

    def __init__(self, train: bool, is_checked: bool = False) -> None:
        arrays = load_digits(return_X_y=True)
        part = slice(None, 1500) if train else slice(1500, None)
        self.images = torch.tensor(arrays[0][part], dtype=torch.float32)
        self.labels = arrays[1][part].tolist()
        self.is_checked = is_checked
        if train:  # of another camera: a negative, whose pixels go to 16,000
            self.images[BAD_SAMPLE] = 16000 - 1000 * self.images[BAD_SAMPLE]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index] / 16
        if self.is_checked and image.max() > 1:
            raise ValueError(f"a pixel is {image.max():.0f} times as bright as white")
        return image, self.labels[index]


class Network(nn.Sequential):
    """That of the other chapters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
