"""A checksum of tensors: two numbers that change if one bit of them does.

Owns the arithmetic, on the device of the tensors. It uses integers that wrap around, so the order
of additions does not matter and every bit counts, also those of NaN.
WHY hashed factors, each for its position: factors that are linear in it, such as place * STEP,
miss changes that cancel out, such as +d, -d, -d, +d of four neighbours. WHY odd: no change of one
word is lost. WHY two sums, of which one is of the upper bits: the highest bit, a float's sign,
times any odd factor is the highest bit, so in one sum two changed signs would cancel.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import torch

_BYTES = 8  # of a word
# In words. On the CPU: what fits a core's cache beside the factors; on a GPU: few kernels, and
# 24 MiB of factors and sums. With another size a checksum is another one.
_PIECE = {"cpu": 1 << 15, "cuda": 1 << 20}
# Those of SplitMix64, as in ranks/seeding.py, of which _FIRST and _SECOND mix the bits.
_STEP, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# Both sums see the lowest bit of a float in the upper half of a word: they share bit 31 and 32.
_UPPER = 31


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the two numbers of tensors of one device, (2,) int64, on it; nobody waits for it."""
    sums = list[torch.Tensor]()
    for tensor in tensors:
        size = _PIECE["cpu" if tensor.is_cpu else "cuda"]
        low, high = _factors(2 * size, tensor.device).view(2, size)
        space = torch.empty_like(low)
        for words in _words(tensor, size):
            upper = torch.bitwise_right_shift(words, _UPPER, out=space[: len(words)])
            for part, row in ((upper, high[: len(words)]), (words, low[: len(words)])):
                if part.is_cpu:
                    sums.append(part.dot(row))
                else:  # CUDA has no dot of integers
                    sums.append(torch.mul(part, row, out=space[: len(words)]).sum())
    if len(sums) == 2:  # as a rule
        return torch.stack(sums)
    return combine(torch.stack(sums).view(-1, 2)) if sums else torch.zeros(2, dtype=torch.int64)


def checksums(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return two numbers for each tensor, (len(tensors), 2) int64, on their device."""
    found = [checksum([tensor]) for tensor in tensors.values()]
    devices = [pair.device for pair in found if not pair.is_cpu]
    return torch.stack([pair.to(devices[0]) if devices else pair for pair in found])


@torch.no_grad()
def combine(pairs: torch.Tensor) -> torch.Tensor:
    """Combine all pairs into one, of shape (2,)."""
    return pairs.mul(_factors(2 * len(pairs), pairs.device).view(-1, 2)).sum(dim=0)


@cache  # in each step the same few; on a GPU 16 MiB
def _factors(size: int, device: torch.device) -> torch.Tensor:
    """Hash the numbers below size to odd ones."""
    words = torch.arange(1, size + 1, device=device).mul_(_STEP)
    upper = torch.empty_like(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        torch.bitwise_right_shift(words, shift, out=upper)
        # WHY the mask: a shift of a negative number brings ones in
        words.bitwise_xor_(upper.bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return words.bitwise_or_(1)


def _words(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """View a tensor's bits as integers of 8 bytes, in pieces of size; the last is filled up."""
    flat = tensor.detach().contiguous()  # of one element it may keep a stride of 4
    raw = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
    for piece in torch.split(raw, _BYTES * size):
        if missing := -len(piece) % _BYTES:
            piece = torch.cat([piece, piece.new_zeros(missing)])
        elif piece.storage_offset() % _BYTES:  # a part of another tensor
            piece = piece.clone()
        yield piece.view(torch.int64)
