"""Reading shards: a reader that raises, dies, or begins again from its state."""

import errno
import itertools
import multiprocessing
import os
import pickle
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from hardened_ddp.data.batches import read_errors
from hardened_ddp.data.batches.batch import BadSample, Batch
from hardened_ddp.errors import LoaderError
from hardened_ddp.streams.block_reader import BlockReader
from hardened_ddp.streams.files import FileStream
from hardened_ddp.streams.formats import TextFormat
from hardened_ddp.streams.read_ahead import items_of
from tests.streams.stream_programs import Rows, StatefulRows, read_whole, shard_loader


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
    found = read_whole(shard_loader(Splitting(splits=splits), num_workers=num_workers))
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
    found = read_whole(shard_loader(Deadly(tmp_path / "flag", always=always), num_workers=1))
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
