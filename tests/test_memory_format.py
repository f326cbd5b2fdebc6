"""Channels last by measurement, and memory that is kept from step to step."""

import resource
from dataclasses import replace

import pytest
import torch
from torch import nn

from hardened_ddp.data.fetch import Batch
from hardened_ddp.model import memory_format
from hardened_ddp.model.memory_format import Trial, choose_channels_last
from hardened_ddp.model.precision import Precision
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.host_memory import keep_freed_memory
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.device import DeviceConfig
from hardened_ddp.settings.model import ModelConfig
from hardened_ddp.task.classification import Classification
from tests.ranks import run_ranks

CPU = torch.device("cpu")
MANY = 10**12
"""Samples to train: enough for any measurement."""


class Net(nn.Module):
    """A convolution with a BatchNorm; with view(), which needs the usual order, if told to."""

    def __init__(self, *, uses_view: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 3)
        self.uses_view = uses_view

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.conv(images))
        flat = features.view(len(images), -1) if self.uses_view else features.flatten(1)
        return self.head(flat)


def sample() -> Batch:
    return Batch(torch.randn(2, 3, 6, 6), torch.tensor([0, 2]), torch.arange(2))


def choose(
    model: nn.Module,
    *,
    config: Config | None = None,
    began_with: bool | None = None,
    samples: int = MANY,
    batch: Batch | None = None,
) -> bool:
    return choose_channels_last(
        Trial(model, Classification(num_classes=3), Precision("off", CPU)),
        sample() if batch is None else batch,
        Group(Launch(), CPU),
        config=Config() if config is None else config,
        began_with=began_with,
        samples_to_train=samples,
    )


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make channels last look twice as fast; the list says which forwards were timed."""
    timed: list[bool] = []

    def seconds(trial: Trial, batch: Batch) -> float:
        is_last = batch.inputs.is_contiguous(memory_format=torch.channels_last)
        assert trial.model.conv.weight.is_contiguous(memory_format=torch.channels_last) == is_last
        timed.append(is_last)
        return 0.01 if is_last else 0.02

    monkeypatch.setattr(Trial, "seconds", seconds)
    return timed


def test_a_measured_gain_decides(fast: list[bool]) -> None:
    model = Net()
    weight = model.conv.weight.clone()
    assert choose(model)
    assert fast == [False] + [False, True] * 3
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.conv.weight, weight)


def test_one_rank_without_a_gain_keeps_the_usual_order_on_all(
    fast: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other rank's gain is 1; its seconds per sample are less than ours.
    monkeypatch.setattr(Group, "gather_json", lambda group, mine: [mine, min(mine, 1.0)])
    assert not choose(Net())


def test_no_gain_keeps_the_usual_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "seconds", lambda trial, batch: 0.01)
    assert not choose(Net())


@pytest.mark.parametrize("asked", [True, False])
def test_what_was_asked_or_begun_with_is_not_measured(fast: list[bool], asked: bool) -> None:
    assert choose(Net(), config=Config(model=ModelConfig(channels_last=asked))) == asked
    assert choose(Net(), began_with=asked) == asked
    assert not fast


def test_a_run_too_short_or_to_be_reproduced_is_not_measured(fast: list[bool]) -> None:
    assert not choose(Net(), samples=1000)
    assert fast == [False]  # one forward tells how long the run will be
    fast.clear()
    assert not choose(Net(), config=Config(device=DeviceConfig(deterministic=True)))
    flat = replace(Config().model, model="mlp")
    assert not choose(nn.Linear(4, 3), config=replace(Config(), model=flat))
    assert not fast


def test_a_model_that_needs_the_usual_order_keeps_it() -> None:
    assert not choose(Net(uses_view=True))


@pytest.mark.parametrize("samples", [1, MANY])
@pytest.mark.parametrize("uses_view", [False, True])
def test_the_trial_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, uses_view: bool, samples: int
) -> None:
    monkeypatch.setattr(memory_format, "_LONGEST_S", 0.05)
    monkeypatch.setattr(memory_format, "_NEEDED_GAIN", 1e9)
    model = Net(uses_view=uses_view)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    choose(model, samples=samples)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert model.conv.weight.is_contiguous()
    assert all(parameter.grad is None for parameter in model.parameters())


def page_faults_of_a_loop(keeps: bool) -> int:
    """Ask for 64 MB, fill it, and let it go, again and again."""
    if keeps:
        assert keep_freed_memory("cpu")
    for turn in range(18):
        if turn == 6:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_memory_that_is_kept_is_not_mapped_anew() -> None:
    [usual], [kept] = (
        run_ranks(page_faults_of_a_loop, 1, False),
        run_ranks(page_faults_of_a_loop, 1, True),
    )
    assert kept < usual / 3  # seldom it is mapped anew once or twice, and not each of 12 times
