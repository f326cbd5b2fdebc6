"""Hugging Face datasets read as a stream: --dataset hf:PATH_OR_NAME --streaming.

Owns opening one, and what a row becomes: (image, label) where it has such columns, else a mapping
of its columns with lists of numbers as tensors. Each file of the dataset is a shard. A file of its
own, because only --streaming needs what it imports.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from hardened_ddp.data.batches.images import pixels_of
from hardened_ddp.data.foreign_code import import_callable
from hardened_ddp.data.sources.hub_sets import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    choose_part,
    load_parts,
)
from hardened_ddp.errors import DataError
from hardened_ddp.streams.adapters import HubStream
from hardened_ddp.streams.files import NUM_SHARDS, Change, as_sample


def open_hub_stream(
    name: str,
    *,
    train: bool,
    data_dir: str,
    download: bool,
    image_size: int = 0,
    train_part: str = "train",
    test_part: str = "",
    subset: str = "",
    num_shards: int = 0,
    num_classes: int = 0,
    transform: str = "",
) -> HubStream | None:
    """Open the training or the test part as a stream; None if there is no part to test on.

    image_size: scale images to this height and width. num_shards: fewer than the files are.
    transform: package.module:callable, makes a sample of a row.
    """
    parts = load_parts(name, subset, data_dir=data_dir, download=download, streaming=True)
    rows = choose_part(name, parts, train=train, train_part=train_part, test_part=test_part)
    if rows is None:
        return None
    if hasattr(rows, "to_iterable_dataset"):  # save_to_disk() wrote it
        rows = rows.to_iterable_dataset(num_shards=max(1, min(NUM_SHARDS, len(rows))))
    features = getattr(rows, "features", None) or {}
    kinds = {
        column: str(getattr(getattr(feature, "feature", None), "dtype", ""))
        for column, feature in features.items()
    }
    change: Change = partial(_sample_of, image_size=image_size, kinds=kinds)
    if transform:
        change = import_callable(transform, setting="dataset_args transform", error=DataError)
    stream = HubStream(rows, name=name, num_shards=num_shards, change=change)
    if num_classes:
        stream.num_classes = num_classes  # type: ignore[attr-defined]  # only if there are classes
    return stream


def _sample_of(
    row: dict[str, Any], *, image_size: int, kinds: Mapping[str, str]
) -> Any:  # Any: as the columns are
    """Make a sample of a row: an image with its label, or its columns."""
    image = next((key for key in IMAGE_COLUMNS if hasattr(row.get(key), "convert")), None)
    label = next((key for key in LABEL_COLUMNS if key in row), None)
    if image is not None and label is not None:
        return pixels_of(row[image], image_size), row[label]
    return as_sample(row, kinds)
