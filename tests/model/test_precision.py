"""fp16's scaler: a step that is left out on the device, and what is taken back of it."""

from typing import Any

import pytest
import torch
from torch import nn

from hardened_ddp.model import precision
from hardened_ddp.model.optimizer import build_optimizer
from hardened_ddp.model.precision import Precision, clip
from hardened_ddp.settings.config import OptimizerConfig

CPU = torch.device("cpu")


class Closed:
    """A scaler as torch may have it some day: what it documents, and nothing else."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.inner = [scaler]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner[0], name)


@pytest.fixture(params=[False, True], ids=["open", "closed"])
def halves(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Precision:
    monkeypatch.setattr(precision, "_choose", lambda amp, device: "fp16")
    found = Precision("fp16", CPU)
    if request.param:
        found.scaler = Closed(found.scaler)  # type: ignore[arg-type, assignment]
    return found


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copy weights and optimizer state."""
    states = [t for state in optimizer.state.values() for t in state.values()]
    return [t.detach().clone() for t in [*model.parameters(), *states]]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("first", [0, 4])
def test_a_flag_that_is_up_leaves_all_as_it_is(
    first: int, clips: bool, has_failed: bool, halves: Precision
) -> None:
    # first 0: a layer that has no weights at all, as some models have.
    model = nn.Sequential(nn.Linear(first, 4), nn.Linear(4, 2))
    optimizer = build_optimizer([{"params": list(model.parameters())}], OptimizerConfig())

    assert halves.scaler is not None

    def step(flag: float, *, has_gradient: bool = True) -> None:
        with halves.autocast():
            loss = model(torch.ones(3, first)).float().square().mean() / 100
        if has_gradient:
            halves.scaler.scale(loss).backward()
        halves.leave_out(optimizer, torch.tensor(flag))
        if clips:
            halves.unscale(optimizer)
            clip(model.parameters(), max_norm=1.0)
        halves.scaler.step(optimizer)
        halves.scaler.update()
        optimizer.zero_grad(set_to_none=True)

    step(0.0)
    before, mark = everything(model, optimizer), halves.mark()
    state = halves.state()
    step(1.0, has_gradient=not has_failed)
    assert all(map(torch.equal, everything(model, optimizer), before))
    assert halves.state() != state
    halves.go_back(mark)
    assert halves.state() == state
    step(0.0)
    assert not all(map(torch.equal, everything(model, optimizer), before))


def test_a_norm_that_overflows_leaves_the_gradient_as_it_is_unless_it_is_clipped() -> None:
    weight = nn.Parameter(torch.ones(4))
    for size in (2.0, 2.0**80):  # the square of the second one is inf
        weight.grad = torch.full((4,), size)
        assert clip([weight, nn.Parameter(torch.ones(2))], max_norm=0).item() >= 2 * size
        assert weight.grad.tolist() == [size] * 4
    clip([weight], max_norm=1.0)
    assert weight.grad.tolist() == [0.0] * 4


def test_a_mark_is_a_copy(halves: Precision) -> None:
    mark = halves.mark()
    if isinstance(mark, dict):
        mark["scale"] = 1.0
    else:
        mark[0].fill_(1.0)
    assert halves.state()["scale"] == 65536.0
