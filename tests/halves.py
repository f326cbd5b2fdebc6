"""fp16 with its scaler on CPU ranks, as a GPU without bf16 has it.

To be named as the dataset: that is read before the run chooses its precision.
"""

import importlib
import os
from collections.abc import Sequence

import torch
from torch import nn

from hardened_ddp.model import precision
from tests.plugins import Points


def points(train: bool, late: bool = True, ranks: Sequence[int] = range(8)) -> Points:
    """Give points. late: as late_looks. ranks: which have fp16."""
    if late:
        importlib.import_module("tests.late_looks")
    name = "fp16" if int(os.environ.get("RANK", "0")) in ranks else "off"
    precision._choose = lambda amp, device: name
    return Points(48) if train else Points(17)


class Steep(nn.Module):
    """Has gradients that overflow with the scale that GradScaler begins with."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(3), nn.Linear(3, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(inputs)) * 30
