"""Buffers that change in forward are equal on all ranks.

Those that begin to move late: the drill late-buffer.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from hardened_ddp.errors import ModelError
from hardened_ddp.guard.divergence import differing_on_many
from hardened_ddp.model.moving_buffers import MovingBuffers
from hardened_ddp.model.reach import Reach
from tests.harness.ranks import run_ranks
from tests.ranks.test_shared_sum import rendezvous


class Every(nn.Module):
    """Has buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("of_single", torch.zeros(3, 2))
        self.register_buffer("of_half", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("of_double", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("of_count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("of_negative", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("of_flag", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("of_wave", torch.zeros(2, dtype=torch.complex64))


NAMES = ["of_single", "of_half", "of_double", "of_count", "of_negative", "of_flag", "of_wave"]


class Teacher(nn.Module):
    """Has a frozen copy of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2)
        self.teacher.requires_grad_(False)


def made_equal() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Make buffers and moving parameters that differ between the ranks equal; return both."""
    group, big = rendezvous(), 2**62 + 12345  # no float holds it
    rank = group.launch.rank
    module = Every()
    values = [1.5 + rank, 0.5 * rank, 1e-20 + rank, big + rank, -7 - rank, rank == 0]
    for name, value in zip(NAMES, [*values, complex(rank, -rank)], strict=True):
        getattr(module, name).fill_(value)
    buffers = MovingBuffers(module, NAMES)
    buffers.equalize(group)  # collective
    torch.manual_seed(rank)
    teacher = Teacher()
    MovingBuffers(teacher, ["teacher.weight", "teacher.bias"]).equalize(group)  # collective
    group.close()
    return [t.clone() for t in map(buffers._now, NAMES)], teacher.teacher.state_dict()


def test_floats_become_the_mean_and_integers_and_parameters_those_of_rank_0_bit_for_bit() -> None:
    (first, weights), *others = run_ranks(made_equal, 4)
    torch.manual_seed(0)
    expected = Teacher().teacher.state_dict()
    for buffers, parameters in [(first, weights), *others]:
        assert all(map(torch.equal, buffers, first))
        assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    single, half, double, count, negative, flag, wave = first
    assert single.tolist() == [[3.0, 3.0]] * 3
    assert half.tolist() == [0.75] * 4
    assert double.tolist() == [1.5, 1.5]
    assert count.item() == 2**62 + 12345
    assert negative.tolist() == [-7, -7]
    assert flag.tolist() == [True, True]
    assert wave.tolist() == [complex(1.5, -1.5)] * 2


def test_copies_restore_the_buffers_without_a_kernel_for_each() -> None:
    module = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(20)))
    names = [name for name, _ in module.named_buffers()]
    buffers = MovingBuffers(module, names)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    copies = buffers.copies()
    assert (
        len({copy.untyped_storage().data_ptr() for copy in copies.each}) == 2
    )  # one for each dtype
    module(torch.randn(4, 2))
    assert any(not torch.equal(b, before[name]) for name, b in module.named_buffers())
    buffers.put_back(copies)
    assert all(torch.equal(b, before[name]) for name, b in module.named_buffers())


def test_a_frozen_base_that_is_much_larger_than_what_is_trained_is_not_copied() -> None:
    module = nn.Sequential(nn.Linear(30, 30).requires_grad_(False), nn.Linear(30, 2))
    assert not Reach(module).may_move()
    module = nn.Sequential(nn.Linear(30, 30).requires_grad_(False), nn.Linear(30, 30))
    assert list(Reach(module).may_move()) == ["0.weight", "0.bias"]


def compare_still(values: list[float]) -> list[str]:
    group = rendezvous()
    mine = torch.full((3,), values[group.launch.rank])
    found = differing_on_many(group, {"equal": torch.zeros(2), "mine": mine})
    group.close()
    return found


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([1.0, 2.0], ["mine"]),
        ([1.0, 1.0], []),
        ([1.0, 2.0, 3.0], ["mine"]),
        ([1.0, 1.0, 3.0], []),  # a flipped bit of rank 2: the replicas differ, nothing moves
    ],
)
def test_a_buffer_that_moves_differs_on_more_than_one_rank(
    values: list[float], found: list[str]
) -> None:
    assert run_ranks(compare_still, len(values), values) == [found] * len(values)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch will remove quantized tensors
def test_a_quantized_buffer_that_moves_is_refused_by_name() -> None:
    module = nn.Module()
    module.register_buffer("codes", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
    alone, two = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)
    buffers = MovingBuffers(module, ["codes"])
    buffers.equalize(cast(Any, alone))
    with pytest.raises(ModelError, match="the buffer codes is quantized and changes in forward"):
        buffers.equalize(cast(Any, two))
