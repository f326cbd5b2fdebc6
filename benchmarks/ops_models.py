"""The models of step_ops.py, small in width but with all their layers, and samples for them.

Owns those. WHY small: the operations of a step do not depend on the width.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from hardened_ddp.data.foreign_code import import_torchvision

VOCABULARY = 64
_LENGTH = 16
_SIZES = {"train": 64, "test": 16}


class Transformer(nn.Module):
    """A language model with 12 blocks: tokens (N, T) -> logits (N, T, vocabulary)."""

    def __init__(self, vocabulary: int, *, width: int = 64, num_blocks: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(_LENGTH, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give the logits of the token after each position."""
        found = self.blocks(self.tokens(tokens) + self.places, mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(found)
        return logits


def _resnet(num_classes: int) -> nn.Module:
    found: nn.Module = import_torchvision().models.resnet50(num_classes=num_classes)
    return found


def _mlp(num_classes: int) -> nn.Module:
    hidden = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, num_classes))


MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    "resnet50": _resnet,
    "transformer": Transformer,
    "mlp": _mlp,
}
SHAPES = {"resnet50": (3, 32, 32), "mlp": (1, 8, 8)}


class Samples(TensorDataset):
    """Random samples for one of the models, by --dataset."""

    def __init__(self, *, train: bool, work: str) -> None:
        torch.manual_seed(int(train))
        self.num_classes = VOCABULARY if work == "transformer" else 10
        num = _SIZES["train" if train else "test"]
        super().__init__(*_samples(work, num, self.num_classes))


def sample_inputs(work: str, num_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch for the bare loop: inputs and labels."""
    return _samples(work, 4, num_classes)


def bare_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss as a tutorial computes it; tokens come as (N, T)."""
    if labels.dim() == 2:
        return cross_entropy(logits.flatten(0, 1), labels.flatten())
    return cross_entropy(logits, labels)


def _samples(work: str, num: int, num_classes: int) -> Any:
    if work == "transformer":
        tokens = torch.randint(num_classes, (num, _LENGTH + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.randn(num, *SHAPES[work]), torch.randint(num_classes, (num,))
