"""Samples packed into few tensors, for the way from a worker to its rank.

WHY: sending a tensor costs as much as sending a thousand numbers, and a block of 64 samples would
be 128 tensors. Samples come out as they went in; their tensors are views of the packed ones.
Does not own: the batch, which is made of samples of several blocks (shard_loader.py).
"""

from collections.abc import Sequence
from typing import Any

import torch

Packed = tuple[Any, ...]
"""What pack made: a tag, then what the tag says."""


def pack(samples: Sequence[Any]) -> Packed:  # Any: samples of a foreign dataset
    """Pack samples; what is no tensor, or differs between samples, stays a list."""
    if not samples:
        return ("list", [])
    first = samples[0]
    kind = type(first)
    if any(type(sample) is not kind for sample in samples):
        return ("list", list(samples))
    if kind is torch.Tensor:
        return _pack_tensors(samples)
    if kind is dict and all(sample.keys() == first.keys() for sample in samples):
        return ("dict", {key: pack([sample[key] for sample in samples]) for key in first})
    if kind in (tuple, list) and all(len(sample) == len(first) for sample in samples):
        tag = "tuple" if kind is tuple else "columns"
        return (tag, [pack(column) for column in zip(*samples, strict=True)])
    return ("list", list(samples))


def unpack(packed: Packed, count: int) -> list[Any]:  # Any: as above
    """Return the count samples that were packed."""
    tag, content = packed[0], packed[1]
    match tag:
        case "list":
            return list(content)
        case "equal":
            return list(content.unbind(0))
        case "ragged":
            parts = content.split([torch.Size(shape).numel() for shape in packed[2]])
            return [part.view(shape) for part, shape in zip(parts, packed[2], strict=True)]
        case "dict":
            columns = {key: unpack(column, count) for key, column in content.items()}
            return [{key: columns[key][i] for key in columns} for i in range(count)]
        case "tuple" if content:
            return list(zip(*(unpack(column, count) for column in content), strict=True))
        case "columns" if content:
            rows = zip(*(unpack(column, count) for column in content), strict=True)
            return [list(row) for row in rows]
        case "tuple":
            return [() for _ in range(count)]
        case _:
            return [[] for _ in range(count)]


def _pack_tensors(tensors: Sequence[torch.Tensor]) -> Packed:
    first = tensors[0]
    if any(tensor.dtype != first.dtype or tensor.requires_grad for tensor in tensors):
        return ("list", list(tensors))
    if all(tensor.shape == first.shape for tensor in tensors):
        return ("equal", torch.stack(list(tensors)))
    shapes = [tuple(tensor.shape) for tensor in tensors]
    return ("ragged", torch.cat([tensor.reshape(-1) for tensor in tensors]), shapes)
