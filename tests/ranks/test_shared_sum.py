"""The sum through shared memory: the same bits on all ranks, in any layout, and never a hang."""

import os
import time
from pathlib import Path

import pytest
import torch

from hardened_ddp.ranks.group import Group, lost_peer, open_group
from hardened_ddp.ranks.launch import read_launch
from hardened_ddp.ranks.shared_sum import CHUNK_BYTES, SharedSum, create_memory
from tests.harness.processes import HOUR_S, wait_until
from tests.harness.ranks import run_ranks
from tests.marks import slow_after

CPU = torch.device("cpu")
FLOATS = CHUNK_BYTES // 4


def rendezvous(timeout_s: float = 30, *, shared_memory: bool = True) -> Group:
    return open_group(
        read_launch(os.environ),
        device=CPU,
        backend="gloo",
        timeout_s=timeout_s,
        shared_memory=shared_memory,
    )


def numbers(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def sums_of_shapes(shared_memory: bool) -> list[torch.Tensor]:
    """Sum tensors around the size of a chunk, and some that lie oddly in memory."""
    group = rendezvous(shared_memory=shared_memory)
    assert (group.shared is not None) == shared_memory
    rank = group.launch.rank
    sizes = [1, 7, FLOATS - 8, FLOATS, 1, 2 * FLOATS + 3, 0, 5]
    tensors = [numbers(rank, size) for size in sizes]
    tensors.append(numbers(rank, 4, 3, 5, 5).to(memory_format=torch.channels_last))
    tensors.append(numbers(rank, 6, 8)[:, ::2])
    tensors.append(numbers(rank, 1)[0])
    if group.shared is not None:
        group.shared.sum_(tensors)
    else:
        group.sum_each_(tensors)
    for dtype in (torch.float64, torch.int64):
        tensors.append(group.sum_(numbers(rank, 9).mul(100).to(dtype)))
    group.close()
    return [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("world_size", slow_after(1, [3, 5]))
def test_all_ranks_get_the_sum_in_the_same_bits(world_size: int) -> None:
    ranks = run_ranks(sums_of_shapes, world_size, True)
    for other in ranks[1:]:
        for mine, its in zip(ranks[0], other, strict=True):
            assert torch.equal(mine, its)
    for shared, gloo in zip(ranks[0], run_ranks(sums_of_shapes, world_size, False)[0], strict=True):
        torch.testing.assert_close(shared, gloo)


def sum_with_changing_pace() -> float:
    """Each rank is now ahead, now behind: no place may be filled before all have read it."""
    group = rendezvous()
    total = torch.zeros(3000)
    for number in range(200):
        if number % 7 == group.launch.rank:
            time.sleep(0.002)  # this rank comes late
        mine = torch.full((3000,), float(number * (group.launch.rank + 1)))
        total += group.sum_(mine)
    group.close()
    assert torch.equal(total, total[:1].expand(3000))
    return float(total[0])


def test_a_fast_rank_never_overwrites_what_a_slow_one_still_reads() -> None:
    expected = sum(number * (1 + 2 + 3) for number in range(200))
    assert run_ranks(sum_with_changing_pace, 3) == [expected] * 3


def lose_a_rank(how: str, told: Path) -> str:
    group = rendezvous(timeout_s=1 if how == "late" else HOUR_S)
    if group.launch.rank == 1:
        if how == "closes":
            group.shared.close()
        if how == "late":
            wait_until(told.exists, 60, "what rank 0 tells")
        return ""
    with pytest.raises(RuntimeError) as caught:
        group.sum_(torch.ones(4))
    lost = lost_peer(caught.value, group)
    told.touch()
    return lost.message


@pytest.mark.parametrize(
    ("how", "says"), [("closes", "rank 1 left"), ("late", "Timed out waiting 1 s for rank 1")]
)
def test_a_rank_that_does_not_come_is_named(how: str, says: str, tmp_path: Path) -> None:
    assert says in run_ranks(lose_a_rank, 2, how, tmp_path / "told")[0]


def test_who_wrote_its_part_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1, a child, comes between two looks at it, and is gone at the second one."""
    fd = create_memory(2)
    parent, asks = os.getpid(), tmp_path / "asks"
    child = os.fork()
    if child == 0:
        shared = SharedSum(fd, rank=1, pids=[parent, os.getpid()], timeout_s=HOUR_S)
        while not asks.exists():
            time.sleep(0.001)
        shared.sum_([torch.ones(4)])
        os._exit(0)
    shared = SharedSum(fd, rank=0, pids=[parent, child], timeout_s=HOUR_S)
    os.close(fd)

    def has_left(self: SharedSum, peer: int) -> bool:
        asks.touch()
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT) is not None

    monkeypatch.setattr(SharedSum, "has_left", has_left)
    mine = torch.ones(4)
    shared.sum_([mine])
    assert mine.tolist() == [2.0] * 4
    os.waitpid(child, 0)
    shared.close()
