"""Datasets of torchvision: in memory, or folders of images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hardened_ddp.data.batches.images import MemoryImages
from hardened_ddp.data.foreign_code import import_torchvision
from hardened_ddp.errors import DataError
from hardened_ddp.settings.config import DataConfig
from hardened_ddp.settings.typed_command import download_command, shell_command

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
    # WHY broad: torchvision raises RuntimeError for a missing file, and ValueError, AssertionError
    # or others for an incomplete one
    except Exception as error:
        action = "downloaded" if download else "found whole"
        raise DataError(
            f"{class_name} can't be {action} in {root.resolve()}: {error}",
            fix=by_hand(name, root),
        ) from error
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
    crop = (
        [steps.RandomResizedCrop(image_size), steps.RandomHorizontalFlip()]
        if train and config.augment
        else [steps.Resize(image_size), steps.CenterCrop(image_size)]
    )
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
    try:
        return vision.datasets.ImageFolder(str(folder), transform=transform)  # type: ignore[no-any-return]  # untyped
    except (FileNotFoundError, OSError) as error:
        raise DataError(
            f"{folder} can't be read as one folder per class: {error}",
            fix=f"look: {shell_command('ls', folder)}",
        ) from error
