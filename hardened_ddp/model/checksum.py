"""A checksum of tensors: two numbers that change if one bit of them does.

Owns the arithmetic, on the device of the tensors. It uses integers that wrap around, so the order
of additions does not matter and every bit counts, also those of NaN.
"""

from collections.abc import Mapping

import torch

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# In elements of 8 bytes. On the CPU: what fits a core's cache; on a GPU: few kernels.
_PIECE = {"cpu": 1 << 15, "cuda": 1 << 24}
# Any large odd numbers; these are those of SplitMix64, as in ranks/seeding.py.
_FACTOR, _STEP = 0xBF58476D1CE4E5B9 - (1 << 64), 0x9E3779B97F4A7C15 - (1 << 64)


@torch.no_grad()
def checksums(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return two numbers for each tensor, (len(tensors), 2) int64, on their device."""
    tools: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
    found = []
    for tensor in tensors.values():
        if tensor.device not in tools:
            size = _PIECE["cpu" if tensor.is_cpu else "cuda"]
            # each position has its own factor: so two values that swap positions are noticed
            places = torch.arange(size, device=tensor.device).mul_(_STEP).bitwise_or_(1)
            tools[tensor.device] = places, torch.empty_like(places)
        found.append(_checksum(_words(tensor), *tools[tensor.device]))
    devices = [pair.device for pair in found if not pair.is_cpu]
    return torch.stack([pair.to(devices[0]) if devices else pair for pair in found])


def combine(pairs: torch.Tensor) -> torch.Tensor:
    """Combine all pairs into one, of shape (2,)."""
    places = torch.arange(len(pairs), device=pairs.device).mul_(_STEP).bitwise_or_(1)
    return pairs.mul(places[:, None]).sum(dim=0)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """View the bits of a tensor as integers, flattened."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])


def _checksum(words: torch.Tensor, factors: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
    """Return the two numbers of words. workspace: as large as factors; it is overwritten."""
    pair = torch.zeros(2, dtype=torch.int64, device=words.device)
    for piece in torch.split(words, len(factors)):
        whole = workspace[: len(piece)].copy_(piece)
        pair.mul_(_FACTOR)
        pair[0] += whole.sum()
        pair[1] += whole.mul_(factors[: len(piece)]).sum()
    return pair
