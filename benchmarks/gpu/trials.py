"""The models of runs.py, by --model benchmarks.gpu.trials:build."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardened_ddp.gradients.by_ddp import ByDdp

_CLASSES = 10
_FAIL_AT = 6
_LAST_RANK = "1"


class Wide(nn.Module):
    """Square layers: width * width * depth parameters, whose gradients need little computation."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        found = self.first(images.flatten(1))
        for layer in self.layers:
            found = found + layer(found).relu()
        logits: torch.Tensor = self.head(found)
        return logits


class Asserts(Wide):
    """In one step of training, once, it looks up a row that its table does not have."""

    def __init__(self, inputs: int, width: int, mark: str) -> None:
        super().__init__(inputs, width, 1)
        self.table = nn.Embedding(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.mark = Path(mark)
        self.num_forwards = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the logits; a kernel fails in the chosen forward."""
        self.num_forwards += self.training
        place = 0
        if self.num_forwards == _FAIL_AT and not self.mark.exists():
            self.mark.touch()
            place = 1_000_000
        places = torch.full((len(images),), place, dtype=torch.int64, device=images.device)
        found = self.norm(self.first(images.flatten(1)) + self.table(places))
        logits: torch.Tensor = self.head(found)
        return logits + self.layers[0](found).sum() * 0


class Killed(Wide):
    """Rank 1 is killed in the forward of one step of training, once."""

    def __init__(self, inputs: int, width: int, depth: int, mark: str) -> None:
        super().__init__(inputs, width, depth)
        self.mark = Path(mark)
        self.num_forwards = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the logits; the mark says when the kill came."""
        self.num_forwards += self.training
        is_due = self.num_forwards >= _FAIL_AT and os.environ.get("RANK") == _LAST_RANK
        if is_due and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)


class FullInHook(Killed):
    """In one backward of rank 1 no memory is left for what DDP's hook allocates, once."""

    def __init__(self, inputs: int, width: int, depth: int, mark: str) -> None:
        super().__init__(inputs, width, depth, mark)
        send = ByDdp._sent

        def sent(sums: ByDdp, *bucket: Any) -> Any:  # Any: as of the method
            is_due = self.num_forwards >= _FAIL_AT and os.environ.get("RANK") == _LAST_RANK
            if not is_due or self.mark.exists():
                return send(sums, *bucket)
            self.mark.touch()
            _limit_memory(to_now=True)
            rest = _take_rest()
            try:
                return send(sums, *bucket)
            finally:
                del rest
                _limit_memory(to_now=False)

        ByDdp._sent = sent  # type: ignore[method-assign]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        self.num_forwards += self.training
        return Wide.forward(self, images)


def _take_rest() -> list[torch.Tensor]:
    """Take what torch's allocator still has in its segments, down to pieces of 512 bytes."""
    found: list[torch.Tensor] = []
    for exponent in range(30, 8, -1) if torch.cuda.is_available() else ():
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                found.append(torch.empty(1 << exponent, dtype=torch.uint8, device="cuda"))
    return found


def _limit_memory(*, to_now: bool) -> None:
    """Let torch's allocator take nothing beyond what it has now; leave it nothing in reserve."""
    if not torch.cuda.is_available():
        return
    share = 1.0
    if to_now:
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(0).total_memory
        share = min(1.0, torch.cuda.memory_reserved() / whole)
    torch.cuda.set_per_process_memory_fraction(share)


def build(
    input_shape: tuple[int, ...], kind: str, width: int = 64, depth: int = 1, mark: str = ""
) -> nn.Module:
    """Build one of the models: wide, asserts, killed, hook, images."""
    inputs = torch.Size(input_shape).numel()
    if kind == "wide":
        return Wide(inputs, width, depth)
    if kind == "asserts":
        return Asserts(inputs, width, mark)
    if kind == "killed":
        return Killed(inputs, width, depth, mark)
    if kind == "hook":
        return FullInHook(inputs, width, depth, mark)
    convolutions = [nn.Conv2d(input_shape[0], 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(
        *convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, _CLASSES)
    )
