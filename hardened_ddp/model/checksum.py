"""A checksum of tensors: two numbers that change if one bit of them does.

Owns the arithmetic, on the device of the tensors. It uses integers that wrap around, so the order
of additions does not matter and every bit counts, also those of NaN.
WHY hashed factors, each for its position: factors that are linear in it, such as place * STEP,
miss changes that cancel out, such as +d, -d, -d, +d of four neighbours. WHY odd: no change of one
word is lost. WHY two sums, of which one is of the upper bits: the highest bit, a float's sign,
times any odd factor is the highest bit, so in one sum two changed signs would cancel.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

_BYTES = 8  # of a word
# In words. On the CPU: what fits a core's cache beside the factors; on a GPU: few kernels, and
# 24 MiB of tables. With another size a checksum is another one.
_PIECE = {"cpu": 1 << 15, "cuda": 1 << 20}
# Those of SplitMix64, as in ranks/seeding.py, of which _FIRST and _SECOND mix the bits.
_STEP, _FIRST, _SECOND = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# Both sums see the lowest bit of a float in the upper half of a word: they share bit 31 and 32.
_UPPER = 31


@torch.no_grad()
def checksums(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return two numbers for each tensor, (len(tensors), 2) int64, on their device."""
    tools = {device: Checksum(device) for device in {t.device for t in tensors.values()}}
    found = [tools[tensor.device].of(tensor) for tensor in tensors.values()]
    devices = [pair.device for pair in found if not pair.is_cpu]
    return torch.stack([pair.to(devices[0]) if devices else pair for pair in found])


def combine(pairs: torch.Tensor) -> torch.Tensor:
    """Combine all pairs into one, of shape (2,)."""
    return pairs.mul(_factors(2 * len(pairs), pairs.device).view(-1, 2)).sum(dim=0)


class Checksum:
    """Checksums of tensors of one device. Keeps its tables, for one who asks in each step."""

    def __init__(self, device: torch.device) -> None:
        self._piece = _PIECE["cpu" if device.type == "cpu" else "cuda"]
        self._factors = _factors(2 * self._piece, device).view(2, self._piece)
        self._space = torch.empty_like(self._factors[0])
        if device.type == "cpu":
            self._host = [table.numpy() for table in (*self._factors, self._space)]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the two numbers of a tensor, on its device, which nobody waits for."""
        if tensor.is_cpu:
            return torch.tensor(self.read(tensor))
        pairs = [self._on_device(piece) for piece in _words(tensor, self._piece)]
        if len(pairs) > 1:
            return combine(torch.stack(pairs))
        return pairs[0] if pairs else self._space.new_zeros(2)

    def read(self, tensor: torch.Tensor) -> list[int]:
        """Return the two numbers of a tensor of the CPU."""
        # WHY numpy: a step has time for ten calls of numpy, but not for as many of torch
        low, high, space = self._host
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        size, found = _BYTES * self._piece, []
        for start in range(0, len(raw), size):
            piece = raw[start : start + size]
            if missing := -len(piece) % _BYTES:
                piece = np.concatenate([piece, np.zeros(missing, np.uint8)])
            words = piece.view(np.int64)
            upper = np.right_shift(words, _UPPER, out=space[: len(words)])
            found.append([int(upper.dot(high[: len(words)])), int(words.dot(low[: len(words)]))])
        if len(found) > 1:
            found = [combine(torch.tensor(found)).tolist()]
        return found[0] if found else [0, 0]

    def _on_device(self, words: torch.Tensor) -> torch.Tensor:
        space = self._space[: len(words)]
        upper = torch.bitwise_right_shift(words, _UPPER, out=space)
        sums = []
        for part, row in ((upper, self._factors[1]), (words, self._factors[0])):
            # WHY not dot: CUDA has none of integers
            sums.append(torch.mul(part, row[: len(part)], out=space).sum())
        return torch.stack(sums)


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
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for piece in torch.split(raw, _BYTES * size):
        if missing := -len(piece) % _BYTES:
            piece = torch.cat([piece, piece.new_zeros(missing)])
        elif piece.storage_offset() % _BYTES:  # a part of another tensor
            piece = piece.clone()
        yield piece.view(torch.int64)
