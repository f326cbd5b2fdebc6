"""Datasets by name or by import path.

Owns opening the training and the test set and saying what they are: classes, shape, fingerprint.
prepare_data may download, on one rank of each node; build_data only opens, on every rank.
What goes wrong here: a wrong name, missing files, no network; each a DataError before training.
Does not own: the order of samples (sampler.py), reading them (loader.py).
"""

import difflib
import gzip
import hashlib
import importlib
import importlib.util
import inspect
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hardened_ddp.data.memory import MemoryImages
from hardened_ddp.data.synthetic import SyntheticImages
from hardened_ddp.data.vision import import_torchvision
from hardened_ddp.errors import DataError
from hardened_ddp.settings.config import DataConfig

# name here: (torchvision class, channel means, channel standard deviations of the training set)
_DOWNLOADABLE: Mapping[str, tuple[str, tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ("MNIST", (0.1307,), (0.3081,)),
    "fashion_mnist": ("FashionMNIST", (0.2860,), (0.3530,)),
    "cifar10": ("CIFAR10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ("CIFAR100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
NAMES = ("digits", *_DOWNLOADABLE, "image_folder", "synthetic")
_NUM_DIGITS_FOR_TRAINING = 1437  # of 1,797: four fifths, in a fixed random order

AnyDataset = Dataset[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskData:
    """A classification task: what to train on, what to test on, and their shape."""

    train: AnyDataset
    test: AnyDataset | None
    num_classes: int
    input_shape: tuple[int, ...]
    """Of one sample, without the batch: (channels, height, width)."""

    class_names: tuple[str, ...]
    fingerprint: str
    """Differs if name, arguments, length or some samples differ."""

    in_memory: bool
    """Fetched by the batch from memory: worker processes would only slow it down."""


def prepare_data(config: DataConfig) -> None:
    """Download what is missing. Call on one rank of each node. Raises DataError."""
    name = _known_name(config.dataset)
    if name in _DOWNLOADABLE and config.download:
        for train in (True, False):
            _open_downloadable(name, config, train=train, download=True)


def build_data(config: DataConfig) -> TaskData:
    """Open the training and the test set; downloads nothing. Rank-local. Raises DataError."""
    name = _known_name(config.dataset)
    train, test = (_open(name, config, train=train) for train in (True, False))
    if train is None or len(train) == 0:  # type: ignore[arg-type]  # map-style: it has a length
        raise DataError(f"dataset {config.dataset} has no training sample", fix="check its folder")
    if test is not None and len(test) == 0:  # type: ignore[arg-type]  # as above
        test = None
    if config.augment and isinstance(train, MemoryImages):
        train = train.augmented()
    num_classes = _count_classes(train, config)
    inputs, _ = first_sample(train, config.dataset)
    names = getattr(train, "classes", None) or [str(index) for index in range(num_classes)]
    return TaskData(
        train=train,
        test=test,
        num_classes=num_classes,
        input_shape=tuple(inputs.shape) if isinstance(inputs, torch.Tensor) else (),
        class_names=tuple(str(name) for name in names),
        fingerprint=_fingerprint(train, config),
        in_memory=isinstance(train, MemoryImages) or hasattr(train, "__getitems__"),
    )


def first_sample(dataset: AnyDataset, name: str, index: int = 0) -> tuple[Any, Any]:
    """Read one sample as (inputs, target). Raises DataError if it has another form."""
    try:
        sample = dataset[index]
    except Exception as error:  # WHY broad: it is the user's code; any failure has this one message
        raise DataError(
            f"dataset {name}: sample {index} can't be read: {type(error).__name__}: {error}",
            fix="make dataset[0] return (input tensor, label)",
        ) from error
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise DataError(
            f"dataset {name}: a sample is a {type(sample).__name__}, need (input tensor, label)",
            fix="make __getitem__ return a pair",
        )
    return sample[0], sample[1]


def _known_name(name: str) -> str:
    if ":" in name:
        return name
    folded = name.lower().replace("-", "_")
    if folded in ("fashionmnist", "imagefolder"):
        folded = {"fashionmnist": "fashion_mnist", "imagefolder": "image_folder"}[folded]
    if folded not in NAMES:
        near = difflib.get_close_matches(folded, NAMES, n=1)
        raise DataError(
            f"no dataset is called {name!r}" + (f" (did you mean {near[0]}?)" if near else ""),
            fix=f"--dataset {' | '.join(NAMES)} | package.module:callable",
        )
    return folded


def _open(name: str, config: DataConfig, *, train: bool) -> AnyDataset | None:
    arguments = dict(config.dataset_args)
    try:
        if ":" in name:
            return _open_import(name, config, train=train)
        if name == "digits":
            return _open_digits(train=train, **arguments)
        if name == "synthetic":
            return SyntheticImages(train=train, **arguments)
        if name == "image_folder":
            return _open_folder(config, train=train, **arguments)
    except TypeError as error:
        raise DataError(
            f"dataset {name} does not take dataset_args {arguments}: {error}",
            fix="check --dataset_args",
        ) from error
    return _open_downloadable(name, config, train=train, download=False)


def _open_digits(*, train: bool) -> MemoryImages:
    """The 8x8 handwritten digits that scikit-learn's package carries (UCI, Alpaydin, Kaynak 1998).

    WHY not sklearn.datasets: importing it takes nearly a second; the package's file needs 10 ms.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError(
            "the digits come with scikit-learn, which is not installed",
            fix="pip install -r requirements.txt, or choose --dataset synthetic",
        )
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        text = gzip.decompress(path.read_bytes()).decode("ascii")
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error}", fix="pip install --force-reinstall scikit-learn"
        ) from error
    table = np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.float32)
    order = np.random.default_rng(0).permutation(len(table))
    cut = _NUM_DIGITS_FOR_TRAINING
    table = table[order[:cut] if train else order[cut:]]
    pixels = torch.from_numpy(table[:, :64].copy()).view(-1, 1, 8, 8)
    # Pixels run from 0 to 16; mean and standard deviation of the training part: 4.88 and 6.02.
    images = (pixels - 4.88) / 6.02
    labels = torch.from_numpy(table[:, 64].astype(np.int64))
    return MemoryImages(images, labels, classes=[str(digit) for digit in range(10)])


def _open_downloadable(
    name: str, config: DataConfig, *, train: bool, download: bool
) -> MemoryImages:
    class_name, mean, deviation = _DOWNLOADABLE[name]
    dataset_class = getattr(import_torchvision().datasets, class_name)
    root = Path(config.data_dir)
    try:
        source = dataset_class(str(root), train=train, download=download)
    except (RuntimeError, OSError) as error:
        action = "downloaded" if download else "found"
        raise DataError(
            f"{class_name} can't be {action} in {root.resolve()}: {error}",
            fix=f'on a machine with internet: python -c "from torchvision.datasets import '
            f"{class_name}; {class_name}('data', download=True)\" and copy the folder here, or "
            "choose --dataset digits, which needs no download",
        ) from error
    images = torch.as_tensor(source.data)
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    labels = torch.as_tensor(source.targets, dtype=torch.int64)
    return MemoryImages(images, labels, classes=source.classes, scale=(mean, deviation))


def _open_folder(
    config: DataConfig, *, train: bool, root: str = "", image_size: int = 224
) -> AnyDataset | None:
    """Open ROOT/train and ROOT/val (or ROOT/test), one folder of pictures per class."""
    vision = import_torchvision()
    base = Path(root or config.data_dir)
    folders = [base / name for name in (("train",) if train else ("val", "test"))]
    folder = next((path for path in folders if path.is_dir()), None)
    if folder is None:
        if not train:
            return None
        raise DataError(
            f"{folders[0]} is not there: image_folder needs ROOT/train/CLASS/*.jpg",
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
            f"{folder} can't be read as one folder per class: {error}", fix=f"look: ls {folder}"
        ) from error


def _open_import(path: str, config: DataConfig, *, train: bool) -> AnyDataset | None:
    """Call package.module:callable(train=..., **dataset_args); data_dir too if it takes that."""
    module_name, _, name = path.partition(":")
    try:
        build: Callable[..., Any] = getattr(importlib.import_module(module_name), name)
        wants_dir = "data_dir" in inspect.signature(build).parameters
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(
            f"--dataset {path} can't be imported: {error}",
            fix="start in the folder that holds the package, and write package.module:callable",
        ) from error
    extra = {"data_dir": config.data_dir} if wants_dir else {}
    dataset: AnyDataset | None = build(train=train, **{**extra, **config.dataset_args})
    if dataset is not None and not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise DataError(
            f"--dataset {path} gave a {type(dataset).__name__} without __getitem__ and __len__",
            fix="return a map-style torch.utils.data.Dataset, or None for no test set",
        )
    return dataset


def _count_classes(dataset: AnyDataset, config: DataConfig) -> int:
    for found in (
        getattr(dataset, "num_classes", None),
        len(getattr(dataset, "classes", None) or ()) or None,
    ):
        if found is not None:
            return int(found)
    targets = getattr(dataset, "targets", None)
    if targets is not None and len(targets):
        return int(torch.as_tensor(targets).max()) + 1
    raise DataError(
        f"dataset {config.dataset} does not say how many classes it has",
        fix="give it an attribute num_classes (a number) or classes (their names)",
    )


def _fingerprint(dataset: AnyDataset, config: DataConfig) -> str:
    """Hash name, arguments, length and three samples."""
    size = len(dataset)  # type: ignore[arg-type]  # map-style: it has a length
    digest = hashlib.sha256(f"{config.dataset}|{sorted(config.dataset_args)}|{size}".encode())
    if isinstance(dataset, MemoryImages):  # WHY: others may be random, slow, or fail on a sample
        for index in (0, size // 2, size - 1):
            digest.update(dataset.images[index].numpy().tobytes())
            digest.update(dataset.labels[index].numpy().tobytes())
    return digest.hexdigest()
