"""Models that have CPU ranks learn of a bad gradient one step later, as ranks with GPUs do.

Imported by a rank when it builds its model, which is before that choice is made.
"""

from torch import nn

from hardened_ddp.training import parts
from tests.plugins import Stumbling

parts.LATE_DEVICES = ("cuda", "cpu")

__all__ = ["Stumbling", "mlp"]


def mlp(num_classes: int) -> nn.Module:
    """Build a network for the digits, with BatchNorm: a forward changes its statistics."""
    hidden = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
    return nn.Sequential(nn.Flatten(), hidden, nn.Linear(32, num_classes))
