"""Streams of files and of other libraries: every line, row and member once, from any state."""

import gzip
import io
import itertools
import json
import pickle
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import DataError
from hardened_ddp.settings.config import DataConfig
from hardened_ddp.streams.adapters import HubStream, adapt
from hardened_ddp.streams.contract import changes, digests_of
from hardened_ddp.streams.formats import open_files
from hardened_ddp.streams.views import StreamInOrder, StreamView
from tests.streams.stream_programs import all_ids, merged, read_epoch


def read_all(stream: Any, *, again_at: int = -1) -> list[list[Any]]:
    """Read each shard; at one position go on with a reader opened from the state there."""
    found = []
    for shard in range(stream.num_shards):
        reader, samples = stream.open(shard, epoch=0, state=None), []
        while True:
            if len(samples) == again_at:
                state = json.loads(json.dumps(reader.state_dict()))
                reader = pickle.loads(pickle.dumps(stream)).open(shard, epoch=0, state=state)
            try:
                samples.append(next(reader))
            except StopIteration:
                break
        found.append(samples)
    return found


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("".join(f"a{i} {'x' * (i % 7)}\n" for i in range(53)))
    (tmp_path / "b.txt").write_text("b0\r\n\nb2\nlast line without an end")
    (tmp_path / "c.txt").write_text("")
    return tmp_path


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 64])
def test_each_line_is_read_once_however_files_are_cut(texts: Path, num_shards: int) -> None:
    stream = open_files(f"text:{texts}/*.txt", train=True, num_shards=num_shards)
    assert stream is not None
    assert stream.num_shards == num_shards
    found = read_all(stream)
    lines = [f"a{i} {'x' * (i % 7)}" for i in range(53)] + ["b0", "", "b2"]
    assert sorted(itertools.chain(*found)) == sorted([*lines, "last line without an end"])
    assert stream.sizes == [len(samples) for samples in found]
    for position in (0, 1, 4):
        assert read_all(stream, again_at=position) == found


def test_a_line_that_is_no_text_and_a_transform_that_raises_are_bad_samples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"1\n\xff\xfe\nx\n4\n")
    stream = open_files(
        f"text:{tmp_path}/a.txt", train=True, num_shards=1, transform="tests.plugins:number"
    )
    [found] = read_all(stream)
    assert [type(sample) for sample in found] == [int, UnicodeDecodeError, ValueError, int]


def test_a_parquet_row_is_read_once_and_a_state_is_its_number(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for name, size in (("a", 37), ("b", 5)):
        table = pyarrow.table(
            {"x": [[float(i), 1.0] for i in range(size)], "label": list(range(size))}
        )
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=8)
    stream = open_files(f"parquet:{tmp_path}/*.parquet", train=True, num_shards=6, num_classes=37)
    assert stream is not None
    found = read_all(stream)
    assert stream.sizes == [len(samples) for samples in found]
    rows = sorted((float(x[0]), label) for x, label in itertools.chain(*found))
    assert rows == sorted([(float(i), i) for size in (37, 5) for i in range(size)])
    assert repr(read_all(stream, again_at=3)) == repr(found)
    (tmp_path / "c.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"c\.parquet can't be read as parquet"):
        open_files(f"parquet:{tmp_path}/*.parquet", train=True)


def test_lists_that_are_empty_ragged_or_have_a_null_lose_no_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    cells = [[1, 2], [], [3, None], [None], None]
    table = pyarrow.table(
        {
            "whole": pyarrow.array(cells, pyarrow.list_(pyarrow.int32())),
            "real": pyarrow.array(
                [[0.5], [], [1.5], [], []], pyarrow.large_list(pyarrow.float64())
            ),
            "nested": [[[1], [2]], [[1, 2], [3]], [], [[4]], [[5]]],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    stream = open_files(f"parquet:{tmp_path}/a.parquet", train=True, num_shards=1)
    [rows] = read_all(stream)
    assert repr([row["whole"] for row in rows]) == repr(
        [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), *cells[2:]]
    )
    assert [len(row["real"]) for row in rows] == [1, 0, 1, 0, 0]
    assert {row["real"].dtype for row in rows} == {torch.float32}
    assert [rows[1]["nested"], rows[2]["nested"]] == [[[1, 2], [3]], []]


def write_tar(path: Path, samples: int, *, broken: int = -1) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(samples):
            raw = io.BytesIO()
            np.save(raw, np.full(3, number, dtype=np.float32))
            content = b"cut off" if number == broken else raw.getvalue()
            label = str(number % 2).encode()
            long = "f" * 120 if number == 2 else "f"  # a name that needs a header of its own
            for ending, data in (("npy", content), ("cls", label)):
                member = tarfile.TarInfo(f"{long}/{number:04d}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def test_members_of_a_tar_are_one_sample_and_a_broken_one_is_bad(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", 9, broken=5)
    write_tar(tmp_path / "b.tar", 4)
    stream = open_files(f"tar:{tmp_path}/*.tar", train=True, num_classes=2)
    assert stream is not None
    assert stream.num_shards == 2
    found = read_all(stream)
    assert stream.sizes == [9, 4] == [len(samples) for samples in found]
    assert isinstance(found[0].pop(5), ValueError)
    assert [(float(x[0]), y) for x, y in found[0]] == [
        (float(i), i % 2) for i in range(9) if i != 5
    ]
    for position in (1, 2, 3, 7):
        again = read_all(stream, again_at=position)
        again[0].pop(5)
        assert repr(again) == repr(found)


def test_no_file_a_packed_one_and_a_wrong_number_of_shards_are_told(texts: Path) -> None:
    with pytest.raises(DataError, match="no file matches"):
        open_files(f"text:{texts}/*.md", train=True)
    with pytest.raises(DataError, match="num_shards is 0"):
        open_files(f"text:{texts}/*.txt", train=True, num_shards=0)
    with pytest.raises(DataError, match=r"columns: --dataset text: has none"):
        open_files(f"text:{texts}/*.txt", train=True, columns=["x"])
    with gzip.open(texts / "b.txt.gz", "wt") as file:
        file.write("packed\n" * 9)
    with pytest.raises(DataError, match=r"b\.txt\.gz is compressed"):
        open_files(f"text:{texts}/*", train=True)


def test_a_file_that_changed_is_named(texts: Path) -> None:
    stream = open_files(f"text:{texts}/*.txt", train=True)
    before = digests_of(stream)
    (texts / "a.txt").write_text((texts / "a.txt").read_text().replace("a7", "A7"))
    (texts / "b.txt").write_text("more\n" * 9)
    (texts / "c.txt").rename(texts / "d.txt")
    stream = open_files(f"text:{texts}/*.txt", train=True)
    assert changes(before, digests_of(stream)) == [
        "a.txt has changed",
        "b.txt has changed",
        "c.txt is missing",
        "d.txt is new",
    ]


class Numbers(IterableDataset[Any]):
    """As found in the wild: splits by worker, and has a state."""

    num_classes = 2

    def __init__(self, count: int, num_shards: int | None = None) -> None:
        self.count, self.at = count, 0
        if num_shards is not None:
            self.num_shards = num_shards

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = range(first, self.count, step)
        while self.at < len(numbers):
            self.at += 1
            yield torch.tensor([float(numbers[self.at - 1])]), self.at % 2

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Plain(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([float(i)]), i % 2) for i in range(40))


@pytest.mark.parametrize("num_shards", [None, 5])
def test_a_torch_dataset_is_split_as_it_splits_itself(num_shards: int | None) -> None:
    stream = adapt(Numbers(40, num_shards), "numbers")
    assert stream.num_shards == (num_shards or 1)
    found = read_all(stream)
    if num_shards is None:
        assert sorted(float(x) for x, _ in itertools.chain(*found)) == list(range(40))
    assert repr(read_all(stream, again_at=3)) == repr(found)
    for world_size in (1, 3):
        ranks = read_epoch(lambda: adapt(Numbers(40, num_shards), "numbers"), world_size)
        rows = [
            float(x)
            for steps in ranks
            for _, batches, _ in steps
            for b in batches
            for x in b.inputs
        ]
        assert sorted(rows) == list(range(40))


class Sized(Plain):
    def __len__(self) -> int:
        return 40


def test_a_plain_dataset_is_read_by_all_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert list(getattr(adapt(Sized(), "sized"), "sizes", ())) == [40]  # its __getitem__ raises
    ranks = read_epoch(lambda: adapt(Plain(), "plain"), 2)
    assert sorted(itertools.chain(*merged(ranks))) == list(range(40))
    assert "has no state_dict() and load_state_dict(): a resume in mid-epoch reads" in caplog.text


class Locked(Numbers):
    def __init__(self, size: int, num_shards: int | None) -> None:
        super().__init__(size, num_shards)
        self.lock = threading.Lock()


def test_a_dataset_that_can_not_be_copied_is_read_if_it_is_one_shard() -> None:
    stream = adapt(Locked(40, None), "locked")
    for _ in range(2):
        rows = stream.open(0, epoch=0, state=None)
        assert sorted(float(x) for x, _ in rows) == list(range(40))
    with pytest.raises(DataError, match=r"Locked can't be copied .*lock.*: see its lock"):
        adapt(Locked(40, 5), "locked")


def test_a_test_set_counts_what_it_does_not_say() -> None:
    stream = adapt(Numbers(40, 3), "numbers")
    data = StreamInOrder(stream, "numbers")
    assert len(data) == 40
    assert sorted(float(data[i][0]) for i in range(40)) == list(range(40))
    assert data.name_of_sample(39) == "shard 2, sample 12 of it"
    assert float(StreamView(stream)[4][0]) == 4.0


def test_shards_without_a_sample_may_come_first(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    config = DataConfig(
        dataset=f"text:{tmp_path}/*.txt",
        dataset_args={"num_classes": 9, "transform": "tests.plugins:length_of"},
    )
    with pytest.raises(DataError, match="no training sample: each of its 64 shards is empty"):
        build_data(config)
    (tmp_path / "b.txt").write_text("a line\n" * 40)
    data = build_data(config)
    assert data.input_shape == (1,)


class TestHuggingFace:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        pytest.importorskip("datasets")
        for number, size in enumerate((30, 11, 25)):
            lines = [{"x": [number, i], "label": i % 2} for i in range(size)]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (tmp_path / "rows").mkdir(exist_ok=True)
            (tmp_path / "rows" / f"train-{number}.jsonl").write_text(text)
        return tmp_path / "rows"

    def rows(self, folder: Path) -> Any:
        import datasets

        cache = str(folder.parent / "cache")
        return datasets.load_dataset(str(folder), split="train", streaming=True, cache_dir=cache)

    def config(self, folder: Path, **more: Any) -> DataConfig:
        return DataConfig(
            dataset=f"hf:{folder}",
            streaming=True,
            data_dir=str(folder.parent / "cache"),
            dataset_args={"num_classes": 2, **more},
        )

    def test_each_row_once_on_any_ranks_and_after_a_resume(self, folder: Path) -> None:
        data = build_data(self.config(folder))
        assert isinstance(data.train, StreamView)
        stream = data.train.stream
        assert stream.num_shards == 3
        found = read_all(stream)
        assert sorted(map(len, found)) == [11, 25, 30]
        assert repr(read_all(stream, again_at=4)) == repr(found)
        steps = merged(read_epoch(lambda: stream, 3))
        assert sorted(itertools.chain(*steps)) == all_ids([len(samples) for samples in found])

    def test_a_shuffle_buffer_and_a_split_are_refused(self, folder: Path) -> None:
        import datasets
        from datasets.distributed import split_dataset_by_node

        rows = self.rows(folder)
        mapped = rows.shuffle(seed=1, buffer_size=8).map(lambda row: row)
        joined = datasets.interleave_datasets([rows, mapped])
        for shuffled in (rows.shuffle(seed=1, buffer_size=8), mapped, joined):
            with pytest.raises(DataError, match="lost or repeated when a run resumes") as refused:
                HubStream(shuffled, name="rows")
            assert "--shuffle_block" in refused.value.fix
        with pytest.raises(DataError, match="split_dataset_by_node"):
            HubStream(split_dataset_by_node(rows, 0, 2), name="rows")

    def test_what_save_to_disk_wrote_is_a_stream_too(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_dict({"x": [[float(i)] for i in range(50)], "label": [0] * 50})
        rows.save_to_disk(str(tmp_path / "saved"))
        data = build_data(self.config(tmp_path / "saved", num_shards=4))
        assert isinstance(data.train, StreamView)
        found = read_all(data.train.stream)
        assert sorted(float(x) for x, _ in itertools.chain(*found)) == list(range(50))

    def test_random_interleaving_gives_the_same_rows_in_each_epoch(self, folder: Path) -> None:
        import datasets

        rows = self.rows(folder)
        few = rows.filter(lambda row: row["x"][1] < 9)
        how = {"seed": 3, "stopping_strategy": "all_exhausted"}
        stream = HubStream(
            datasets.interleave_datasets([rows, few], probabilities=[0.7, 0.3], **how), name="rows"
        )
        found = read_all(stream)
        for shard, samples in enumerate(found):
            assert list(stream.open(shard, epoch=1, state=None)) == samples
