"""What reads a sum waits for the other ranks on a GPU: it must not count as this rank's work.

A mock of Tensor.tolist and float() notes the phase; on a GPU these are what waits.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hardened_ddp.gradients.sums import Marks, sum_with_marks
from hardened_ddp.guard import divergence
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import PHASE, Phase

CPU = torch.device("cpu")


def sum_marks(group: Group) -> None:
    gradient = nn.Parameter(torch.ones(2))
    mine = Marks(has_failed=False, num_samples=1, count=torch.tensor(3.0))
    assert sum_with_marks([gradient], mine, group) is not None


def compare(group: Group) -> None:
    group.world_size = 2
    assert divergence._gather_if_different(group, {"weight": torch.ones(2)}) == [{}, {}]


@pytest.mark.parametrize("act", [sum_marks, compare])
def test_a_sum_is_read_while_the_phase_is_that_of_the_sum(
    act: Callable[[Group], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(Launch(), CPU)
    group.tracker.enter(Phase.OPTIMIZER)
    seen: list[int] = []

    def noting(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_noted(tensor: torch.Tensor, *given: Any) -> Any:
            seen.append(group.tracker.words[PHASE])
            return read(tensor, *given)

        return read_noted

    monkeypatch.setattr(Group, "sum_", lambda self, tensor: tensor)
    monkeypatch.setattr(Group, "gather_json", lambda self, value: [{}, {}])
    for name in ("tolist", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
    act(group)
    assert seen[0] == Phase.ALL_REDUCE
    assert group.tracker.words[PHASE] == Phase.OPTIMIZER
