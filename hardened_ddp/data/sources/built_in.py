"""Datasets by name: digits and synthetic images, which need no download, and torchvision's."""

import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from hardened_ddp.data.batches.images import MemoryImages
from hardened_ddp.data.foreign_code import import_torchvision
from hardened_ddp.errors import DataError
from hardened_ddp.ranks.seeding import mix
from hardened_ddp.settings.config import DataConfig
from hardened_ddp.settings.typed_command import download_command, pip_command

# The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn: E. Alpaydin, C. Kaynak:
# Optical Recognition of Handwritten Digits, UCI, 1998 (test part).
NUM_SAMPLES = 1797
NUM_FOR_TRAINING = 1437  # four fifths, in a fixed random order
# Pixels are in 0 to 16; mean and deviation of the training part.
_MEAN, _DEVIATION = 4.88, 6.02


def open_digits(*, train: bool) -> MemoryImages:
    """Open the training or the test part. Raises DataError without scikit-learn."""
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
    """Read the file: (1797, 65) float32, 64 pixels and the label."""
    return np.loadtxt(path, delimiter=",", dtype=np.float32)


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


# name here: (torchvision class, channel means, channel standard deviations of the training set)
DOWNLOADABLE: Mapping[str, tuple[str, tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ("MNIST", (0.1307,), (0.3081,)),
    "fashion_mnist": ("FashionMNIST", (0.2860,), (0.3530,)),
    "cifar10": ("CIFAR10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ("CIFAR100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def open_downloadable(name: str, *, train: bool, data_dir: str, download: bool) -> MemoryImages:
    """Open one of DOWNLOADABLE from data_dir. Raises DataError with what to do by hand."""
    class_name, mean, deviation = DOWNLOADABLE[name]
    dataset_class = getattr(import_torchvision().datasets, class_name)
    root = Path(data_dir)
    try:
        source = dataset_class(str(root), train=train, download=download)
    except Exception as error:  # WHY broad: RuntimeError for a missing file; others for a cut one
        what = f"{class_name} can't be {'downloaded' if download else 'found whole'}"
        why = f"{what} in {root.resolve()}: {error}"
        raise DataError(why, fix=by_hand(name, root)) from error
    images = torch.as_tensor(np.asarray(source.data))
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    labels = torch.as_tensor(source.targets, dtype=torch.int64)
    return MemoryImages(images, labels, classes=source.classes, scale=(mean, deviation))


def by_hand(name: str, data_dir: Path) -> str:
    """Return how to copy one of DOWNLOADABLE to a machine without internet."""
    return (
        "choose --dataset digits, which needs no download; or copy the content of the folder data "
        f"to {data_dir.resolve()} (first remove what is there of {DOWNLOADABLE[name][0]}) from a "
        "machine with internet, where this writes it: "
        + download_command("--dataset", name, "--data_dir", "data")
    )


def open_folder(
    config: DataConfig, *, train: bool, root: str = "", image_size: int = 224
) -> Dataset[Any] | None:
    """Open ROOT/train or ROOT/val (else ROOT/test), with one folder of images per class."""
    vision = import_torchvision()
    base = Path(root or config.data_dir)
    folders = [base / name for name in (("train",) if train else ("val", "test"))]
    folder = next((path for path in folders if path.is_dir()), None)
    if folder is None:
        if not train:
            return None
        raise DataError(
            f"{folders[0]} does not exist: image_folder needs ROOT/train/CLASS/*.jpg",
            fix="--dataset image_folder --dataset_args '{root: /path/to/images}'",
        )
    steps = vision.transforms.v2
    crop = [steps.Resize(image_size), steps.CenterCrop(image_size)]
    if train and config.augment:
        crop = [steps.RandomResizedCrop(image_size), steps.RandomHorizontalFlip()]
    transform = steps.Compose(
        [
            steps.ToImage(),
            *crop,
            steps.ToDtype(torch.float32, scale=True),
            # ImageNet's means and standard deviations, which pretrained weights expect
            steps.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            steps.ToPureTensor(),
        ]
    )
    return vision.datasets.ImageFolder(str(folder), transform=transform)  # type: ignore[no-any-return]  # untyped
