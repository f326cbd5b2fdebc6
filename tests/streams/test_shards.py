"""The plan of a stream, and its readers: every sample once, wherever a run begins again.

A reader may raise, die, or begin again from its state.
"""

import errno
import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from hardened_ddp.data.batches import read_errors
from hardened_ddp.data.batches.batch import BadSample, Batch
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.errors import DataError, LoaderError, SampleError
from hardened_ddp.streams import planner
from hardened_ddp.streams.block_reader import BlockReader, pack, unpack
from hardened_ddp.streams.files import FileStream
from hardened_ddp.streams.formats import TextFormat
from hardened_ddp.streams.read_ahead import items_of
from tests.streams import stream_programs as programs
from tests.streams.stream_programs import Rows, StatefulRows, merged, read_epoch, shard_loader

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
    assert sorted(itertools.chain(*merged(begun), *merged(rest))) == programs.all_ids(lengths)


def test_samples_are_what_their_numbers_say_and_shuffled_in_blocks() -> None:
    [steps] = read_epoch(lambda: Rows(RAGGED), 1)
    for _, batches, _ in steps:
        for batch in batches:
            shards, indices = batch.indices % len(RAGGED), batch.indices // len(RAGGED)
            assert torch.equal(batch.inputs.view(-1), (shards * 1000 + indices).float())
    order = [number // 7 for step in programs.ids_of(steps) for number in step if number % 7 == 5]
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
    assert sorted(itertools.chain(bad, *programs.ids_of(steps))) == programs.all_ids(lengths)


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
    order = list(itertools.chain(*programs.ids_of(read_epoch(lambda: Rows([16]), 1, **how)[0])))
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


class SomeFaulty(Rows):
    """A generator that raises at these samples of each shard: always, or so many times."""

    error: Exception = ValueError("a bad row")

    def __init__(self, bad: tuple[int, ...], times: int = 99) -> None:
        super().__init__([9, 9])
        self.bad, self.times = bad, times

    def row(self, shard: int, index: int) -> Any:
        if index in self.bad and self.times:
            self.times -= 1
            raise self.error
        return super().row(shard, index)


def block(stream: Any, shard: int, indices: range, reader: BlockReader | None = None) -> Batch:
    ids = torch.tensor([index * stream.num_shards + shard for index in indices])
    return (reader or BlockReader(stream, seed=1))[(0, ids)]


def positions(batch: Batch) -> list[int]:
    """Give the samples' positions in their shard, of two."""
    return [int(i) // 2 for i in batch.indices]


def read_blocks(stream: Any, *starts: int) -> tuple[list[int], list[int], int]:
    """Read blocks of four samples of shard 1: the positions of good and of bad ones, the end."""
    reader = BlockReader(stream, seed=1)
    batches = [block(stream, 1, range(at, at + 4), reader) for at in starts]
    good = [place for batch in batches for place in positions(batch)]
    return good, [bad.index // 2 for b in batches for bad in b.bad], batches[-1].inputs["end"]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_errors, "WAITS_S", (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("times", "error", "num_told"),
    [(1, ValueError("a bad row"), 0), (3, OSError(errno.EIO, "the disk is busy"), 3)],
)
def test_a_generator_that_raised_is_opened_anew_and_a_busy_disk_tried_again(
    times: int, error: Exception, num_told: int
) -> None:
    stream = SomeFaulty((2,), times)
    stream.error = error
    batch = block(stream, 1, range(6))
    assert positions(batch) == list(range(6))
    assert not batch.bad
    assert len(batch.troubles) == num_told
    assert len(stream.opened) == times + 1


def test_what_is_behind_an_error_of_a_generator_is_named_with_it() -> None:
    reader = BlockReader(SomeFaulty((2,)), seed=1)
    batch = block(reader.dataset, 1, range(4), reader)
    assert positions(batch) == [0, 1]
    assert [bad.index // 2 for bad in batch.bad] == [2, 3]
    assert batch.bad[0].error == "ValueError: a bad row"
    assert batch.bad[0].name == "5 (shard 1, sample 2 of it)"
    assert "sample 2 of its shard ended the reader: ValueError: a bad row" in batch.bad[1].error
    later = block(reader.dataset, 1, range(4, 8), reader)
    assert [bad.index // 2 for bad in later.bad] == [4, 5, 6, 7]
    assert later.inputs["end"] == -1, "an error must not look like the end of the shard"


class SomeFaultyCursor(SomeFaulty, StatefulRows):
    """The same as an object whose next() goes on after an error."""


class Wrapped(SomeFaulty):
    """An object around a generator: after an error it only seems to go on."""

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        return map(lambda row: row, super().open(shard, epoch=epoch, state=None))


class WithoutState(Wrapped, SomeFaultyCursor):
    """The same around what goes on, so that it does; without a state."""


class SomeFragile(SomeFaulty):
    """The same as an object around a generator, whose state goes on after an error."""

    moves = True

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        rows = super().open(shard, epoch=epoch, state=state)
        return FragileReader(self, rows, state or 0)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *itertools.product(
            [SomeFaultyCursor, WithoutState, SomeFragile], [(2, 5), (0, 1, 2), (1, 6, 7)]
        ),
        # behind a last sample that is bad a state finds the end
        (SomeFaultyCursor, (3, 8)),
        (SomeFragile, (3, 8)),
    ],
)
def test_bad_samples_lose_only_themselves(bad: tuple[int, ...], kind: type[SomeFaulty]) -> None:
    good = [place for place in range(9) if place not in bad]
    assert read_blocks(kind(bad), 0, 4, 8) == (good, list(bad), 9)


@pytest.mark.parametrize("kind", [SomeFaultyCursor, WithoutState, SomeFragile, SomeFaulty])
def test_bad_samples_before_a_resume_end_no_reader_that_went_on(kind: type[SomeFaulty]) -> None:
    batch = block(kind((1, 2, 6)), 1, range(4, 9))
    goes_on = kind is not SomeFaulty
    assert positions(batch) == ([4, 5, 7, 8] if goes_on else [])
    assert [sample.index // 2 for sample in batch.bad] == ([6] if goes_on else [4, 5, 6, 7, 8])
    if not goes_on:
        assert "sample 1 of its shard ended the reader" in batch.bad[0].error


def test_an_exception_that_is_given_is_a_bad_sample_unless_the_storage_is_gone() -> None:
    class Giving(Rows):
        bad, given = range(2, 3), ValueError("a bad row")

        def row(self, shard: int, index: int) -> Any:
            return self.given if index in self.bad else super().row(shard, index)

    batch = block(Giving([6, 6]), 1, range(6))
    assert positions(batch) == [0, 1, 3, 4, 5]
    assert [(bad.index // 2, bad.error) for bad in batch.bad] == [(2, "ValueError: a bad row")]
    assert [number // 2 for number in items_of(batch).numbers] == list(range(6))
    Giving.bad, Giving.given = range(9), OSError(errno.EIO, "the disk is gone")
    with pytest.raises(LoaderError, match="samples of one batch could not be reached"):
        block(Giving([9, 9]), 0, range(9))


def test_a_reader_begins_at_its_state_and_not_at_the_start() -> None:
    stream = StatefulRows([100, 100])
    reader = BlockReader(stream, seed=1)
    state = block(stream, 1, range(4), reader).inputs["state"]
    assert state == 4
    other = pickle.loads(pickle.dumps(reader))
    other.reader.states[1] = (0, 4, state)
    assert positions(block(stream, 1, range(8, 10), other)) == [8, 9]
    assert other.dataset.opened[-1] == (1, 0, 4)
    other.reader.states[1] = (0, 50, 50)  # beyond what is asked for: no help
    other.reader.close()
    assert positions(block(stream, 1, range(8, 10), other)) == [8, 9]
    assert other.dataset.opened[-1] == (1, 0, None)


class RefusesState(StatefulRows):
    """A state is no longer what it was: JSON has no tuples, or the user's code has changed."""

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        if state is not None:
            raise TypeError("no such state")
        return super().open(shard, epoch=epoch, state=state)


def test_a_state_that_open_refuses_costs_no_sample(caplog: pytest.LogCaptureFixture) -> None:
    reader = BlockReader(RefusesState([6, 6]), seed=1)
    reader.reader.states[1] = (0, 2, 2)
    found = block(reader.dataset, 1, range(3, 5), reader)
    assert not found.bad
    assert positions(found) == [3, 4]
    assert "shard 1 is read from its start: it can't be opened at the state" in caplog.text


def test_random_numbers_belong_to_the_sample() -> None:
    class Random(Rows):
        uses_randomness = True

        def row(self, shard: int, index: int) -> Any:
            return torch.tensor([random.random() + float(torch.rand(()))]), 0

    def read(indices: range) -> dict[int, float]:
        batch = block(Random([9, 9]), 1, indices)
        items = items_of(batch)
        values = [float(sample[0]) for sample in items.samples]
        return dict(zip(items.numbers, values, strict=True))

    whole = read(range(9))
    assert len(set(whole.values())) == 9
    assert all(whole[number] == value for number, value in read(range(5, 9)).items())


class Splitting(Rows):
    """Reads get_worker_info as most IterableDatasets do."""

    def __init__(self, *, splits: bool) -> None:
        super().__init__([12, 12])
        self.splits_by_worker = splits

    def rows(self, shard: int, epoch: int, first: int) -> Iterator[Any]:
        info = get_worker_info()
        seen = (-1, -1) if info is None else (info.id, info.num_workers)
        for _ in range(self.length(shard, epoch)):
            yield torch.tensor(seen), 0


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("splits", [False, True])
def test_user_code_sees_no_worker_or_its_shard(num_workers: int, splits: bool) -> None:
    found = programs.read_whole(shard_loader(Splitting(splits=splits), num_workers=num_workers))
    rows = torch.cat([batch.inputs for batch in found]).tolist()
    shards = torch.cat([batch.indices for batch in found]) % 2
    assert len(rows) == 24
    expected = [[int(shard), 2] if splits else [-1, -1] for shard in shards]
    assert rows == expected
    assert get_worker_info() is None


def test_without_torch_s_variable_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.utils.data._utils.worker._worker_info")
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    batch = block(Rows([6, 6]), 1, range(6))
    assert positions(batch) == list(range(6))


class Deadly(StatefulRows):
    """Its process dies at one sample: the first time, or each time; its readers can skip it."""

    def __init__(self, flag: Path, *, always: bool) -> None:
        super().__init__([40, 40])
        self.flag, self.always = flag, always

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        reader: Any = super().open(shard, epoch=epoch, state=state)
        reader.skip = lambda: setattr(reader, "index", reader.index + 1)
        return reader

    def row(self, shard: int, index: int) -> Any:
        is_due = (shard, index) == (1, 17) and multiprocessing.parent_process() is not None
        if is_due and (self.always or not self.flag.exists()):
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().row(shard, index)


@pytest.mark.parametrize("always", [False, True])
def test_a_sample_that_kills_its_worker_costs_itself_at_most(always: bool, tmp_path: Path) -> None:
    found = programs.read_whole(
        shard_loader(Deadly(tmp_path / "flag", always=always), num_workers=1)
    )
    good = [int(index) for batch in found for index in batch.indices]
    bad = [sample for batch in found for sample in batch.bad]
    assert (tmp_path / "flag").exists()
    assert [sample.name for sample in bad] == ["35 (shard 1, sample 17 of it)"] * always
    assert all("its worker was lost" in sample.error for sample in bad)
    assert sorted([*good, *(sample.index for sample in bad)]) == list(range(80))


def test_an_end_right_after_an_error_is_not_believed() -> None:
    stuck = SomeFragile((2,))
    stuck.moves = False
    for stream in (stuck, Wrapped((2,))):
        assert read_blocks(stream, 0, 4) == ([0, 1], [2, 3, 4, 5, 6, 7], -1)


class FragileReader:
    """An object around a generator that is over after an error; its state may move on then."""

    def __init__(self, stream: SomeFragile, rows: Iterator[Any], index: int) -> None:
        self.stream, self.rows, self.index = stream, rows, index

    def __iter__(self) -> "FragileReader":
        return self

    def __next__(self) -> Any:
        self.index += self.stream.moves
        row = next(self.rows)
        self.index += not self.stream.moves
        return row

    def state_dict(self) -> int:
        return self.index


def test_lines_that_kill_are_passed_over_by_the_files_own_readers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{number}\n" for number in range(6)))
    stream = FileStream([str(tmp_path / "a.txt")], TextFormat(0), num_shards=1, change=int)
    reader = BlockReader(stream, seed=1)
    reader.pass_over(0, 2, "its worker was lost")
    batch = block(stream, 0, range(8), reader)
    assert [one for one in items_of(batch).samples if not isinstance(one, BadSample)] == [
        *(0, 1, 3, 4, 5)
    ]
    assert [bad.error for bad in batch.bad] == ["SampleError: [DDP-D02] its worker was lost"]
    assert batch.inputs["end"] == 6
