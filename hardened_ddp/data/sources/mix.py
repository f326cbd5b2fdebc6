"""Several data sets as one: --dataset mix:NAME,NAME with weights.

Owns the data set of all parts, one behind the other, and how many samples of each an epoch has. Its
order is in batches/sampling.py: the parts in their shares, shuffled together.
Does not own: opening the parts (datasets.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset

from hardened_ddp.data.batches.sampling import Samples, counts_by_weight
from hardened_ddp.data.sources.facts import check_classes, is_in_memory, is_map_style
from hardened_ddp.errors import DataError
from hardened_ddp.settings.config import DataConfig

PREFIX = "mix:"
_ENDS = ("first", "all", "steps")
Open = Callable[..., Dataset[Any] | None]  # Any: whatever a sample is


class Mix(ConcatDataset[Any]):  # Any: whatever a sample is
    """The samples of several data sets, one behind the other."""

    def __init__(self, parts: Sequence[Any], weights: Sequence[float], ends: str) -> None:
        super().__init__(parts)
        self.weights, self.ends = list(weights), ends
        self.mixed = self if weights else None  # read by build_sampling
        for name in ("classes", "num_classes", "collate_fn"):
            if (value := getattr(parts[0], name, None)) is not None:
                setattr(self, name, value)
        if all(hasattr(part, "targets") for part in parts):
            self.targets = torch.cat([torch.as_tensor(part.targets) for part in parts])
        self.in_memory = all(map(is_in_memory, parts))

    def of_epoch(self, length: int) -> tuple[list[Samples], list[int]]:
        """Return the samples of each part, and how many of them an epoch has. Raises DataError.

        length: samples_per_epoch, or 0.
        """
        groups = np.split(np.arange(len(self)), self.cumulative_sizes[:-1])
        if (self.ends == "steps") != (length > 0):
            why = f"dataset mix: ends is {self.ends}, and samples_per_epoch {length}"
            raise DataError(why, fix="ends: steps needs --samples_per_epoch N, and only it")
        sizes = list(map(len, groups))
        if 0 in sizes:
            why = f"dataset mix: part {sizes.index(0) + 1} has no samples"
            raise DataError(why, fix="leave it out of mix:")
        shares = [weight / sum(self.weights) for weight in self.weights]
        lengths = [size / share for size, share in zip(sizes, shares, strict=True)]
        if self.ends == "first":  # the first part that is used up ends the epoch
            length = int(min(lengths) + 1e-9)
        elif self.ends == "all":  # so does the last one; the others begin again
            length = math.ceil(max(lengths) - 1e-9)
        return groups, counts_by_weight(shares, length)


def parts_of(config: DataConfig) -> list[DataConfig]:
    """Return the settings of each part. Raises DataError."""
    names = [name.strip() for name in config.dataset.removeprefix(PREFIX).split(",")]
    given = config.dataset_args.get("args", [{}] * len(names))
    is_list = isinstance(given, list | tuple) and all(isinstance(own, Mapping) for own in given)
    if len(names) < 2 or not all(names) or not is_list or len(given) != len(names):
        raise DataError(
            f"dataset {config.dataset}: it has {len(names)} data sets and args {given!r:.80}",
            fix="--dataset mix:NAME,NAME --dataset_args '{weights: [3, 1], args: [{}, {}]}'",
        )
    return [
        replace(config, dataset=name, dataset_args=dict(arguments))
        for name, arguments in zip(names, given, strict=True)
    ]


def open_mix(
    config: DataConfig,
    open_part: Open,
    *,
    train: bool,
    weights: Sequence[float] = (),
    ends: str = "first",
    args: Sequence[Mapping[str, Any]] = (),
) -> Mix | None:
    """Open all parts of a mix. weights: by default as large as the parts. Raises DataError."""
    settings = parts_of(config)
    opened = [open_part(part.dataset, part, train=train) for part in settings]
    parts = [part for part in opened if part is not None]
    if not all(map(is_map_style, parts)) or (train and len(parts) < len(settings)):
        raise DataError(
            "dataset mix: a part is a stream, or has no training samples",
            fix="mix map-style data sets; a stream can mix others in its own open()",
        )
    check_classes(parts, config.dataset)
    shares = [float(w) for w in weights] or [float(len(part)) for part in parts]  # type: ignore[arg-type]  # map-style
    is_share = all(0 < share < math.inf for share in shares)
    # WHY of training: a part may have no samples to test
    if train and (len(shares) != len(settings) or not is_share or ends not in _ENDS):
        raise DataError(
            f"dataset mix: weights {list(weights)}, ends {ends!r}",
            fix=f"a weight above 0 for each part; ends: {', '.join(_ENDS)}",
        )
    return Mix(parts, shares if train else (), ends) if parts else None
