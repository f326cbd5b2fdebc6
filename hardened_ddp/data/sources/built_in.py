"""The datasets that need no download: handwritten digits, and synthetic images of any number."""

import functools
import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from hardened_ddp.data.batches.images import MemoryImages
from hardened_ddp.errors import DataError
from hardened_ddp.ranks.seeding import mix
from hardened_ddp.settings.typed_command import pip_command, python_command

# The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn: E. Alpaydin, C. Kaynak:
# Optical Recognition of Handwritten Digits, UCI, 1998 (test part).
NUM_SAMPLES = 1797
NUM_FOR_TRAINING = 1437  # four fifths, in a fixed random order
# Pixels are in 0 to 16; mean and deviation of the training part.
_MEAN, _DEVIATION = 4.88, 6.02


def open_digits(*, train: bool) -> MemoryImages:
    """Open the training or the test part. Raises DataError if the file is missing or damaged."""
    # WHY not sklearn.datasets: importing it takes nearly a second; the package's file needs 10 ms.
    table = read_table(find_file())
    order = np.random.default_rng(0).permutation(NUM_SAMPLES)
    table = table[order[:NUM_FOR_TRAINING] if train else order[NUM_FOR_TRAINING:]]
    pixels = torch.from_numpy(table[:, :64].copy()).view(-1, 1, 8, 8)
    labels = torch.from_numpy(table[:, 64].astype(np.int64))
    classes = [str(digit) for digit in range(10)]
    return MemoryImages((pixels - _MEAN) / _DEVIATION, labels, classes=classes)


def find_file() -> Path:
    """Find the file in scikit-learn's package. Raises DataError if that is not installed."""
    # WHY find_spec: it finds the package without importing it
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError(
            "the digits come with scikit-learn, which is not installed",
            fix=f"choose --dataset synthetic, or: {pip_command('requirements.txt')}",
        )
    return Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"


@functools.lru_cache(maxsize=1)  # WHY: each part of the dataset is cut from the same table
def read_table(path: Path) -> npt.NDArray[np.float32]:
    """Read the file: (1797, 65) float32, 64 pixels and the label. Raises DataError."""
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.float32)
        if table.shape != (NUM_SAMPLES, 65):
            raise ValueError(f"a table of {table.shape}, not of {(NUM_SAMPLES, 65)}")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"{path} can't be read: {error}",
            fix=python_command("-m", "pip", "install", "--force-reinstall", "scikit-learn"),
        ) from error
    return table


_TEST_OFFSET = 2**40  # keeps test samples apart from training samples


class SyntheticImages(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """num_samples images (channels, image_size, image_size) in num_classes classes.

    A sample is the pattern of its class plus noise, so a model can learn it; it is a function of
    its index alone, so a billion samples take no memory.
    """

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
