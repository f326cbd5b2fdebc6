"""Models whose forward changes tensors beside gradients, each in another way; for --model.

All of them use what they change for their output, so that a wrong value goes into the weights.
"""

import copy
from typing import Any

import torch
from torch import nn

WIDTH = 5


class Base(nn.Module):
    """A layer whose bias is zero, and a count of the forwards in training, in a buffer."""

    every = 1
    """It changes something in each call of this number."""

    def __init__(self, num_classes: int, every: int = 0) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, num_classes)
        nn.init.zeros_(self.body.bias)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if every:
            self.every = every
        self.build()

    def build(self) -> None:
        """Make what shift depends on."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            if int(self.calls) % self.every == 0:
                self.change(inputs)
        return self.head(torch.tanh(self.body(inputs)) + self.shift(inputs))

    def change(self, inputs: torch.Tensor) -> None:
        """Change what shift depends on."""

    def shift(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return what the output depends on besides the weights."""
        return torch.zeros(1, WIDTH)


class ZeroTeacher(Base):
    """A frozen copy follows the weights, of which some are zero at first."""

    def build(self) -> None:
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def its(self) -> nn.Module:
        return self.teacher

    @torch.no_grad()
    def change(self, inputs: torch.Tensor) -> None:
        for its, mine in zip(self.its().parameters(), self.body.parameters(), strict=True):
            its.lerp_(mine, 0.1)

    def shift(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.its()(inputs))


class ReplacedTeacher(ZeroTeacher):
    """The same by new memory for each tensor, as MoCo does it."""

    def change(self, inputs: torch.Tensor) -> None:
        for its, mine in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
            its.data = its.data * 0.9 + mine.data * 0.1


class DataTarget(ZeroTeacher):
    """A target network that is copied now and then, through .data.

    If no trial sees it, only the values tell.
    """

    every = 2

    def change(self, inputs: torch.Tensor) -> None:
        self.teacher.weight.data.copy_(self.body.weight.data)


class HiddenTeacher(ZeroTeacher):
    """A teacher in a list: neither its parameters nor its state are the model's."""

    def build(self) -> None:
        self.hidden = [copy.deepcopy(self.body).requires_grad_(False)]

    def its(self) -> nn.Module:
        return self.hidden[0]


class HiddenTarget(HiddenTeacher):
    """The same, copied now and then."""

    every = 7

    @torch.no_grad()
    def change(self, inputs: torch.Tensor) -> None:
        self.its().load_state_dict(self.body.state_dict())


class Shadow:
    """Averages of parameters, in an object that is no module."""

    def __init__(self, module: nn.Module) -> None:
        self.of = {name: p.detach().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def follow(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self.of[name] = 0.9 * self.of[name] + 0.1 * parameter


class Shadowed(Base):
    """Has such averages."""

    def build(self) -> None:
        self.shadow = Shadow(self.body)

    def change(self, inputs: torch.Tensor) -> None:
        self.shadow.follow(self.body)

    def shift(self, inputs: torch.Tensor) -> torch.Tensor:
        of = self.shadow.of
        return torch.tanh(nn.functional.linear(inputs, of["weight"], of["bias"]))


class PlainMean(Base):
    """A mean of its inputs in a plain attribute, which is a new tensor each time."""

    def build(self) -> None:
        self.mean, self.shown = torch.zeros(3), torch.zeros(1)

    def change(self, inputs: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(dim=0)
        self.shown = inputs * 2

    def shift(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.mean.sum() * torch.ones(1, WIDTH)


class Queue(Base):
    """A queue of the last outputs with its place, in plain attributes, written in place."""

    def build(self) -> None:
        self.queue, self.place = torch.zeros(4, 3), torch.zeros((), dtype=torch.int64)

    def change(self, inputs: torch.Tensor) -> None:
        self.queue[int(self.place) % 4] = inputs.mean(dim=0)
        self.place += 1

    def shift(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.queue.mean() * torch.ones(1, WIDTH)


class Decayed(Base):
    """Weights that are trained, and that forward decays; spectral norm in its head."""

    def build(self) -> None:
        self.head = nn.utils.parametrizations.spectral_norm(self.head)

    @torch.no_grad()
    def change(self, inputs: torch.Tensor) -> None:
        self.body.bias.mul_(0.9)
        self.body.weight.data.clamp_(-0.5, 0.5)


class InBackward(ZeroTeacher):
    """The average is moved by a hook in backward, through .data."""

    def change(self, inputs: torch.Tensor) -> None:
        """Move nothing yet."""

    def shift(self, inputs: torch.Tensor) -> torch.Tensor:
        shift: torch.Tensor = torch.tanh(self.teacher(inputs)) + 0 * self.body.bias
        if shift.requires_grad:
            shift.register_hook(self.follow)
        return shift

    def follow(self, gradient: torch.Tensor) -> None:
        self.teacher.bias.data.lerp_(self.body.bias.data, 0.2)


class Together(nn.Module):
    """Has all that change something in each forward."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        kinds = [ZeroTeacher, ReplacedTeacher, HiddenTeacher, Shadowed, PlainMean, Queue]
        kinds += [Decayed, InBackward]
        self.parts = nn.ModuleList(kind(num_classes) for kind in kinds)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(inputs) for part in self.parts]).mean(dim=0)


MOVING = [ZeroTeacher, Together, DataTarget, HiddenTarget]


class Normalising(nn.Module):
    """Changes its input in place, and may be given in any of several forms."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, num_classes)

    def change(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mul_(3).add_(0.25)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(self.change(inputs))))


class NoisyNowAndThen(Normalising):
    """Changes its input in one of eight calls or so: in few trials."""

    def change(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mul_(-2) if self.training and float(torch.rand(())) < 0.12 else inputs


class ChangingLabels(Normalising):
    """Makes its own loss, and changes the labels for it."""

    def change(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(inputs)
        if labels is None:
            return {"logits": logits}
        labels.neg_().add_(1)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


CHANGING = [Normalising, NoisyNowAndThen]
CHANGING_IN_PARTS = [NoisyNowAndThen, ChangingLabels]
