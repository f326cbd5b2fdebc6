"""Models and a data set for equal_weights.py: plain ones, and some in which something goes wrong.

`--model failing_parts:net --model_args '{fault: raise}'` does it once, on rank 1, in its sixth
forward of training; FAULTS says what there is. Forwards before training (which layers are used, how
much fits into memory) don't count: they may be more or fewer in another checkout. A file named DONE
in the working directory says that it was done, and a restarted process does not do it again.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

DONE = "fault-done"
FAULTS = ("raise", "backward", "nan", "memory", "terminate", "kill", "differ", "poison")
"""raise, backward: an exception there. nan, memory: a NaN, an out of memory. terminate, kill:
SIGTERM, SIGKILL to itself. differ: its weights change. poison: every gradient is NaN, on all
ranks, from the thirteenth forward on until the run has gone back to a checkpoint."""

_RANK, _FORWARD = 1, 5
_POISONED_FROM = 12


def net(
    num_classes: int = 10,
    input_shape: tuple[int, ...] = (1, 8, 8),
    *,
    fault: str = "",
    spare: str = "",
) -> nn.Module:
    """Build the model, for --model."""
    if fault and fault not in FAULTS:
        raise ValueError(f"fault: {fault}, not one of {', '.join(FAULTS)}")
    return Net(num_classes, input_shape, fault=fault, spare=spare)


class Net(nn.Module):
    """A convolution, batch normalization, dropout, two linear layers; and a fault.

    spare: "never" adds a layer that no forward uses; "sometimes", one that every second uses.
    """

    def __init__(
        self, num_classes: int, input_shape: tuple[int, ...], *, fault: str, spare: str
    ) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.fault, self.spare_use = fault, spare
        self.conv = nn.Conv2d(channels, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)
        self.hidden = nn.Linear(8 * height * width, 32)
        self.head = nn.Linear(32, num_classes)
        self.spare = nn.Linear(32, num_classes) if spare else None
        self.num_forwards = 0
        self.register_load_state_dict_post_hook(_note_load)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        is_training = self.training and _is_in_fit()
        features = self.dropout(self.norm(self.conv(images)).relu())
        hidden = self.hidden(features.flatten(1)).relu()
        logits: torch.Tensor = self.head(hidden)
        if self.spare is not None and self.spare_use == "sometimes" and self.num_forwards % 2:
            logits = logits + self.spare(hidden)
        if is_training:
            logits = self._with_fault(logits)
            self.num_forwards += 1
        return logits

    def _with_fault(self, logits: torch.Tensor) -> torch.Tensor:
        if self.fault == "poison":
            return self._poisoned(logits)
        is_here = os.environ.get("RANK", "0") == str(_RANK) and self.num_forwards == _FORWARD
        if not self.fault or not is_here or Path(DONE).exists():
            return logits
        Path(DONE).touch()
        match self.fault:
            case "raise":
                raise RuntimeError("a fault in forward")
            case "backward":
                logits.register_hook(_raise_in_backward)
            case "nan":
                return logits * float("nan")
            case "memory":
                raise torch.OutOfMemoryError("a fault: out of memory")
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "differ":
                with torch.no_grad():
                    self.head.bias.add_(1.0)
        return logits

    def _poisoned(self, logits: torch.Tensor) -> torch.Tensor:
        if self.num_forwards >= _POISONED_FROM and not _loaded:
            Path(DONE).touch()
            logits.register_hook(_nan_like)
        return logits


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of noise with a bright spot, which tells the class. One of them can't be read."""

    num_classes = 10

    def __init__(self, size: int, broken: int) -> None:
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.broken:
            Path(DONE).touch()
            raise OSError(f"sample {index} can't be read")
        image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(index))
        image.view(-1)[6 * (index % 10)] += 1.0
        return image, index % 10


def images(train: bool, broken: int = -1) -> Images:
    """Open the data set, for --dataset."""
    return Images(400, broken) if train else Images(100, -1)


def _is_in_fit() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        if frame.f_code.co_name == "fit" and frame.f_code.co_filename.endswith("ddp_training.py"):
            return True
        frame = frame.f_back
    return False


_loaded: list[bool] = []  # WHY not in the module: going back puts back its attributes


def _note_load(module: nn.Module, _: object) -> None:
    _loaded.append(True)


def _nan_like(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * float("nan")


def _raise_in_backward(gradient: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a fault in backward")
