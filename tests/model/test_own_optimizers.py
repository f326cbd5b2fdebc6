"""The user's optimizer, schedule and parameter groups: resumed bit for bit, or refused at once."""

import json
import logging
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.errors import OptimizerError
from hardened_ddp.model.optimizer import build_optimizer, parameter_groups
from hardened_ddp.model.precision import Precision
from hardened_ddp.model.schedule import Schedule, restore_state, save_state
from hardened_ddp.model.state_tree import pack, unpack
from hardened_ddp.preflight.optimizer_trial import build_optimizer_and_schedule
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.settings.config import ImportPath, OptimizerConfig
from hardened_ddp.task.task import Task
from tests.harness.ranks import train
from tests.marks import sections, slow_after
from tests.own_optimizers import Grouped
from tests.settings.given import settings_of

CPU = torch.device("cpu")
OWN, SCHEDULERS = "tests.own_optimizers", "torch.optim.lr_scheduler"
REFUSED = sections(Path(__file__).with_name("refused_optimizers.txt"))
"""Words of the error, and settings, in which own: is OWN, or what is wrong with the groups."""


def trial_of(model: nn.Module) -> Trial:
    return Trial(model, Task(), Precision("off", CPU), Group(Launch(), CPU))


def build(model: nn.Module | None = None, **settings: Any) -> Schedule:
    trial = trial_of(nn.Linear(3, 2) if model is None else model)
    # a value with a colon is an import path
    paths = {n: ImportPath(v) for n, v in settings.items() if isinstance(v, str) and ":" in v}
    config = OptimizerConfig(**{**settings, **paths})
    return build_optimizer_and_schedule(trial, config, total_steps=12)


def rates(schedule: Schedule, num_steps: int, group: int = 0) -> list[float]:
    found = []
    for step in range(num_steps):
        schedule.begin_step(step)
        found.append(float(schedule.optimizer.param_groups[group]["lr"]))
        schedule.optimizer.step()
        schedule.end_step()
    return found


OF_TORCH = "RAdam NAdam Adagrad Rprop RMSprop Adadelta Adamax ASGD Adafactor AdamW"
BY_PATH = [f"torch.optim:{name}" for name in OF_TORCH.split()]
BY_PATH += [f"{OWN}:{name}" for name in ("Nesting", "Adaptive", "OwnFormat")]
SCHEDULES: dict[str, dict[str, Any]] = {
    f"{SCHEDULERS}:OneCycleLR": {"cycle_momentum": False},
    f"{SCHEDULERS}:MultiStepLR": {"milestones": [2, 5]},
    f"{SCHEDULERS}:StepLR": {"step_size": 2},
    f"{SCHEDULERS}:LinearLR": {},
    f"{SCHEDULERS}:PolynomialLR": {},
    f"{SCHEDULERS}:CosineAnnealingLR": {},
    f"{SCHEDULERS}:CosineAnnealingWarmRestarts": {"T_0": 3},
    f"{SCHEDULERS}:CyclicLR": {"base_lr": 1e-4, "cycle_momentum": False},
    "torch.optim.swa_utils:SWALR": {"swa_lr": 0.1},
    f"{OWN}:one_after_the_other": {},
    f"{OWN}:by_a_lambda": {},
    f"{OWN}:Bouncing": {},
}


def test_an_optimizer_gets_the_settings_that_it_takes_and_its_arguments() -> None:
    args = {"betas": [0.5, 0.6], "weight_decay": 0.7}
    optimizer = build(optimizer=f"{OWN}:Nesting", optimizer_args=args, learning_rate=0.2).optimizer
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.2, 0.7, [0.5, 0.6])
    args = {"betas": [0.9, 0.95]}
    group = build(optimizer="adamw", optimizer_args=args).optimizer.param_groups[0]
    found = [*group["betas"], group["fused"], group["weight_decay"]]
    assert found == [0.9, 0.95, True, 0.01]
    group = build(optimizer="sgd", optimizer_args={"nesterov": True}).optimizer.param_groups[0]
    assert (group["nesterov"], group["momentum"]) == (True, 0.9)


def test_the_run_is_not_touched_by_the_trial() -> None:
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    schedule = build(model, optimizer=f"{OWN}:Noisy", lr_schedule=f"{OWN}:Bouncing")
    assert all(map(torch.equal, model.parameters(), before))
    assert torch.equal(torch.get_rng_state(), random)
    assert not schedule.optimizer.state
    assert schedule.state() == {"is_up": False}


@pytest.mark.parametrize("told", REFUSED)
def test_what_cannot_be_used_is_refused_before_the_first_step(told: str) -> None:
    words, _, groups = REFUSED[told].strip().partition("groups: ")
    model = Grouped(2, groups) if groups else nn.Linear(3, 2)
    config = settings_of(words.replace("own:", f"{OWN}:")).config.optimizer
    with pytest.raises(OptimizerError) as caught:
        build_optimizer_and_schedule(trial_of(model), config, total_steps=12)
    assert told in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize("how", ["a function", "cosine"])
def test_each_group_has_its_own_peak(how: str) -> None:
    path = f"{OWN}:falling" if how == "a function" else "linear"
    schedule = build(Grouped(2), lr_schedule=path, learning_rate=0.1)
    assert rates(schedule, 12) == pytest.approx([0.001 * (1 - step / 12) for step in range(12)])
    assert rates(schedule, 12, 1) == pytest.approx([0.1 * (1 - step / 12) for step in range(12)])


def test_a_function_of_the_step_gets_what_it_asks_for() -> None:
    schedule = build(lr_schedule=f"{OWN}:warmed", warmup_steps=4, learning_rate=1.0)
    assert rates(schedule, 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    args = {"power": 2}
    schedule = build(lr_schedule=f"{OWN}:falling", lr_schedule_args=args, learning_rate=1.0)
    assert rates(schedule, 2) == pytest.approx([1, (11 / 12) ** 2])
    assert not schedule.has_state


def test_a_scheduler_of_torch_is_that_of_torch() -> None:
    schedule = build(lr_schedule=f"{SCHEDULERS}:OneCycleLR", learning_rate=0.5, optimizer="sgd")
    weight = nn.Linear(3, 2).weight
    plain = torch.optim.SGD([weight], 0.5, momentum=0.9)
    expected = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.5, total_steps=12)
    found = []
    for _ in range(12):
        found.append(plain.param_groups[0]["lr"])
        plain.step()
        expected.step()
    assert rates(schedule, 12) == found


def test_a_step_that_is_taken_back_takes_its_schedule_back() -> None:
    schedule = build(lr_schedule=f"{SCHEDULERS}:OneCycleLR", optimizer="sgd", learning_rate=0.5)
    mark, group = schedule.mark(), schedule.optimizer.param_groups[0]
    before = (group["lr"], group["momentum"])
    expected = rates(schedule, 5)
    assert (group["lr"], group["momentum"]) != before
    schedule.go_back(mark)
    assert (group["lr"], group["momentum"]) == before
    assert rates(schedule, 5) == expected


def test_a_state_comes_back_as_it_was() -> None:
    state = {
        "t": torch.arange(3.0),
        3: [1, (2.5, None, True), {"deep": torch.tensor(7)}],
        "nan": float("inf"),
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "ordered": OrderedDict(x="text"),
        "counts": Counter([2, 2, 5]),
        "array": np.arange(4)[::-2],
    }
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(pack(state, "s", tensors, error=OptimizerError))
    found = unpack(json.loads(tree), tensors)
    assert found.keys() == state.keys()
    assert found[3][:2] == [1, (2.5, None, True)]
    assert found[3][2]["deep"].item() == 7
    assert (found["a.b"].item(), found["a"]["b"].item()) == (0, 1)
    assert found["nan"] == float("inf")
    assert (type(found["ordered"]), type(found["counts"])) == (OrderedDict, Counter)
    assert found["counts"] == state["counts"]
    assert torch.equal(found["t"], state["t"])  # type: ignore[arg-type]
    assert found["array"].tolist() == [3, 1]
    masked = np.ma.masked_array([1, 2], [False, True])
    dates = np.array("2026-01-01", dtype="M8[s]")
    for bad in ({1, 2}, object(), {(1, 2): 3}, torch.Generator(), lambda: 1, masked, dates):
        with pytest.raises(OptimizerError, match="can't be saved"):
            pack({"x": [bad]}, "s", {}, error=OptimizerError)


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        *((name, "cosine") for name in ("adamw", *BY_PATH)),
        *(("adamw", scheduler) for scheduler in SCHEDULES),
        (f"{OWN}:Adaptive", f"{OWN}:Bouncing"),
    ],
)
def test_a_state_is_put_back_into_an_optimizer_that_went_on(name: str, scheduler: str) -> None:
    args = SCHEDULES.get(scheduler, {})
    model = nn.Linear(3, 2)
    names = dict(model.named_parameters())
    schedule = build(model, optimizer=name, lr_schedule=scheduler, lr_schedule_args=args)
    assert type(schedule.optimizer).__name__ == name.partition(":")[2] or name == "adamw"
    assert schedule.has_state == (scheduler != "cosine")

    def go_on(first: int, last: int) -> list[torch.Tensor]:
        for step in range(first, last):
            for parameter in names.values():
                parameter.grad = torch.full_like(parameter, 0.1 * (step - 4))
            schedule.begin_step(step)
            schedule.optimizer.step()
            schedule.end_step()
        return [parameter.detach().clone() for parameter in names.values()]

    before = go_on(0, 4)
    tensors, rest = save_state(schedule, names)
    kept = {key: tensor.clone() for key, tensor in tensors.items()}
    rest = json.loads(json.dumps(rest))
    expected = go_on(4, 7)
    with torch.no_grad():
        for parameter, value in zip(names.values(), before, strict=True):
            parameter.copy_(value)
    restore_state(schedule, names, kept, rest)
    assert all(map(torch.equal, go_on(4, 7), expected))


@pytest.mark.slow
def test_a_scheduler_cant_be_continued_for_more_steps_than_made_for(tmp_path: Path) -> None:
    words = ["--lr_schedule", f"{SCHEDULERS}:OneCycleLR", "--model", "mlp"]
    learn(tmp_path, *words)
    argv = ["--cpu_only", "--resume", str(tmp_path / "run"), "--epochs", "3"]
    finished = train(argv, 1)
    assert finished.statuses == (2,)
    assert "was made for 10 steps, and the run now has 15" in finished.output
    words = ["--optimizer", "torch.optim:RAdam", "--lr_schedule", "cosine"]
    finished = train([*argv[:-1], "2", *words], 1)
    assert finished.statuses == (2,)
    assert "optimizer: the checkpoint was trained with AdamW, now it is RAdam" in finished.output


def test_frozen_parameters_need_no_group_and_the_groups_of_the_task_come_first() -> None:
    model = Grouped(2, "left out")
    model.head.requires_grad_(False)
    assert len(build(model).optimizer.param_groups[0]["params"]) == 4
    model.body.requires_grad_(False)
    assert len(build(model).optimizer.param_groups[0]["params"]) == 2

    class Task:
        def parameter_groups(self, model: nn.Module) -> Any:
            return list(model.parameters())

    found = parameter_groups(Grouped(2), OptimizerConfig(), task=Task())
    assert [len(group["params"]) for group in found] == [6]


def test_norms_and_biases_decay_only_without_the_setting() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    config = OptimizerConfig(no_weight_decay=True, weight_decay=0.2)
    groups = build_optimizer(parameter_groups(model, config), config).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(2, 0.2), (4, 0.0)]
    assert {p.dim() for p in groups[0]["params"]} == {2, 4}
    wide = nn.LayerNorm((3, 4))  # its weight is a matrix
    assert [g["weight_decay"] for g in parameter_groups(wide, config)] == [0.0]
    plain = replace(config, no_weight_decay=False)
    assert "weight_decay" not in parameter_groups(model, plain)[0]
    grouped = parameter_groups(Grouped(2), config)
    found = [(len(g["params"]), g.get("weight_decay")) for g in grouped]
    assert found == [(1, None), (3, 0.0), (2, 0.3)]


def test_a_configure_optimizers_that_is_not_used_is_told(caplog: pytest.LogCaptureFixture) -> None:
    gan = Grouped(2)
    gan.configure_optimizers = lambda: None  # type: ignore[assignment]  # as Lightning's
    with caplog.at_level(logging.WARNING):
        build(gan)
    assert "configure_optimizers() of the model is not used" in caplog.text
    gan.automatic_optimization = False  # type: ignore[assignment]  # as Lightning's
    with pytest.raises(OptimizerError, match="several optimizers") as caught:
        build(gan)
    assert "protect" in caught.value.fix


# Other optimizers and schedules: test_a_state_is_put_back_into_an_optimizer_that_went_on.
RUNS = {
    "nesting": ["--optimizer", f"{OWN}:Nesting", "--lr_schedule", f"{OWN}:falling"],
    "adaptive": ["--optimizer", f"{OWN}:Adaptive", "--lr_schedule", f"{OWN}:Bouncing"],
    "noisy": ["--optimizer", f"{OWN}:Noisy", "--lr_schedule", f"{SCHEDULERS}:OneCycleLR"],
}


def learn(output: Path, *words: str, ok: bool = True) -> dict[str, torch.Tensor]:
    """Train on 2 ranks; return what the last checkpoint holds."""
    argv = ["--cpu_only", "--dataset", "tests.plugins:points", "--run_name", "run"]
    argv += ["--output_dir", str(output), "--batch_size", "4", "--epochs", "2"]
    argv += ["--eval_every", "0", "--check_replicas_every", "1", "--learning_rate", "0.01"]
    finished = train([*argv, *words], 2)
    if ok:
        finished.ok()
    tensors, meta = load_checkpoint(open_checkpoint(output / "run"))
    assert meta["step"] == 10 or not ok
    return tensors


@pytest.mark.parametrize("name", slow_after(1, RUNS))
def test_a_resumed_run_and_one_with_a_fault_have_the_same_weights_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    words = [*RUNS[name], "--model", "tests.plugins:FailingOnce", "--model_args"]
    whole = learn(tmp_path / "whole", *words, "{faults: {}}")
    assert any(key.startswith("optimizer.") for key in whole)
    # Without a retry the fault ends the run after some steps; the resumed run retries another one.
    args = "{faults: {1: {9: raise}}}"
    cut = learn(tmp_path / "cut", *words, args, "--step_retry", "off", ok=False)
    assert any(not torch.equal(cut[key], whole[key]) for key in whole)
    args = "{faults: {1: {5: raise}}}"
    resumed = learn(tmp_path / "cut", *words, args, "--step_retry", "on")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)
    logs = (tmp_path / "cut/run/logs").iterdir()
    assert any("retrying step" in log.read_text() for log in logs)
