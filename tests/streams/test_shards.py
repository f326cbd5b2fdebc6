"""The plan of a stream: every sample once, whoever reads it, wherever a run begins again."""

import itertools
import json
import random
from contextlib import closing
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.errors import DataError, SampleError
from hardened_ddp.streams import planner
from hardened_ddp.streams.block_reader import pack, unpack
from tests.streams.stream_programs import Rows, all_ids, ids_of, merged, read_epoch, shard_loader

RAGGED = [5, 0, 13, 8, 1, 21, 7]
SEEDS = range(100)


def drawn(seed: int) -> tuple[random.Random, list[int]]:
    """Draw the lengths of one to nine shards, of which some are empty; give the source, too."""
    chance = random.Random(seed)
    return chance, [max(0, chance.randint(-9, 30)) for _ in range(chance.randint(1, 9))]


def play(lengths: list[int], size: int, *, knows: bool) -> list[list[tuple[int, int]]]:
    """Deal an epoch by the plan alone; give the samples (shard, index) of each step."""
    real = np.array(lengths)
    facts = planner.StreamPosition.at_start(
        0, real if knows else np.full(len(lengths), planner.UNKNOWN)
    )
    order, steps = planner.shard_order(3, 0, len(lengths)), []
    ahead, dealer = facts, planner.StreamPlanner(order, size, at_once=5 * size)
    while not facts.is_over:
        turns = planner.deal(facts, order, size)
        pairs = zip(turns.shards.tolist(), turns.indices.tolist(), strict=True)
        assert list(pairs) == one_by_one(facts, order, size)
        for one, other in zip(astuple(turns), astuple(dealer.next(ahead).turns), strict=True):
            assert np.array_equal(one, other)
        met = np.full(len(lengths), planner.UNKNOWN)
        dry = turns.shards[turns.indices >= real[turns.shards]]
        met[dry] = real[dry]
        ahead, _ = planner.settle(ahead, turns, met)
        facts, is_real = planner.settle(facts, turns, met)
        facts = planner.StreamPosition.from_json(json.loads(json.dumps(facts.as_json())))
        pairs = zip(turns.shards[is_real].tolist(), turns.indices[is_real].tolist(), strict=True)
        steps.append(list(pairs))
    return steps


def one_by_one(facts: planner.StreamPosition, order: Any, size: int) -> list[tuple[int, int]]:
    """Deal the next turns as planner.deal() does, one after the other."""
    at, ends, place, turns = facts.taken.tolist(), facts.ends.tolist(), facts.place, []
    left = sum(end - n for n, end in zip(at, ends, strict=True)) if min(ends) >= 0 else size
    while len(turns) < min(size, left):
        shard = int(order[place % len(order)])
        place += 1
        if ends[shard] < 0 or at[shard] < ends[shard]:
            turns.append((shard, at[shard]))
            at[shard] += 1
    return turns


@pytest.mark.parametrize("knows", [False, True])
def test_the_plan_takes_each_sample_once(knows: bool) -> None:
    for seed in SEEDS:
        chance, lengths = drawn(seed)
        size = chance.randint(1, 40)
        steps = play(lengths, size, knows=knows)
        taken = list(itertools.chain(*steps))
        expected = [(shard, index) for shard, n in enumerate(lengths) for index in range(n)]
        assert sorted(taken) == expected
        for shard in range(len(lengths)):
            own = [index for s, index in taken if s == shard]
            assert own == sorted(own)
        if knows:
            assert all(len(step) == size for step in steps[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_goes_on_elsewhere_takes_the_same_samples(seed: int) -> None:
    chance, lengths = drawn(seed)
    lengths[0] += 1
    says = bool(seed % 2)
    how = {"global_batch": chance.randint(1, 12), "shuffle_block": chance.randint(1, 5)}
    starts = [(chance.randint(1, 4), chance.randint(1, 6)) for _ in range(chance.randint(1, 4))]

    def make() -> Rows:
        return Rows(lengths, says=lengths if says else None)

    expected = merged(read_epoch(make, 1, **how))
    found: list[list[int]] = []
    facts: dict[str, Any] | None = None
    for world_size, most in [*starts, (2, 1_000_000)]:
        ranks = read_epoch(make, world_size, facts=facts, most=most, **how)
        found += merged(ranks)
        if ranks[0]:
            facts = json.loads(json.dumps(ranks[0][-1][2]))
    assert found == expected
    begun = read_epoch(make, 2, most=1, **how)
    how["global_batch"] = 11
    rest = read_epoch(make, 3, facts=begun[0][-1][2], **how)
    assert sorted(itertools.chain(*merged(begun), *merged(rest))) == all_ids(lengths)


def test_samples_are_what_their_numbers_say_and_shuffled_in_blocks() -> None:
    [steps] = read_epoch(lambda: Rows(RAGGED), 1)
    for _, batches, _ in steps:
        for batch in batches:
            shards, indices = batch.indices % len(RAGGED), batch.indices // len(RAGGED)
            assert torch.equal(batch.inputs.view(-1), (shards * 1000 + indices).float())
    order = [number // 7 for step in ids_of(steps) for number in step if number % 7 == 5]
    assert order != sorted(order)
    assert [sorted(order[i : i + 4]) for i in range(0, 21, 4)] == [
        list(range(i, min(21, i + 4))) for i in range(0, 21, 4)
    ]


def test_the_end_is_known_with_the_last_step_and_then_the_length_of_the_run() -> None:
    loader = shard_loader(Rows(RAGGED), epochs=3)
    sampler, ends = loader.sampler, []
    for window, _ in loader.windows(0, 0, 5):
        ends.append((window.stop, sampler.end))
    assert all(end > 10**9 for _, end in ends[:-1])
    assert ends[-1] == (sum(RAGGED), sum(RAGGED))
    per_epoch = -(-sum(RAGGED) // 8)
    assert sampler.length is not None
    assert sampler.length.total == 5 + len(ends) + 2 * per_epoch
    later = list(loader.windows(1, 0, 5 + len(ends)))
    assert [window.size for window, _ in later] == [8] * (per_epoch - 1) + [sum(RAGGED) % 8 or 8]
    assert sampler.end == sum(RAGGED)


def test_an_epoch_that_is_over_has_no_step_left_and_drop_last_drops_the_short_one() -> None:
    loader = shard_loader(Rows(RAGGED))
    steps = [window for window, _ in loader.windows(0, 0)]
    saved = loader.sampler.as_json(0, steps[-1].stop)
    again = shard_loader(Rows(RAGGED))
    again.sampler.restore(saved, epoch=0, cursor=sum(RAGGED))
    assert again.sampler.end == sum(RAGGED)
    assert not list(again.windows(0, sum(RAGGED)))
    assert len(list(again.windows(1, 0))) == -(-sum(RAGGED) // 8)
    loader = shard_loader(Rows(RAGGED, says=RAGGED), drop_last=True)  # without the short step
    steps = [window for window, _ in loader.windows(0, 0)]
    assert [window.size for window in steps] == [8] * (sum(RAGGED) // 8)
    assert (loader.sampler.end, loader.sampler.num_windows) == (steps[-1].stop, len(steps))


class Raising(Rows):
    """A stream of generators, one of which raises."""

    def row(self, shard: int, index: int) -> Any:
        if (shard, index) == (1, 5):
            raise ValueError("broken")
        return super().row(shard, index)


@pytest.mark.parametrize("shuffle_block", [1, 4])
def test_the_rest_of_a_shard_behind_an_error_ends_where_its_size_says(shuffle_block: int) -> None:
    lengths = [9, 12, 8]
    [steps] = read_epoch(lambda: Raising(lengths, says=lengths), 1, shuffle_block=shuffle_block)
    bad = [sample.index for _, batches, _ in steps for batch in batches for sample in batch.bad]
    assert sorted(bad) == [1 + 3 * index for index in range(5, 12)]
    assert sorted(itertools.chain(bad, *ids_of(steps))) == all_ids(lengths)


@pytest.mark.parametrize("at_once", [1, 16])
def test_steps_before_a_bad_batch_are_done(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assemble, found = Fetcher.assemble, []

    def failing(self: Fetcher, epoch: int, samples: Any, numbers: Any) -> Batch:
        if 10 in numbers:
            raise SampleError("sample 10 fits no batch", fix="")
        return assemble(self, epoch, samples, numbers)

    def read() -> None:
        for window, _ in loader.windows(0, 0):
            found.append(window.start)

    monkeypatch.setattr("hardened_ddp.streams.stream_batches._AT_ONCE", at_once)
    how = {"global_batch": 1, "shuffle_block": 16}
    order = list(itertools.chain(*ids_of(read_epoch(lambda: Rows([16]), 1, **how)[0])))
    loader = shard_loader(Rows([16], says=[16]), **how)
    monkeypatch.setattr(Fetcher, "assemble", failing)
    with pytest.raises(SampleError, match="fits no batch"):
        read()
    assert found == list(range(order.index(10)))


class Growing(Rows):
    """A stream whose shards are longer in the second epoch."""

    def length(self, shard: int, epoch: int) -> int:
        return self.lengths[shard] + (shard == 2) * epoch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_of_another_length_in_the_second_epoch_is_told(num_workers: int) -> None:
    with closing(shard_loader(Growing([4, 4, 4]), num_workers=num_workers)) as loader:
        list(loader.windows(0, 0))
        with pytest.raises(DataError, match="5 samples in epoch 1, and not 4 as in the"):
            list(loader.windows(1, 0))


@pytest.mark.parametrize("says", [[4, 3, 4], [4, 5, 4]])
def test_sizes_that_are_wrong_are_told(says: list[int]) -> None:
    loader = shard_loader(Rows([4, 4, 4], says=says))
    with pytest.raises(DataError, match=r"shard 1 of the stream has .*4 samples .* sizes say"):
        list(loader.windows(0, 0))


@pytest.mark.parametrize(
    "samples",
    [
        [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])],
        [torch.arange(3), torch.arange(5), torch.arange(0)],
        [(torch.ones(2), 1), (torch.zeros(2), 0)],
        [{"a": torch.ones(2), "b": "text"}, {"a": torch.zeros(3), "b": "more"}],
        [[1, torch.ones(1)], [2, torch.ones(1)]],
        [(), ()],
        [None, torch.ones(1)],
        [{"a": 1}, {"b": 2}],
        [torch.ones(1), torch.ones(1, dtype=torch.int64)],
        [np.ones(2), np.zeros(2)],
        [],
    ],
)
def test_what_is_packed_comes_out_as_it_was(samples: list[Any]) -> None:
    found = unpack(pack(samples), len(samples))
    assert repr(found) == repr(samples)


def test_sample_batches_differ_between_ranks_and_leave_no_trace() -> None:
    for world_size, lengths in ((1, [3]), (2, RAGGED), (3, [9, 9])):
        seen = []
        for rank in range(world_size):
            loader = shard_loader(Rows(lengths), rank=rank, world_size=world_size)
            batches = loader.sample_batches(torch.device("cpu"))
            seen += [int(i) for batch in batches for i in batch.indices]
            assert 1 <= len(batches) <= 2
        assert len(seen) == len(set(seen)) > 0
    for rank in (0, 1):  # of which one has empty shards only
        loader = shard_loader(Rows([0, 20] * 12), rank=rank, world_size=2)
        assert len(loader.sample_batches(torch.device("cpu"))) == 2
