"""The model of memory.py: many layers of one size, and each rank's peak of memory at its end."""

import json
import os
from multiprocessing.util import Finalize
from pathlib import Path

import torch
from torch import nn

_NUM_LAYERS = 10


class Layers(nn.Module):
    """_NUM_LAYERS square layers with num_parameters together; activations are small."""

    def __init__(self, inputs: int, num_classes: int, num_parameters: int) -> None:
        super().__init__()
        width = max(8, round((num_parameters / _NUM_LAYERS) ** 0.5))
        self.first = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, False) for _ in range(_NUM_LAYERS))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        found = self.first(images.flatten(1))
        for layer in self.layers:
            found = found + layer(found).relu()
        logits: torch.Tensor = self.head(found)
        return logits


def build(num_classes: int, input_shape: tuple[int, ...], num_parameters: int) -> nn.Module:
    """Build the model, for --model; $MEMORY_FILE is where the peak goes, with the rank behind."""
    if "MEMORY_FILE" in os.environ:
        file = Path(f"{os.environ['MEMORY_FILE']}.{os.environ['RANK']}")
        # WHY not atexit: ranks that multiprocessing started end without that
        Finalize(None, _write, args=(file,), exitpriority=0)
    return Layers(torch.Size(input_shape).numel(), num_classes, num_parameters)


def _write(file: Path) -> None:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM"))
    file.write_text(json.dumps({"peak_bytes": int(peak.split()[1]) * 1024}), encoding="utf-8")
