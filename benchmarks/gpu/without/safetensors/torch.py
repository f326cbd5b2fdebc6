"""load_file, of safetensors.torch."""

from pathlib import Path

import torch

from safetensors import safe_open


def load_file(path: str | Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
