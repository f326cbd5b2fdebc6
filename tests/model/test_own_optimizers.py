"""Optimizers, schedules and parameter groups: the user's, resumed bit for bit or refused; built in.

Muon: which of two optimizers of torch updates what, and each does it unchanged. fp16's scaler: a
step that is left out on the device, and what is taken back of it.
"""

import json
import logging
import math
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.errors import OptimizerError
from hardened_ddp.model import optimizer as optimizers
from hardened_ddp.model import precision
from hardened_ddp.model import schedule as schedules
from hardened_ddp.model.muon import BY_MUON, MuonAndAdamW
from hardened_ddp.model.optimizer import build_optimizer, parameter_groups
from hardened_ddp.model.precision import Precision, clip
from hardened_ddp.model.schedule import Schedule, restore_state
from hardened_ddp.model.state_tree import pack, unpack
from hardened_ddp.preflight.optimizer_trial import build_optimizer_and_schedule
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.settings.config import ImportPath, OptimizerConfig, OptimizerName
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
SCHEDULES = sections(Path(__file__).with_name("schedules.txt"))
"""By import path: their arguments."""


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
    args = json.loads(SCHEDULES.get(scheduler, "{}"))
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
    tensors, rest = schedules.save_state(schedule, names)
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


OPTIMIZERS = get_args(OptimizerName)
# Those whose state is made before the first step.
FOUND = {n: optimizers.find_optimizer(OptimizerConfig(optimizer=n))[0] for n in OPTIMIZERS}
FUSED = [name for name, found in FOUND.items() if found in schedules.KNOWN]


def curve(schedule: str, *, warmup_steps: int = 0) -> list[float]:
    config = OptimizerConfig(warmup_steps=warmup_steps)
    config = replace(config, lr_schedule=schedule)  # type: ignore[arg-type]  # a choice
    return [schedules.learning_rate(config, 1.0, step=n, total_steps=12) for n in range(12)]


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
            optimizers.allocate_state(optimizer)
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
    own = ImportPath("tests.model.test_own_optimizers:OtherAdamW")
    others = [(own, {"fused": True}), ("adamw", {"fused": False}), ("adamw", {"foreach": True})]
    others += [(ImportPath("torch.optim:RAdam"), {})]
    for optimizer, args in [*((name, {}) for name in FUSED), *others]:
        config = OptimizerConfig(optimizer=optimizer, optimizer_args=args)
        skips = optimizers.skips_by_flag(build_optimizer([{"params": [weight]}], config))
        assert skips == ((optimizer, args) not in others), optimizer
    other = torch.optim.RMSprop([weight])
    optimizers.allocate_state(other)
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
    saved = {f"{schedules.PREFIX}scale.{key}": torch.tensor(3.0) for key in ("step", "exp_avg")}
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


def build_muon(model: nn.Module, **arguments: Any) -> tuple[list[dict[str, Any]], MuonAndAdamW]:
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
    groups, _ = build_muon(model)
    assert by_muon(model, groups) == ["first.weight", "second.weight"]
    assert "muon updates first.weight, second.weight; adamw words.weight, mixed" in caplog.text
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert by_muon(plain, build_muon(plain)[0]) == ["0.weight"]  # not the output layer


def test_patterns_of_names_win_over_the_rule() -> None:
    model = Tiny()
    groups, _ = build_muon(model, muon=["words.*"], adamw=["second*"])
    assert by_muon(model, groups) == ["words.weight", "first.weight"]
    with pytest.raises(OptimizerError, match=r"muon would update mixed\.weight"):
        build_muon(model, muon=["mixed.weight"])
    for odd in ("third", 5):
        with pytest.raises(OptimizerError, match=f"adamw has {odd!r}, which no parameter is"):
            build_muon(model, adamw=odd)
    with pytest.raises(OptimizerError, match="muon would update nothing"):
        build_muon(nn.Linear(3, 2))


def test_each_parameter_is_updated_as_by_torchs_own_optimizer() -> None:
    torch.manual_seed(0)
    model, other = Tiny(), Tiny()
    other.load_state_dict(model.state_dict())
    _, optimizer = build_muon(model, momentum=0.9, betas=[0.8, 0.9])
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
