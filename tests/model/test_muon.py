"""--optimizer muon: which of two optimizers of torch updates what, and each does it unchanged."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from hardened_ddp.errors import OptimizerError
from hardened_ddp.model.muon import BY_MUON, MuonAndAdamW
from hardened_ddp.model.optimizer import build_optimizer
from hardened_ddp.model.parameter_groups import parameter_groups
from hardened_ddp.settings.config import OptimizerConfig


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
