"""Short numbers for the contents of tensors: equal contents give equal numbers on all ranks.

Imports torch inside its functions only: the program imports it first.
"""

import zlib
from functools import cache

from ddp_doctor.audit.injected.recorder import Foreign

UNREADABLE = "x"
"""Stands for a tensor that has no storage here: sharded, sparse, on the meta device."""

MAX_COLUMNS = 2048
"""Of a sample; from longer ones every n-th number is taken."""


def fingerprints(tensors: list[Foreign]) -> list[Foreign]:
    """Give one int per tensor, the wrapping int32 sum of its bits; None stays None.

    WHY int32: a sum in int64 takes 10 times as long. WHY weights for small ones: two numbers of a
    bias may move by the same amount in opposite directions, as those of two classes do.
    """
    import torch

    found: list[Foreign] = [None if t is None else UNREADABLE for t in tensors]
    places, sums = [], []
    for place, tensor in enumerate(tensors):
        if tensor is None or type(tensor).__name__ == "DTensor":
            continue
        if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
            continue
        flat = tensor.detach().reshape(-1)
        if flat.dtype != torch.int32:
            size = flat.element_size() * flat.numel()
            flat = flat.view(torch.int32 if size % 4 == 0 else torch.uint8)
        if flat.numel() <= MAX_COLUMNS:
            flat = flat * _weights(flat.numel(), flat.device)
        places.append(place)
        sums.append(flat.sum(dtype=torch.int32))
    if sums:
        is_on_one = len({s.device for s in sums}) == 1
        values = torch.stack(sums).tolist() if is_on_one else [int(s) for s in sums]
        for place, value in zip(places, values, strict=True):
            found[place] = value
    return found


def sample_hashes(tensor: Foreign, num_samples: int) -> str:
    """Give 8 hex digits per sample of a batch: a weighted sum of its bits."""
    import torch

    rows = tensor.detach().reshape(num_samples, -1)
    if rows.shape[1] > MAX_COLUMNS:
        rows = rows[:, :: rows.shape[1] // (MAX_COLUMNS // 2)]
    rows = rows.contiguous()
    if rows.element_size() == 8 and not rows.is_floating_point():
        bits = rows.to(torch.int32)
    else:
        bits = rows.view(torch.int32) if rows.element_size() >= 4 else rows.to(torch.int32)
    sums = (bits * _weights(bits.shape[1], bits.device)).sum(1, dtype=torch.int32)
    return bytes(sums.numpy().tobytes()).hex()


@cache
def _weights(number: int, device: Foreign) -> Foreign:
    """Give odd weights, so that the order of the numbers counts."""
    import torch

    own = torch.Generator("cpu").manual_seed(number)
    size, kind = (number,), torch.int32
    drawn = torch.randint(-(2**31), 2**31 - 1, size, dtype=kind, generator=own, device="cpu")
    return (drawn | 1).to(device)


def text_hashes(values: Foreign) -> str:
    """Give 8 hex digits per value of a list of texts or numbers."""
    return "".join(f"{zlib.crc32(repr(value).encode()):08x}" for value in values)


def leaves(value: Foreign, found: list[Foreign], depth: int = 0) -> list[Foreign]:
    """Collect the tensors and the lists of plain values in a batch."""
    is_list = isinstance(value, list | tuple)
    is_plain = is_list and value and all(isinstance(v, str | int | float) for v in value)
    if hasattr(value, "element_size") or is_plain:
        found.append(value)
    elif depth < 4 and (is_list or hasattr(value, "values")):
        for part in value if is_list else value.values():
            leaves(part, found, depth + 1)
    return found
