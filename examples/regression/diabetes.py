"""Regression: how far diabetes has progressed after a year, from ten measurements of a patient.

    torchrun --nproc_per_node=2 ddp_training.py --cpu_only --config examples/regression/config.yaml

The data come with scikit-learn: 442 patients (Efron, Hastie, Johnstone, Tibshirani, 2004).
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import Dataset, TensorDataset

NUM_TEST = 88  # the last fifth


class Patients(TensorDataset):
    """(measurements (10,), progression) of each patient; read by the batch, so no worker helps."""

    in_memory = True


def patients(train: bool) -> Dataset[tuple[torch.Tensor, ...]]:
    """Return the training or the test set."""
    measurements, progression = load_diabetes(return_X_y=True)
    order = torch.randperm(len(progression), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(measurements, dtype=torch.float32)[order]
    labels = torch.tensor(progression, dtype=torch.float32)[order]
    kept = slice(None, -NUM_TEST) if train else slice(-NUM_TEST, None)
    return Patients(inputs[kept] / inputs[:-NUM_TEST].std(dim=0), labels[kept])


class Network(nn.Module):
    """(N, 10) -> (N, 1). Learns the deviation from a typical patient, which is easier."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 1)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 150 + 75 * self.layers(inputs)
