"""Reading the samples of one micro-batch, in this process or in a worker.

Owns what a batch is, and what becomes of a sample that can't be read: it is set aside with its
reason, and the batch holds the rest; the caller decides what that means.
WHY errors never leave as exceptions: one that can't be pickled would hang a worker's reader, and
one sample's error would cost the whole batch.
"""

import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from hardened_ddp.data.memory import MemoryImages
from hardened_ddp.data.vision import import_torchvision
from hardened_ddp.errors import SampleError
from hardened_ddp.ranks.seeding import seed_sample

RETRY_WAITS_S = (0.1, 0.5, 2.0)
"""A network disk often answers the second time; a broken file never does."""

LABEL_NAMES = ("labels", "label", "targets", "target")
"""What the target may be called in a sample that is a mapping."""

_MAX_TEXT = 400  # characters of a foreign error; one may quote a whole file

Request = tuple[int, torch.Tensor]
"""(epoch, indices of one micro-batch)."""


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that can't be read."""

    index: int
    error: str


@dataclass(slots=True)
class Batch:
    """One micro-batch. Any: a tensor, or what the dataset nests tensors in."""

    inputs: Any
    targets: torch.Tensor
    """(num_samples,) int64."""

    indices: torch.Tensor
    """(num_samples,) int64: which samples these are."""

    bad: tuple[BadSample, ...] = ()

    @property
    def num_samples(self) -> int:
        return len(self.indices)

    def to(self, device: torch.device, *, channels_last: bool = False) -> "Batch":
        """Give the batch on device; images with channels last if asked."""
        if device.type == "cpu" and not channels_last:
            return self
        inputs = map_tensors(self.inputs, lambda tensor: tensor.to(device, non_blocking=True))
        if channels_last and isinstance(inputs, torch.Tensor) and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        targets = self.targets.to(device, non_blocking=True)
        return Batch(inputs, targets, self.indices, self.bad)

    def size_bytes(self) -> int:
        """Count the bytes of all tensors."""
        sizes: list[int] = []
        map_tensors((self.inputs, self.targets), lambda tensor: sizes.append(tensor.nbytes))
        return sum(sizes)


class Fetcher:
    """Reads micro-batches of one dataset. Picklable if the dataset is."""

    def __init__(self, dataset: Any, *, seed: int) -> None:  # Any: a map-style dataset
        self.dataset = dataset
        self.seed = seed
        self.reading: list[int] | memoryview[int] = [-1]
        """The sample under way, where it is read singly; others may look into it meanwhile."""

        # WHY: a Subset has __getitems__ whatever it is a part of. If that has none, reading sample
        # by sample is the same work, and each sample gets its own seed.
        is_plain_part = isinstance(dataset, Subset) and not hasattr(dataset.dataset, "__getitems__")
        self.reads_batches = hasattr(dataset, "__getitems__") and not is_plain_part
        self.uses_randomness = getattr(
            dataset, "uses_randomness", not isinstance(dataset, TensorDataset)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # WHY packed twice: a dataset of torchvision brings up its import, which has to be mended
        # first in a worker where it had to be mended here.
        packed = pickle.dumps((self.dataset, self.seed))
        return _unpack, ("torchvision" in sys.modules, packed)

    def __getitem__(self, request: Request) -> Batch:
        """Read one micro-batch. The name is what torch's DataLoader calls in a worker."""
        epoch, indices = request
        if isinstance(self.dataset, MemoryImages):
            return Batch(*self.dataset.fetch(indices, seed=self.seed, epoch=epoch), indices)
        if self.reads_batches:
            try:
                return self._read_batch(epoch, indices)
            except MemoryError:
                raise
            except Exception:  # WHY broad and then on: sample by sample it will be known which
                return self._read_samples(epoch, indices)
        return self._read_samples(epoch, indices)

    def _read_batch(self, epoch: int, indices: torch.Tensor) -> Batch:
        """Read all at once: a collated batch, or a list of samples, both are in use."""
        numbers: list[int] = indices.tolist()
        if self.uses_randomness:
            seed_sample(self.seed, epoch, numbers[0])
        found = self.dataset.__getitems__(numbers)
        if isinstance(found, list) and len(found) == len(numbers):
            return _collate(found, numbers, ())
        return Batch(*split_targets(found), indices)

    def _read_samples(self, epoch: int, indices: torch.Tensor) -> Batch:
        samples: list[Any] = []
        good: list[int] = []
        bad: list[BadSample] = []
        for index in indices.tolist():
            self.reading[0] = index
            # WHY per sample: its augmentation must not depend on which rank or worker reads it.
            if self.uses_randomness:
                seed_sample(self.seed, epoch, index)
            try:
                samples.append(self._read_sample(index))
                good.append(index)
            except MemoryError:  # no sample is to blame
                raise
            except Exception as error:  # WHY broad: the user's code; reported with its index
                bad.append(BadSample(index, describe(error)))
        return _collate(samples, good, tuple(bad))

    def _read_sample(self, index: int) -> Any:  # Any: whatever the dataset returns
        """Read one sample; after an OSError that a second try may not meet, wait and try again."""
        for wait_s in RETRY_WAITS_S:
            try:
                return self.dataset[index]
            except (FileNotFoundError, PermissionError, IsADirectoryError):
                raise
            except OSError as error:
                if error.errno is None:  # raised by a decoder on bad bytes: no disk is to blame
                    raise
                time.sleep(wait_s)
        return self.dataset[index]


def split_targets(data: Any) -> tuple[Any, Any]:  # Any: a foreign sample, or a batch of them
    """Take inputs and targets apart. Raises TypeError if data is neither a pair nor labelled."""
    if isinstance(data, Mapping):
        for name in LABEL_NAMES:
            if name in data:
                return {key: data[key] for key in data if key != name}, data[name]
        raise TypeError(
            f"a sample is a mapping with {', '.join(map(str, data))}; need one of them to be "
            f"called {' or '.join(LABEL_NAMES)}"
        )
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1]
    raise TypeError(
        f"a sample is a {type(data).__name__}; need (input tensor, label), or a mapping with "
        "'labels'"
    )


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Change each tensor in nested mappings, tuples and lists. Any: whatever a dataset gives."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple wants them one by one
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(part, change) for part in value)
    return value


def split(batches: Sequence[Batch], most_samples: int) -> list[Batch]:
    """Cut readable batches into micro-batches of most_samples at most; 0: leave them."""
    found = []
    for batch in batches:
        size = batch.num_samples
        step = most_samples if 0 < most_samples < size else max(1, size)
        if step == size:
            found.append(batch)
        else:
            found += [take(batch, range(i, min(i + step, size))) for i in range(0, size, step)]
    return [batch for batch in found if batch.num_samples]


def take(batch: Batch, positions: Sequence[int]) -> Batch:
    """Give some samples of a batch. Tensors of its inputs have the samples first."""
    index = torch.as_tensor(list(positions), dtype=torch.int64)

    def pick(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[index] if tensor.dim() and len(tensor) == batch.num_samples else tensor

    inputs = map_tensors(batch.inputs, pick)
    return Batch(inputs, batch.targets[index], batch.indices[index])


def describe(error: BaseException) -> str:
    """Give type and text of an exception, short, and whatever its __str__ does."""
    try:
        text = str(error)
    except Exception as second:  # WHY broad: the user's code, and it must not hide the first error
        text = f"(its text can't be had: {type(second).__name__})"
    return f"{type(error).__name__}: {text}"[:_MAX_TEXT]


@contextmanager
def unmoved_rng() -> Iterator[None]:
    """Read samples inside without moving the random numbers of the rest of the run."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _unpack(has_torchvision: bool, packed: bytes) -> Fetcher:
    if has_torchvision:
        import_torchvision()
    dataset, seed = pickle.loads(packed)
    return Fetcher(dataset, seed=seed)


def _collate(samples: Sequence[Any], numbers: Sequence[int], bad: tuple[BadSample, ...]) -> Batch:
    """Make a batch of samples. One that is not shaped as most of them are is bad."""
    if not samples:
        empty = torch.empty(0, dtype=torch.int64)
        return Batch(torch.empty(0), empty, empty, bad)
    try:
        inputs, targets = split_targets(default_collate(list(samples)))
        if not isinstance(targets, torch.Tensor):
            raise TypeError(f"a label is a {type(targets).__name__}, and not a number")
    except Exception as error:  # WHY broad: default_collate raises what it meets
        shapes = [_shape(sample) for sample in samples]
        usual, count = Counter(shapes).most_common(1)[0]
        if count == len(samples):  # then no single sample is to blame
            raise SampleError(
                f"samples {list(numbers[:4])} can't be made into a batch: {describe(error)}",
                fix="make __getitem__ return (input tensor, label), all of one shape",
            ) from error
        fits = [shape == usual for shape in shapes]
        misfits = tuple(
            BadSample(number, f"it is {shape}, where the others are {usual}"[:_MAX_TEXT])
            for number, shape, is_fit in zip(numbers, shapes, fits, strict=True)
            if not is_fit
        )
        samples = [sample for sample, is_fit in zip(samples, fits, strict=True) if is_fit]
        numbers = [number for number, is_fit in zip(numbers, fits, strict=True) if is_fit]
        return _collate(samples, numbers, bad + misfits)
    return Batch(inputs, targets, torch.tensor(numbers), bad)


def _shape(data: Any) -> str:  # Any: a foreign sample
    """Describe what has to be equal for collating: types, and the shapes of tensors."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return f"{type(data).__name__} of {tuple(data.shape)} {data.dtype}"
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key}: {_shape(data[key])}" for key in data) + "}"
    if isinstance(data, tuple | list):
        return "(" + ", ".join(map(_shape, data)) + ")"
    return type(data).__name__
