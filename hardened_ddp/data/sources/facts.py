"""The facts of an opened dataset before training: classes, labels, shape, fingerprint.

Owns the errors for what a dataset, which may be the user's, lacks. Reading a few samples finds a
wrong one in a second, and does not change the run's random state.
"""

import hashlib
import json
import logging
import numbers
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.checks import wrong_labels
from hardened_ddp.data.batches.collate import Collate
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.images import MemoryImages
from hardened_ddp.data.batches.nesting import dense_parts, leaves
from hardened_ddp.data.foreign_code import describe, is_stream, line_of_user
from hardened_ddp.errors import ANY_FAILURE, DataError, SampleError
from hardened_ddp.ranks.seeding import keeping_random_state

_MOST_TRIES = 8  # how many samples are tried to find a readable one
_PLACES = ("root", "data_dir", "cache_dir")  # in dataset_args: where the data lies

log = logging.getLogger(__name__)

AnyDataset = Dataset[Any]  # Any: whatever a sample is


def is_map_style(dataset: Any) -> bool:
    """Return whether samples are read by their index; else it is a stream, or iterable."""
    # WHY not by __getitem__ alone: torch's IterableDataset inherits one, which raises.
    has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return has_index and not isinstance(dataset, IterableDataset) and not is_stream(dataset)


def is_view_of_stream(dataset: Any) -> bool:
    """Return whether dataset is a StreamView. WHY by name: streams are loaded only if needed."""
    return getattr(dataset, "is_view_of_stream", False) is True


def check_opened(dataset: Any, name: str) -> None:  # Any: what a user's callable returned
    """Raise DataError if dataset is none, or says what can't be of its length and classes."""

    def refused(what: str, fix: str) -> DataError:
        return DataError(f"dataset {name}: {what}", fix=fix)

    if isinstance(dataset, DataLoader):
        what = "the callable returned a DataLoader, whose samples are batches"
        fix = "return its dataset: the run makes the batches itself (--batch_size, --collate)"
        raise refused(what, fix)
    is_map = is_map_style(dataset)
    if not (is_map or is_stream(dataset) or hasattr(dataset, "__iter__")):
        what = f"the callable returned a {type(dataset).__name__} without __getitem__ and __len__"
        fix = "return a map-style torch.utils.data.Dataset, an iterable one, a class with "
        raise refused(what, fix + "num_shards and open(), or None for no test set")
    try:
        _ = is_map and len(dataset)
    except ANY_FAILURE as error:  # WHY broad: the user's code
        what = f"its length is not known: {describe(error)}{line_of_user(error)}"
        raise refused(what, "make __len__() return the number of samples") from error
    classes, number = getattr(dataset, "classes", None), getattr(dataset, "num_classes", None)
    if classes is not None and not hasattr(classes, "__len__"):
        what = f"its classes are {classes!r}, not a list of names"
        raise refused(what, "make classes the names, or call it num_classes if it is their number")
    is_number = isinstance(number, torch.Tensor | numbers.Number)
    if number is not None and not (is_number and int(number) > 0):
        what = f"its num_classes is {number!r}; need a whole number from 1"
        fix = "make num_classes the number of classes, or leave it out where labels are none"
        raise refused(what, fix)


def read_example(dataset: Any, name: str, collate: Collate | None = None) -> Batch:
    """Read the first sample that can be read. Raises DataError if there is none.

    dataset: a map-style one. Any: or a StreamView.
    """
    errors: list[str] = []
    is_stream = is_view_of_stream(dataset)
    try:
        few = range(min(_MOST_TRIES, len(dataset)))
        for number in dataset.first_samples(_MOST_TRIES, name) if is_stream else few:
            batch = _read(dataset, number, collate)
            if batch.num_samples:
                return batch
            errors.append(batch.bad[0].error)
    except SampleError as error:
        raise DataError(f"dataset {name}: {error.message}", fix=error.fix) from error
    what = "open()" if is_stream else "dataset[0]"
    raise DataError(
        f"dataset {name}: the first {len(errors)} samples can't be read: {errors[0]}",
        fix=f"make {what} give (input tensor, label), or a mapping with 'labels'",
    )


def count_outputs(dataset: AnyDataset, labels: Any, *, are_classes: bool) -> int:
    """Return how many outputs a model needs for labels like these; 0 if that is not known.

    labels: of a few samples. are_classes: each is the number of a class.
    """
    if found := getattr(dataset, "num_classes", None) or len(getattr(dataset, "classes", ()) or ()):
        return int(found)
    if are_classes:
        known = getattr(dataset, "targets", None)
        return int(torch.as_tensor(known).max()) + 1 if known is not None and len(known) else 0
    is_tensor = isinstance(labels, torch.Tensor)
    # WHY not integers in rows: they may be the tokens of a sequence.
    is_share = is_tensor and (labels.is_floating_point() or labels.dtype == torch.bool)
    is_number = is_share or (is_tensor and labels.dim() == 1)
    return label_size(labels) if is_number else 0


def label_size(labels: Any) -> int:
    """Return how many numbers the label of one sample has; 1 if it is no tensor."""
    has_rows = isinstance(labels, torch.Tensor) and labels.dim() > 1
    return labels[0].numel() if has_rows else 1


def check_classes(parts: Iterable[AnyDataset | None], name: str) -> None:
    """Raise DataError if parts of a dataset name their classes and the names differ."""
    found = (getattr(part, "classes", None) for part in parts)
    for first, other in pairwise([list(map(str, names)) for names in found if names is not None]):
        if first != other:
            differing = ", ".join(sorted(set(first) ^ set(other))[:5]) or "in another order"
            raise DataError(
                f"dataset {name}: two of its parts (training, test, or of a mix) have different "
                f"classes ({differing}), so that one label would mean two things",
                fix="give all the same classes in the same order (of folders: the same folders)",
            )


def check_labels(
    dataset: AnyDataset | None, num_classes: int, name: str, *, leaves_out: bool
) -> None:
    """Check all labels now, so that one out of range is not found only after hours of training.

    Raises DataError unless leaves_out: then only warns how many samples will be left out.
    """
    labels = getattr(dataset, "targets", getattr(dataset, "labels", None))
    try:
        labels = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):  # no labels, or in a format of the model
        return
    wrong = [] if labels.is_floating_point() else list(wrong_labels(labels, num_classes))
    if not wrong:
        return
    text = f"dataset {name}: sample {wrong[0][0]}: {wrong[0][1]}"
    if not leaves_out:
        raise DataError(text, fix="number the labels from 0, or correct num_classes")
    log.warning("%s; %d such samples will be left out", text, len(wrong))


def is_in_memory(dataset: AnyDataset) -> bool:
    """Return whether reading is so cheap that workers would only slow it down."""
    if isinstance(dataset, Subset):
        return is_in_memory(dataset.dataset)
    # WHY __getitems__: a dataset that reads a whole batch at once is usually in memory.
    return isinstance(dataset, MemoryImages | TensorDataset) or bool(
        getattr(dataset, "in_memory", hasattr(dataset, "__getitems__"))
    )


def fingerprint(
    parts: Sequence[AnyDataset | None],
    *,
    name: str,
    arguments: Mapping[str, Any],
    collate: Collate | None = None,
) -> tuple[str, str]:
    """Hash name, arguments, and of each part its length and three samples.

    Also returns the lengths as text, and which of these samples can't be read.
    """
    sizes, bad = [], list[str]()
    # WHY not the places: the same data may have another path on another node, or after a move.
    told = {key: value for key, value in arguments.items() if key not in _PLACES}
    text = json.dumps([name.lower(), told], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode())
    for part in parts:
        sizes.append(0 if part is None else len(part))  # type: ignore[arg-type]  # it has a length
        digest.update(f"|{sizes[-1]}".encode())
        for file in sorted(getattr(part, "digests", {}).items()):  # of a stream's files
            digest.update(repr(file).encode())
        for index in {0, sizes[-1] // 2, sizes[-1] - 1} if sizes[-1] else ():
            # WHY read twice: if a dataset's samples are random, only its length is compared.
            first, second = (_read(part, index, collate) for _ in range(2))
            bad += [f"sample {one.name} can't be read: {one.error}" for one in second.bad]
            content = _bytes_of(first)
            digest.update(content if content == _bytes_of(second) else b"random")
    kind = "shards" if is_view_of_stream(parts[0]) else "samples"
    return digest.hexdigest(), "; ".join(
        [f"{sizes[0]} {kind} and {sum(sizes[1:])} to test", *bad[:2]]
    )


def _read(dataset: Any, index: int, collate: Collate | None) -> Batch:  # Any: map-style
    with keeping_random_state():
        return Fetcher(dataset, seed=0, collate=collate)[(0, torch.tensor([index]))]


def _bytes_of(batch: Batch) -> bytes:
    found: list[bytes] = []
    for leaf in leaves((batch.inputs, batch.targets)):
        if isinstance(leaf, torch.Tensor):
            for dense in dense_parts(leaf.detach()):
                found.append(f"{tuple(dense.shape)} {dense.dtype}".encode())
                found.append(dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | bytes | int | float):  # WHY no others: their text may differ
            found.append(repr(leaf).encode())
    return b"".join(found)
