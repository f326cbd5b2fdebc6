"""The built-in optimizers and schedules."""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from hardened_ddp.model.optimizer import (
    allocate_state,
    build_optimizer,
    find_optimizer,
    skips_by_flag,
)
from hardened_ddp.model.precision import Precision
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
def test_the_first_step_takes_the_state_that_was_allocated_for_it(
    name: Any, args: dict[str, Any]
) -> None:
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


def test_state_is_allocated_for_known_optimizers_only() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.RMSprop([weight])
    allocate_state(optimizer)
    assert not optimizer.state


class OtherAdamW(torch.optim.AdamW):
    """Looks like torch's, and may do anything with a flag."""


def test_only_the_fused_ones_of_torch_are_trusted_to_skip_a_step_by_a_flag() -> None:
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
