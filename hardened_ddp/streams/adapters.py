"""Iterable datasets of other libraries, adapted to the contract of a stream (contract.py).

Of a set of the datasets library each file is a shard, and a row (image, label) where it has such
columns, else a mapping of its columns with lists of numbers as tensors.
A shuffle buffer is refused: its samples would be lost or repeated when a run resumes.
A torch dataset with an attribute num_shards splits itself by get_worker_info(), as most do: it then
sees itself as worker shard of num_shards. Without it, it is one shard, which each rank reads.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from hardened_ddp.data.batches.images import IMAGE_COLUMNS, LABEL_COLUMNS, pixels_of
from hardened_ddp.data.foreign_code import describe, import_callable, is_stream
from hardened_ddp.errors import DataError
from hardened_ddp.streams.contract import Stream, check_stream, forward
from hardened_ddp.streams.files import NUM_SHARDS, Change, as_sample

log = logging.getLogger(__name__)


def adapt(dataset: Any, name: str, *, is_resumed: bool = True) -> Stream:  # Any: a user's
    """Return a dataset that is no map-style one as a stream. Raises DataError.

    name: of the dataset, for messages. is_resumed: in mid-epoch, as a training set is.
    """
    if is_stream(dataset):
        check_stream(dataset, name)
        return dataset  # type: ignore[no-any-return]  # is_stream has looked
    if _is_hub_stream(dataset):
        return HubStream(dataset, name=name)
    if not isinstance(dataset, IterableDataset) and iter(dataset) is dataset:
        raise DataError(
            f"dataset {name} is an iterator, which can be read only once, and not from its middle",
            fix="return an object whose __iter__ starts again, or one with num_shards and open()",
        )
    stream = IterableStream(dataset)
    check_stream(stream, name)
    if stream.splits_by_worker:
        _copy(dataset, may_share=False)  # WHY here: in open() its error would be told as a sample's
    if is_resumed and not stream.has_state:
        log.warning(
            "dataset %s has no state_dict() and load_state_dict(): a resume in mid-epoch reads "
            "it again from its start%s",
            name,
            "" if stream.splits_by_worker else ", and so does each rank: it has no num_shards",
        )
    return stream


class IterableStream:
    """A torch IterableDataset, or any object that can be iterated again and again."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.splits_by_worker = getattr(dataset, "num_shards", None) is not None
        self.num_shards = dataset.num_shards if self.splits_by_worker else 1
        self.has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if not self.splits_by_worker and (size := _length_of(dataset)) is not None:
            self.sizes = [size]
        elif getattr(dataset, "sizes", None) is not None:
            self.sizes = list(dataset.sizes)
        forward(dataset, self)

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        """Iterate over a copy, which has a state of its own."""
        part = _copy(self.dataset, may_share=not self.splits_by_worker)
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
        if state is not None:
            part.load_state_dict(state)
        return _Reader(iter(part), part.state_dict if self.has_state else None)


class HubStream:
    """A streaming dataset of Hugging Face's datasets library. Any: its class."""

    def __init__(
        self, dataset: Any, *, name: str, num_shards: int = 0, change: Change | None = None
    ) -> None:
        """num_shards: at most as many; 0: all that it has. change: makes a sample of a row."""
        refuse_buffers(dataset, name)
        self.dataset = dataset
        self.change = change
        available = int(dataset.num_shards)
        self.num_shards = min(num_shards or available, available)
        features = getattr(dataset, "features", None) or {}
        for label in ("label", "labels"):
            if names := getattr(features.get(label), "names", None):
                self.classes = list(names)
        forward(dataset, self)

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        """Read one of num_shards parts of the dataset's own shards."""
        # WHY not contiguous: it is the split that each rank of the library itself would make
        # WHY no set_epoch: it changes how many rows random interleaving gives, and shuffles nothing
        part = self.dataset.shard(self.num_shards, shard, contiguous=False)
        if state is not None:
            part.load_state_dict(state)
        rows = iter(part)
        return _Reader(rows if self.change is None else map(self.change, rows), part.state_dict)


def open_hub_stream(
    name: str,
    load_part: Callable[..., Any],  # Any: its arguments; a set of the datasets library
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

    load_part: of data/sources/hub_sets.py. image_size: scale images to this height and width.
    num_shards: fewer than the files are. transform: package.module:callable, makes a sample of a
    row.
    """
    part = {"train": train, "train_part": train_part, "test_part": test_part}
    place = {"data_dir": data_dir, "download": download}
    rows = load_part(name, subset, **part, **place, streaming=True)
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


class _Reader:
    """An iterator, with the state of what it iterates over if that has one."""

    def __init__(self, rows: Iterator[Any], state_dict: Callable[[], Any] | None) -> None:
        self.rows = rows
        if state_dict is not None:
            self.state_dict = state_dict

    def __iter__(self) -> "_Reader":
        return self

    def __next__(self) -> Any:
        return next(self.rows)


def refuse_buffers(dataset: Any, name: str) -> None:
    """Raise DataError if a Hugging Face dataset shuffles in a buffer or is split already."""
    for kind in _kinds_of(dataset):
        if "BufferShuffled" in kind:
            raise DataError(
                f"dataset {name} has .shuffle(buffer_size=...): what is in its buffer is lost or "
                "repeated when a run resumes",
                fix="leave .shuffle() out: --shuffle_block N shuffles within N samples of a shard",
            )
    if getattr(dataset, "_distributed", None) is not None:
        raise DataError(
            f"dataset {name} was split by split_dataset_by_node: the run splits it itself, and "
            "each rank would see a part of its part",
            fix="leave split_dataset_by_node out",
        )


def _copy(dataset: Any, *, may_share: bool) -> Any:
    """Copy a dataset, so that its state is that of one reader. Raises DataError if it can't be.

    may_share: there is one reader at a time; so attributes that can't be copied (locks, open files,
    connections) may be those of the dataset itself.
    """
    try:
        return copy.deepcopy(dataset)
    except Exception as error:  # WHY broad: of any attribute's own class
        cause = error
    attributes = getattr(dataset, "__dict__", {})
    own = {name: value for name, value in attributes.items() if not _can_be_copied(value)}
    if may_share and own:
        return copy.deepcopy(dataset, {id(value): value for value in own.values()})
    raise DataError(
        f"dataset {type(dataset).__name__} can't be copied ({describe(cause)}), and each of its "
        "shards is read from a copy" + (f": see its {', '.join(own)}" if own else ""),
        fix="open files, locks and connections in __iter__, and not in __init__",
    ) from cause


def _can_be_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:  # WHY broad: as above
        return False
    return True


def _kinds_of(dataset: Any) -> Iterator[str]:
    """Yield the names of the classes that a Hugging Face dataset is made of, one in another."""
    left = [getattr(dataset, "_ex_iterable", None)]
    while left:  # each map, filter or rename is one
        part = left.pop()
        yield type(part).__name__
        if (inner := getattr(part, "ex_iterable", None)) is not None:
            left.append(inner)
        left += getattr(part, "ex_iterables", ())  # of interleaved or concatenated ones


def _is_hub_stream(dataset: Any) -> bool:
    kind = type(dataset)
    return kind.__module__.split(".")[0] == "datasets" and kind.__name__ == "IterableDataset"


def _length_of(dataset: Any) -> int | None:
    """Return the length that a dataset says, None if it says none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # torch's own way to have none
        return None
