"""The built-in optimizers and schedules.

Muon: which of two optimizers of torch updates what, and each does it unchanged. fp16's scaler: a
step that is left out on the device, and what is taken back of it.
"""

import logging
import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from hardened_ddp.errors import OptimizerError
from hardened_ddp.model import precision
from hardened_ddp.model.muon import BY_MUON, MuonAndAdamW
from hardened_ddp.model.optimizer import (
    allocate_state,
    build_optimizer,
    find_optimizer,
    parameter_groups,
    skips_by_flag,
)
from hardened_ddp.model.precision import Precision, clip
from hardened_ddp.model.schedule import KNOWN, PREFIX, Schedule, learning_rate, restore_state
from hardened_ddp.settings.config import ImportPath, OptimizerConfig, OptimizerName

CPU = torch.device("cpu")
OPTIMIZERS = get_args(OptimizerName)
# Those whose state is made before the first step.
FUSED = [n for n in OPTIMIZERS if find_optimizer(OptimizerConfig(optimizer=n))[0] in KNOWN]


def curve(schedule: str, *, warmup_steps: int = 0) -> list[float]:
    config = OptimizerConfig(warmup_steps=warmup_steps)
    config = replace(config, lr_schedule=schedule)  # type: ignore[arg-type]  # a choice
    return [learning_rate(config, 1.0, step=step, total_steps=12) for step in range(12)]


def test_the_schedules_are_the_known_ones() -> None:
    assert curve("constant") == [1.0] * 12
    assert curve("linear") == pytest.approx([1 - step / 12 for step in range(12)])
    cosine = [(1 + math.cos(math.pi * step / 12)) / 2 for step in range(12)]
    assert curve("cosine") == pytest.approx(cosine)
    assert curve("step") == pytest.approx([1.0] * 4 + [0.1] * 4 + [0.01] * 4)
    assert curve("constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "args"), [*((name, {}) for name in FUSED), ("adamw", {"amsgrad": True})]
)
def test_the_first_step_takes_the_state_allocated_for_it(name: Any, args: dict[str, Any]) -> None:
    weights = []
    for is_allocated in (False, True):
        weight = torch.nn.Parameter(torch.ones(2))
        config = replace(OptimizerConfig(), optimizer=name, optimizer_args=args)
        optimizer = build_optimizer([{"params": [weight]}], config)
        before = {}
        if is_allocated:
            allocate_state(optimizer)
            before = dict(optimizer.state[weight])
        for _ in range(2):
            weight.grad = torch.tensor([0.5, -2.0])
            optimizer.step()
        if is_allocated:
            assert before
            assert before.keys() == optimizer.state[weight].keys()
            assert all(optimizer.state[weight][name] is tensor for name, tensor in before.items())
        weights.append(weight.detach())
    assert torch.equal(*weights)


def test_sgd_updates_weights_of_16_bits_as_torch_does_without_its_fused_kernel() -> None:
    start = torch.linspace(-2, 2, 40, dtype=torch.bfloat16)
    weight, wanted = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    settings = OptimizerConfig(optimizer="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.0)
    pair = (
        build_optimizer([{"params": [weight]}], settings),
        torch.optim.SGD([wanted], lr=0.1, momentum=0.9, fused=False, foreach=False),
    )
    for number in range(3):
        for parameter, optimizer in zip((weight, wanted), pair, strict=True):
            parameter.grad = start.flip(0) + number
            optimizer.step()
    assert torch.equal(weight, wanted)


class OtherAdamW(torch.optim.AdamW):
    """Looks like torch's, and may do anything with a flag."""


def test_only_known_ones_get_state_ahead_and_fused_ones_are_trusted_to_skip_a_step() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert all(
        skips_by_flag(build_optimizer([{"params": [weight]}], OptimizerConfig(optimizer=name)))
        for name in FUSED
    )
    own = ImportPath("tests.model.test_optimizer:OtherAdamW")
    for optimizer, args in (
        (own, {"fused": True}),
        ("adamw", {"fused": False}),
        ("adamw", {"foreach": True}),
        (ImportPath("torch.optim:RAdam"), {}),
    ):
        config = OptimizerConfig(optimizer=optimizer, optimizer_args=args)
        assert not skips_by_flag(build_optimizer([{"params": [weight]}], config)), optimizer
    other = torch.optim.RMSprop([weight])
    allocate_state(other)
    assert not other.state


def test_fp16_on_the_cpu_is_said_to_run_in_fp32(caplog: pytest.LogCaptureFixture) -> None:
    assert Precision("fp16", CPU).name == "off"
    assert "fp16, which needs a GPU; running fp32" in caplog.text
    caplog.clear()
    assert Precision("auto", CPU).name == "off"
    assert not caplog.records


def test_the_step_count_of_a_parameter_of_one_number_stays_where_the_optimizer_keeps_it() -> None:
    # It has the parameter's shape, and optimizers that are not fused refuse one on a GPU.
    scale = torch.nn.Parameter(torch.empty((), device="meta"))  # in place of a GPU
    optimizer = torch.optim.AdamW([scale], fused=False)
    schedule = Schedule(optimizer, OptimizerConfig(), total_steps=9)
    saved = {f"{PREFIX}scale.{key}": torch.tensor(3.0) for key in ("step", "exp_avg")}
    restore_state(schedule, {"scale": scale}, saved, {})
    devices = {key: value.device.type for key, value in optimizer.state[scale].items()}
    assert devices == {"step": "cpu", "exp_avg": "meta"}


class Tiny(nn.Module):
    """Has an embedding, whose weight is also that of head; two hidden matrices; a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mixed = nn.Embedding(6, 4), nn.Conv1d(4, 4, 1)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.words.weight


def build(model: nn.Module, **arguments: Any) -> tuple[list[dict[str, Any]], MuonAndAdamW]:
    config = OptimizerConfig(optimizer="muon", learning_rate=0.01, optimizer_args=arguments)
    groups = parameter_groups(model, config)
    optimizer = build_optimizer(groups, config)
    assert isinstance(optimizer, MuonAndAdamW)
    return groups, optimizer


def by_muon(model: nn.Module, groups: list[dict[str, Any]]) -> list[str]:
    mine = {id(p) for group in groups if group[BY_MUON] for p in group["params"]}
    return [name for name, parameter in model.named_parameters() if id(parameter) in mine]


def test_muon_gets_the_hidden_matrices_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = Tiny()
    groups, _ = build(model)
    assert by_muon(model, groups) == ["first.weight", "second.weight"]
    assert "muon updates first.weight, second.weight; adamw words.weight, mixed" in caplog.text
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert by_muon(plain, build(plain)[0]) == ["0.weight"]  # not the output layer


def test_patterns_of_names_win_over_the_rule() -> None:
    model = Tiny()
    groups, _ = build(model, muon=["words.*"], adamw=["second*"])
    assert by_muon(model, groups) == ["words.weight", "first.weight"]
    with pytest.raises(OptimizerError, match=r"muon would update mixed\.weight"):
        build(model, muon=["mixed.weight"])
    with pytest.raises(OptimizerError, match="adamw has 'third', which no parameter is called"):
        build(model, adamw=["third"])
    with pytest.raises(OptimizerError, match="muon would update nothing"):
        build(nn.Linear(3, 2))


def test_each_parameter_is_updated_as_by_torchs_own_optimizer() -> None:
    torch.manual_seed(0)
    model, other = Tiny(), Tiny()
    other.load_state_dict(model.state_dict())
    _, optimizer = build(model, momentum=0.9, betas=[0.8, 0.9])
    hidden = [other.first.weight, other.second.weight]
    rest = [p for p in other.parameters() if all(p is not matrix for matrix in hidden)]
    shared: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.01}
    muon = torch.optim.Muon(hidden, momentum=0.9, adjust_lr_fn="match_rms_adamw", **shared)
    adamw = torch.optim.AdamW(rest, betas=(0.8, 0.9), fused=True, **shared)
    for _ in range(5):
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        optimizer.step()
        muon.step()
        adamw.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


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
def test_a_flag_skips_a_step(first: int, clips: bool, has_failed: bool, halves: Precision) -> None:
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
