"""Models that compile without a C++ compiler, by torch's own tracing.

A test trains them with --compile: all of torch.compile runs, but for the code that it generates.
"""

from typing import Any

import torch
from torch import nn

from tests.plugins import NormingTests

BACKEND = "aot_eager"


def tell(what: Any) -> None:
    """Print which part of a model was compiled. what: as torch describes it."""
    if what.callback_trigger.name == "DYNAMO":  # else the backward of such a part
        print("compiled part", what.compile_id.partition("/")[0], flush=True)


class Compiled(nn.Module):
    """A network for the digits, of 2 MB: so torch splits it by DDP's buckets."""

    def __init__(self, num_classes: int, *, width: int = 600, spare: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, num_classes)
        self.spare = nn.Linear(2, 2) if spare else None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        torch._dynamo.callback.on_compile_end(tell)
        super().compile(*args, **{**kwargs, "backend": BACKEND})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(images.flatten(1)).relu())
        return logits


class NormingTestsCompiled(NormingTests):
    """A collective in each forward of evaluation, none in training, and all of it compiled."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **{**kwargs, "backend": BACKEND})
