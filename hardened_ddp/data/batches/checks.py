"""Values that a model can't take: labels out of range, inputs that are NaN or infinite.

They are found where a batch is made, on the CPU and by sample. WHY there: on a GPU a wrong label
ends the process with a device-side assert that names no sample, and one NaN spoils all weights.
Cost: one reduction over labels and one over float inputs for each batch; data in memory that never
changes and is fine is checked once, when the loader is built.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.images import MemoryImages
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.errors import SampleError

_MANY = 4096  # above so many labels a list of Python numbers is slower than a reduction


@dataclass(frozen=True, slots=True)
class Checks:
    """What is checked in batches."""

    # Labels must be in [0, num_classes). 0: the labels are not classes and are not checked.
    num_classes: int = 0
    inputs: bool = False  # whether float inputs must be finite
    is_clean: bool = False  # the whole dataset was checked before, and is fine

    @classmethod
    def of(cls, dataset: Any, *, num_classes: int, inputs: bool) -> "Checks":  # Any: map-style
        """Build the checks for a dataset; if it is in memory, check all of it now."""
        tensors, checks = _tensors_in_memory(dataset), cls(num_classes, inputs)
        if tensors is None:
            return checks
        everything = Batch(*tensors, torch.arange(len(tensors[0])))
        return replace(checks, is_clean=not checks.problem_of(everything))

    def find(self, batch: Batch, alone: Iterable[Batch]) -> Mapping[int, str]:
        """Return the problems by position in the batch; usually empty.

        alone: each of its samples as a batch of its own, read only if something is wrong.
        """
        if self.is_clean or not self.problem_of(batch):
            return {}
        texts = enumerate(map(self.problem_of, alone))
        return {place: text for place, text in texts if text}

    def problem_of(self, batch: Batch) -> str:
        """Say what is wrong in a batch as a whole; usually empty."""
        if not batch.num_samples or self._are_fine(batch.inputs, batch.targets):
            return ""
        is_alone = isinstance(batch.inputs, torch.Tensor)
        for tensor in tensors_of(batch.inputs) if self.inputs else ():
            if not tensor.is_floating_point():
                continue
            # WHY NaN alone in a mapping or a tuple: there infinity may be a mask.
            wrong = ~tensor.isfinite() if is_alone else tensor.isnan()
            if count := int(wrong.sum()):
                return f"{count} values of its input are NaN{' or infinite' * is_alone}"
        is_row = isinstance(batch.targets, torch.Tensor) and batch.targets.dim() == 1
        if not is_row or len(batch.targets) != batch.num_samples:
            return ""
        return next((text for _, text in wrong_labels(batch.targets, self.num_classes)), "")

    def _are_fine(self, inputs: Any, labels: Any) -> bool:
        """Check quickly whether all values are fine; False: a full check is needed."""
        if self.num_classes:
            is_usual = isinstance(labels, torch.Tensor) and labels.dtype == torch.int64
            if not is_usual or labels.dim() != 1:
                return False
            # WHY a list: for the few labels of a batch it takes a tenth of the reduction's time.
            values = labels.tolist() if len(labels) <= _MANY else labels.aminmax()
            if min(values) < 0 or max(values) >= self.num_classes:
                return False
        if not self.inputs:
            return True
        if not isinstance(inputs, torch.Tensor):
            return False
        # WHY a sum: a NaN or infinite value makes it non-finite too, at a tenth of isfinite's cost.
        return not inputs.is_floating_point() or math.isfinite(inputs.sum().item())


_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@dataclass(frozen=True, slots=True)
class Limit:
    """The numbers in a tensor of a batch choose one of so many: token ids, labels."""

    # Its name or place among the inputs, empty if it is all of them; None: it is the labels.
    part: str | None
    count: int
    what: str
    ignored: int | None = None  # a number beside them that is allowed, too

    def check(self, batch: Batch) -> None:
        """Raise IndexError with the first sample whose number is out of range.

        WHY: so does the CPU in forward; on a GPU the kernel ends the context of the process.
        """
        numbers = batch.targets if self.part is None else parts_of(batch.inputs).get(self.part)
        if not isinstance(numbers, torch.Tensor) or not numbers.is_cpu:
            return  # a dataset may have it on a GPU
        if numbers.is_floating_point():
            return  # labels may be shares of the classes
        array = numbers.numpy()
        # WHY unsigned: one comparison finds those below 0, too
        unsigned = array.view(_UNSIGNED[array.itemsize])
        if unsigned.max(initial=0) < self.count:
            return
        wrong = np.argwhere((unsigned >= self.count) & (array != self.ignored))
        if not len(wrong):
            return
        place = tuple(wrong[0])
        is_row = len(array) == batch.num_samples
        where = f"sample {int(batch.indices[place[0]])}" if is_row else "a sample of the batch"
        raise IndexError(
            f"{where} has the number {array[place]}, and {self.what} has "
            f"{self.count}, 0 to {self.count - 1}"
        )


def parts_of(inputs: Any) -> Mapping[str, Any]:  # Any: as the dataset nests them
    """Return the inputs of a batch by name or place; a tensor alone by the empty name."""
    if isinstance(inputs, tuple | list):
        inputs = dict(enumerate(inputs))
    named = inputs if isinstance(inputs, Mapping) else {"": inputs}
    return {str(name): part for name, part in named.items()}


def none_readable(error: str) -> SampleError:
    """Return the error if all samples that were tried are bad. error: of one of them."""
    return SampleError(
        f"none of the first samples can be read: {error}",
        fix="check the dataset: every sample seems to be broken; --no_check_inputs, if its inputs "
        "may be NaN or infinite",
    )


def _tensors_in_memory(dataset: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return inputs and labels of a dataset that only returns rows of two tensors."""
    if isinstance(dataset, MemoryImages):
        return dataset.images, dataset.labels
    # WHY the exact type: a subclass may do more than return rows
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    return None


def wrong_labels(labels: torch.Tensor, num_classes: int) -> Iterator[tuple[int, str]]:
    """Yield the positions of labels that are no classes, and why. num_classes: 0: none are."""
    if not num_classes or labels.dim() != 1 or labels.is_complex():
        return
    values = labels.double()
    is_class = (values >= 0) & (values < num_classes) & (values == values.floor())
    for place in (~is_class).nonzero().flatten().tolist():
        text = f"its label is {labels[place].item()}, and there are {num_classes} classes"
        yield place, f"{text}, 0 to {num_classes - 1}"
