"""Optimizers and schedules that tests plug in by import path, as a user would; some are wrong."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR


class Nesting(torch.optim.RAdam):
    """Keeps a nested history beside the state of RAdam."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            history = state.setdefault("history", {"steps": 0, "largest": []})
            history["steps"] += 1
            history["largest"] = [float(state["exp_avg"].abs().max())]


class Adaptive(Nesting):
    """Keeps a number that changes in its parameter groups, as Prodigy and schedule-free ones do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["betas"] = (1 - 1 / (group["k"] + 2), 0.99)
        super().step()


class Noisy(Nesting):
    """Adds noise to each update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Forgetful(Nesting):
    """Keeps the number of its steps where nobody saves it."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        self.param_groups[0]["params"][0].mul_(1 - 0.01 / self.num_steps)
        super().step()


class OwnFormat(Forgetful):
    """Saves the number, in its own way."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_steps = state_dict["num_steps"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "num_steps"})


class Holding(Nesting):
    """Keeps something in its state that can't be saved."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["generator"] = torch.Generator()


class Complex(Nesting):
    """Keeps a tensor of a dtype that no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["spectrum"] = torch.zeros(2, dtype=torch.complex128)


class Raising(Nesting):
    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("no steps today")


class WithoutRate(Optimizer):
    """Has no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class NotTorchs:
    def __init__(self, params: Any, lr: float) -> None:
        self.params = list(params)

    def step(self) -> None: ...


class Other(Nesting):
    """Updates a parameter of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], lr)


def falling(step: int, total_steps: int, power: float = 1.0) -> float:
    return float((1 - step / total_steps) ** power)


def warmed(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / max(1, warmup_steps))


def negative(step: int) -> float:
    return 1.0 - step


def broken(step: int, total_steps: int) -> float:
    return 1 / (total_steps // 2 - step)


def no_parameters_that_tell() -> float:
    return 1.0


def one_after_the_other(optimizer: Optimizer, total_steps: int) -> SequentialLR:
    parts = [LinearLR(optimizer, total_iters=3), CosineAnnealingLR(optimizer, total_steps - 3)]
    return SequentialLR(optimizer, parts, [3])


def by_a_lambda(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


class Bouncing:
    """A scheduler with a state of its own: the rate doubles and halves by what it was before."""

    def __init__(self, optimizer: Optimizer, factor: float = 2.0) -> None:
        self.optimizer, self.factor, self.is_up = optimizer, factor, False

    def step(self) -> None:
        self.is_up = not self.is_up
        for group in self.optimizer.param_groups:
            group["lr"] *= self.factor if self.is_up else 1 / self.factor / 1.01

    def state_dict(self) -> dict[str, Any]:
        return {"is_up": self.is_up}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_up = state["is_up"]


class Unsaved:
    def __init__(self, optimizer: Optimizer) -> None: ...

    def step(self) -> None: ...


def nothing(optimizer: Optimizer) -> None: ...


class SavedInPart(Bouncing):
    """Does not save which way it goes next."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Grouped(nn.Module):
    """A model with a learning rate for each part; how: what is wrong with its groups."""

    def __init__(self, num_classes: int, how: str = "") -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(3, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, num_classes)
        self.how = how

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.body(inputs)).relu())

    def parameter_groups(self) -> Any:
        body = [*self.body.parameters(), *self.norm.parameters()]
        head = list(self.head.parameters())
        found: dict[str, Any] = {
            "": [{"params": body, "lr": 0.001}, {"params": head, "weight_decay": 0.3}],
            "twice": [{"params": body}, {"params": [*head, body[0]]}],
            "left out": [{"params": body}],
            "foreign": [{"params": [*body, *head, nn.Parameter(torch.zeros(7))]}],
            "no params": [{"parameters": body}],
            "a mapping": {"params": [*body, *head]},
            "misspelled": [{"params": body}, {"params": head, "weight_decy": 0.3}],
        }
        if self.how not in found:
            raise RuntimeError("no groups today")
        return found[self.how]
