"""A checksum of tensors: two numbers that change if one bit of them does.

Owns the arithmetic, on the device of the tensors. It uses integers that wrap around, so the order
of additions does not matter and every bit counts, also those of NaN.
WHY hashed factors, each for its position: factors that are linear in it, such as place * STEP,
miss changes that cancel out, such as +d, -d, -d, +d of four neighbours. WHY odd: no change of one
word is lost. WHY two sums, of which one is of the upper bits: the highest bit, a float's sign,
times any odd factor is the highest bit, so in one sum two changed signs would cancel.
"""

from collections.abc import Iterator, Mapping

import torch

_BYTES = 8  # of a word
# In words. On the CPU: what fits a core's cache beside the factors; on a GPU: few kernels.
_PIECE = {"cpu": 1 << 15, "cuda": 1 << 23}
# Those of SplitMix64, as in ranks/seeding.py, of which _FIRST and _SECOND mix the bits.
_STEP, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_UPPER = 31
"""Both sums see the lowest bit of a float in the upper half of a word: they share bit 31 and 32."""


@torch.no_grad()
def checksums(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return two numbers for each tensor, (len(tensors), 2) int64, on their device."""
    tools: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
    found = []
    for tensor in tensors.values():
        if tensor.device not in tools:
            size = _PIECE["cpu" if tensor.is_cpu else "cuda"]
            factors = _factors(2 * size, tensor.device).view(2, size)
            tools[tensor.device] = factors, torch.empty_like(factors[0])
        found.append(_checksum(_words(tensor), *tools[tensor.device]))
    devices = [pair.device for pair in found if not pair.is_cpu]
    return torch.stack([pair.to(devices[0]) if devices else pair for pair in found])


def combine(pairs: torch.Tensor) -> torch.Tensor:
    """Combine all pairs into one, of shape (2,)."""
    return pairs.mul(_factors(2 * len(pairs), pairs.device).view(-1, 2)).sum(dim=0)


def _factors(size: int, device: torch.device) -> torch.Tensor:
    """Hash the numbers below size to odd ones."""
    words = torch.arange(1, size + 1, device=device).mul_(_STEP)
    upper = torch.empty_like(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        torch.bitwise_right_shift(words, shift, out=upper)
        # WHY the mask: a shift of a negative number brings ones in
        words.bitwise_xor_(upper.bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return words.bitwise_or_(1)


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """View the bits of a tensor as integers of 8 bytes, in pieces; the last one is filled up."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for piece in torch.split(raw, _BYTES * _PIECE["cpu" if tensor.is_cpu else "cuda"]):
        if missing := -len(piece) % _BYTES:
            piece = torch.cat([piece, piece.new_zeros(missing)])
        elif piece.storage_offset() % _BYTES:  # a part of another tensor
            piece = piece.clone()
        yield piece.view(torch.int64)


def _checksum(
    words: Iterator[torch.Tensor], factors: torch.Tensor, workspace: torch.Tensor
) -> torch.Tensor:
    """Return the two numbers of words. workspace: as large as a row of factors; overwritten."""
    sums: list[torch.Tensor] = []
    for piece in words:
        space = workspace[: len(piece)]
        upper = torch.bitwise_right_shift(piece, _UPPER, out=space)
        for part, row in ((upper, factors[1]), (piece, factors[0])):  # upper is in the workspace
            if part.is_cpu:
                sums.append(torch.dot(part, row[: len(part)]))
            else:  # CUDA has no dot of integers
                sums.append(torch.mul(part, row[: len(part)], out=space).sum())
    if len(sums) == 2:  # as a rule
        return torch.stack(sums)
    return combine(torch.stack(sums).view(-1, 2)) if sums else workspace.new_zeros(2)
