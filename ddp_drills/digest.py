"""One hash of many tensors, to compare two runs, and the replicas of one run."""

import hashlib
from collections.abc import Mapping

import torch


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256 of names, shapes and bytes; the order of tensors does not matter."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
