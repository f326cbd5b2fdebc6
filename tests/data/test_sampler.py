"""The order of an epoch, and how ranks share it: every sample once, on any number of ranks."""

import time
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from hardened_ddp.data.batches.permutation import permute
from hardened_ddp.data.batches.sampler import (
    MAX_KEPT_ORDER,
    EpochOrder,
    Window,
    WindowSampler,
    share_of,
    split_evenly,
)

LARGE = MAX_KEPT_ORDER + 4099  # odd, and a keyed permutation


def make_sampler(size: int, *, world_size: int = 1, **how: Any) -> WindowSampler:
    given = {"rank": 0, "global_batch": 8, "seed": 3, "batch_size": 4, **how}
    return WindowSampler(range(size), num_replicas=world_size, **given)  # its length is used


def global_order(size: int, world_sizes: list[int], **how: object) -> list[int]:
    """Run an epoch in which each step has another world size; return what it took, in order."""
    taken: list[int] = []
    cursor = step = 0
    end = make_sampler(size, **how).end
    while cursor < end:
        world_size = world_sizes[step % len(world_sizes)]
        how["world_size"] = world_size
        ranks = [make_sampler(size, rank=rank, **how) for rank in range(world_size)]
        window = next(ranks[0].windows(cursor))
        for sampler in ranks:
            for indices in sampler.micro_batches(window):
                taken += indices.tolist()
        cursor, step = window.stop, step + 1
    return taken


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 65, 257, 1000, 4097, LARGE])
def test_an_order_has_every_sample_once(size: int) -> None:
    order = EpochOrder(size, seed=1, epoch=2).take(0, size)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(size))
    computed = permute(np.arange(size, dtype=np.uint64), num_samples=size, keys=[99])
    assert sorted(computed.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1000, LARGE])
def test_an_order_depends_on_seed_and_epoch_and_on_nothing_else(size: int) -> None:
    first = EpochOrder(size, seed=1, epoch=2).take(0, 500)
    torch.manual_seed(7)
    assert torch.equal(EpochOrder(size, seed=1, epoch=2).take(0, 500), first)
    for seed, epoch in ((1, 3), (2, 2), (2, 1)):
        other = EpochOrder(size, seed=seed, epoch=epoch).take(0, 500)
        assert (other == first).float().mean() < 0.05


def test_an_order_stays_the_same_over_versions() -> None:
    # WHY pinned: a resumed run must go on in the order that it began with.
    order = EpochOrder(10, seed=0, epoch=0).take(0, 10)
    assert order.tolist() == [2, 9, 0, 7, 3, 4, 5, 8, 6, 1]
    assert EpochOrder(10**9, 0, 0).take(0, 3).tolist() == [220888298, 4419216, 831747538]


def test_a_billion_samples_cost_no_time_and_no_memory() -> None:
    start = time.process_time()
    order = EpochOrder(10**9, seed=0, epoch=0)
    found = order.take(10**9 - 64, 10**9)
    # The whole permutation would take 10 s and 8 GB.
    assert time.process_time() - start < 1.0
    assert len(set(found.tolist())) == 64
    assert 0 <= int(found.min()) <= int(found.max()) < 10**9


def test_shares_and_parts_are_near_equal_and_no_part_is_empty() -> None:
    for size, shares in ((7, [(0, 3), (3, 5), (5, 7)]), (2, [(0, 1), (1, 2), (2, 2)])):
        assert [share_of(size, rank=rank, world_size=3) for rank in range(3)] == shares
    assert split_evenly(0, 4) == split_evenly(0, 0) == []
    assert split_evenly(4, 1) == [(0, 4)]
    assert split_evenly(5, 2) == [(0, 3), (3, 5)]
    assert split_evenly(2, 3) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("size", [1, 3, 5, 8, 61, 1000])
def test_any_number_of_ranks_takes_the_order_of_one(size: int) -> None:
    alone = global_order(size, [1])
    assert sorted(alone) == list(range(size))
    assert alone == EpochOrder(size, seed=3, epoch=0).take(0, size).tolist()
    for world_sizes in ([2], [3], [4], [4, 4, 2, 3]):
        assert global_order(size, world_sizes) == alone


@pytest.mark.parametrize("cursor", [0, 1, 8, 13, 60, 61])
def test_an_epoch_can_start_at_any_cursor(cursor: int) -> None:
    sampler = make_sampler(61)
    parts = [part for window in sampler.windows(cursor) for part in sampler.micro_batches(window)]
    taken = [index for part in parts for index in part.tolist()]
    assert taken == EpochOrder(61, seed=3, epoch=0).take(cursor, 61).tolist()


@pytest.mark.parametrize("size", [5, 61, 64])
@pytest.mark.parametrize("drop_last", [False, True])
def test_it_is_a_distributed_sampler_to_its_users(size: int, drop_last: bool) -> None:
    how = {"world_size": 3, "drop_last": drop_last}
    samplers = [make_sampler(size, rank=rank, **how) for rank in range(3)]
    for epoch in (0, 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in samplers]
        assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
        together = sorted(index for part in parts for index in part)
        assert len(together) == len(set(together)) == samplers[0].end
    assert isinstance(samplers[0], torch.utils.data.DistributedSampler)
    assert parts[0] != list(make_sampler(size, world_size=3, drop_last=drop_last))


def test_drop_last_leaves_out_the_short_last_window_only() -> None:
    sampler = make_sampler(61, drop_last=True)
    assert [window.size for window in sampler.windows()] == [8] * 7
    assert (sampler.num_windows, sampler.end) == (7, 56)
    # From a cursor that no window begins at, the windows still end where the epoch ends.
    assert list(sampler.windows(50)) == [Window(0, 50, 6)]
    alone = make_sampler(5, drop_last=True)  # the only window is kept
    assert [window.size for window in alone.windows()] == [5]


def test_two_epochs_can_be_read_at_the_same_time() -> None:
    sampler = make_sampler(40)
    mixed = [sampler.order(epoch).take(0, 5).tolist() for epoch in (0, 1, 0, 1)]
    assert mixed[0] == mixed[2] != mixed[1] == mixed[3]
    first, _ = sampler.order(0), sampler.order(1)
    assert sampler.order(0) is first  # workers read ahead while an epoch ends


@pytest.mark.parametrize("size", [1, 6000, 8193, MAX_KEPT_ORDER, LARGE])
@pytest.mark.parametrize(("world_size", "drop_last"), [(64, False), (4096, True)])
def test_of_many_each_rank_takes_its_share(size: int, world_size: int, drop_last: bool) -> None:
    global_batch = 32 * world_size
    for rank in (0, world_size // 2, world_size - 1):
        how = {"global_batch": global_batch, "batch_size": 8, "drop_last": drop_last}
        sampler = make_sampler(size, rank=rank, world_size=world_size, **how)
        windows = [*sampler.windows_of(0, min(13, size - 1)), *sampler.windows_of(1)]
        # at the end a step is taken again, as after a fault
        for window in [*windows, *sampler.windows_of(2), windows[0]]:
            start, stop = share_of(window.size, rank=rank, world_size=world_size)
            taken = [index for part in sampler.micro_batches(window) for index in part.tolist()]
            whole = whole_order(size, window.epoch)
            assert taken == whole[window.start + start : window.start + stop].tolist()


@cache
def whole_order(size: int, epoch: int) -> torch.Tensor:
    return EpochOrder(size, seed=3, epoch=epoch).take(0, size)
