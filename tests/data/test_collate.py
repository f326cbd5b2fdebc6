"""Batches of samples nested in any way, and those that the user's collate makes."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset, Subset

from hardened_ddp.data.batches.batch import Batch, move, take
from hardened_ddp.data.batches.checks import Checks
from hardened_ddp.data.batches.collate import find_collate, split_targets
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.nesting import map_tensors, pick, stack, tensors_of
from hardened_ddp.data.sources.facts import fingerprint
from hardened_ddp.errors import SampleError
from tests.data import scripted
from tests.data.scripted import read

NO_LENGTH = 5


def pad(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, labels = zip(*samples, strict=True)
    return pad_sequence(list(rows), batch_first=True), torch.tensor(labels)


def join(samples: list[Any]) -> tuple[Any, torch.Tensor]:
    """Join the samples to one long row, as for graphs."""
    rows, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(row) for row in rows])
    return {"row": torch.cat(rows), "lengths": lengths}, torch.tensor(labels)


def pack(samples: list[Any]) -> tuple[PackedSequence, torch.Tensor]:
    rows, labels = zip(*samples, strict=True)
    return pack_sequence(list(rows), enforce_sorted=False), torch.tensor(labels)


def refuse_no_length(samples: list[Any]) -> Any:
    if any(len(row) == NO_LENGTH for row, _ in samples):
        raise ValueError(f"{NO_LENGTH} is no length")
    return pad(samples)


class Rows(Dataset[Any]):
    """Sample i has i + 1 random numbers."""

    num_classes = 3
    size = 12

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(index + 1), index % 3


class PaddedRows(Rows):
    @staticmethod
    def collate_fn(samples: list[Any]) -> Any:
        return pad(samples)


class Files(list[Any]):
    """Samples in memory, each as if it came from a file."""

    samples = ((__file__, 0),) * 4


def test_samples_that_all_differ_are_not_bad_but_need_a_collate() -> None:
    fetcher = Fetcher(Rows(), seed=0)
    with pytest.raises(SampleError, match="can't be made into a batch") as caught:
        fetcher[(0, torch.arange(4))]
    assert "--collate" in caught.value.fix
    most = Files([(torch.zeros(3), 0)] * 3 + [(torch.zeros(4), 0)])
    batch = Fetcher(most, seed=0)[(0, torch.arange(4))]
    assert [bad.name for bad in batch.bad] == [f"3 ({__file__})"]
    assert "set --collate" in batch.bad[0].error


@pytest.mark.parametrize(("collate", "num_workers"), [(pad, 0), (join, 1)])
def test_a_part_of_a_collated_batch_has_the_same_samples(collate: Any, num_workers: int) -> None:
    loader = scripted.make_loader(Rows(), num_workers, collate=collate)
    batches = read(loader, epoch=3)
    loader.close()
    batch = batches[0]
    part = take(batch, [2, 0])
    assert part.indices.tolist() == batch.indices[[2, 0]].tolist()
    assert part.targets.tolist() == batch.targets[[2, 0]].tolist()
    again = take(part, [1])
    assert again.indices.tolist() == batch.indices[[0]].tolist()
    first = int(batch.indices[0]) + 1
    if collate is pad:
        assert torch.equal(again.inputs[0], batch.inputs[0][:first])  # the same random numbers
    else:
        assert torch.equal(again.inputs["row"], batch.inputs["row"][:first])
    moved = batch.to(torch.device("meta"))
    assert take(moved, [1]).targets.tolist() == batch.targets[[1]].tolist()


def test_a_sample_that_the_collate_cannot_take_costs_itself_only() -> None:
    loader = scripted.make_loader(Rows(), 1, collate=refuse_no_length)
    batches = read(loader)
    loader.close()
    [bad] = [bad for batch in batches for bad in batch.bad]
    assert (bad.index, "ValueError: 5 is no length" in bad.error) == (4, True)
    assert "test_collate.py:" in bad.error
    assert sorted(scripted.numbers(batches)) == [i for i in range(12) if i != 4]


@pytest.mark.parametrize("collate", [pad, join, pack])
def test_a_nan_in_a_collated_batch_is_found_in_its_sample(collate: Any) -> None:
    class WithNan(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            row, label = super().__getitem__(index)
            return (row * float("nan") if index == 2 else row), 7 if index == 3 else label

    checks = Checks(num_classes=3, inputs=True)
    batch = Fetcher(WithNan(), seed=0, collate=collate, checks=checks)[(0, torch.arange(5))]
    assert {bad.index: bad.error for bad in batch.bad} == {
        2: "3 values of its input are NaN" + (" or infinite" if collate is pad else ""),
        3: "its label is 7, and there are 3 classes, 0 to 2",
    }
    assert batch.indices.tolist() == [0, 1, 4]
    assert batch.targets.tolist() == [0, 1, 1]
    if collate is pack:
        assert type(batch.inputs) is PackedSequence
        assert pad_packed_sequence(batch.inputs)[1].tolist() == [1, 2, 5]


def test_the_collate_of_the_dataset_is_used_unless_another_is_named() -> None:
    dataset = PaddedRows()
    assert find_collate(dataset, "auto") is PaddedRows.collate_fn
    assert find_collate(Subset(dataset, [0]), "auto") is PaddedRows.collate_fn
    assert find_collate(Rows(), "auto") is None
    assert find_collate(dataset, "tests.data.test_collate:join") is join


def test_the_labels_of_a_batch_are_found_or_there_are_none() -> None:
    assert split_targets((1, 2)) == (1, 2)
    assert split_targets((1, 2, 3)) == ((1, 2), 3)
    assert split_targets([1]) == (1, None)
    assert split_targets({"x": 1, "label": 2}) == ({"x": 1}, 2)
    assert split_targets({"x": 1}) == ({"x": 1}, None)
    assert split_targets(make_dataclass("Sample", ["x", "label"])(1, 2)) == ({"x": 1}, 2)
    assert split_targets(namedtuple("Row", "x mask labels")(1, 2, 3)) == ({"x": 1, "mask": 2}, 3)
    assert split_targets(Pair(1, 2)) == (1, 2)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    points: torch.Tensor
    note: str
    rest: Any = None


@dataclass
class Checked:
    """Refuses what no sample is: a batch of them must not be checked again."""

    size: int
    length: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        if not isinstance(self.size, int):
            raise ValueError("size is a number")


def nested(index: int) -> dict[str, Any]:
    x = torch.full((2,), float(index))
    return {
        "alone": x,
        "pair": Pair(x, {"name": f"sample {index}", "none": None}),
        "frozen": Frozen(x, f"note {index}", [x, (x, f"deep {index}")]),
        "checked": Checked(index),
        "ordered": OrderedDict(a=x, b=index),
    }


class Nested(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return nested(index), {"class": index % 3, "caption": f"label {index}", "box": None}


def check_batch(inputs: Any, numbers: list[int]) -> None:
    """Check that a batch holds the samples of these numbers, in the shapes they came in."""
    rows = [[float(number)] * 2 for number in numbers]
    assert inputs["alone"].tolist() == rows
    assert type(inputs["pair"]) is Pair
    assert inputs["pair"].right["name"] == [f"sample {number}" for number in numbers]
    assert inputs["pair"].right["none"] is None
    assert type(inputs["frozen"]) is Frozen
    assert inputs["frozen"].points.tolist() == rows
    assert inputs["frozen"].note == [f"note {number}" for number in numbers]
    assert inputs["frozen"].rest[1][1] == [f"deep {number}" for number in numbers]
    assert inputs["checked"].size.tolist() == numbers
    assert inputs["ordered"]["b"].tolist() == numbers


@pytest.mark.parametrize(("num_workers", "shares_memory"), [(0, True), (1, True), (1, False)])
def test_any_nesting_comes_through_the_loader(num_workers: int, shares_memory: bool) -> None:
    loader = scripted.make_loader(Nested(), num_workers)
    loader.reader.level = replace(loader.reader.level, shares_memory=shares_memory)
    batches = read(loader)
    loader.close()
    for batch in batches:
        numbers = batch.indices.tolist()
        check_batch(batch.inputs, numbers)
        assert batch.targets["class"].tolist() == [number % 3 for number in numbers]
        assert batch.targets["caption"] == [f"label {number}" for number in numbers]
        assert batch.targets["box"] is None
    assert sorted(scripted.numbers(batches)) == list(range(8))


def test_some_samples_are_taken_from_any_nesting_and_moved() -> None:
    batch = Fetcher(Nested(), seed=0)[(0, torch.tensor([4, 5, 6]))]
    part = take(batch, [2, 0])
    check_batch(part.inputs, [6, 4])
    assert part.targets["caption"] == ["label 6", "label 4"]
    assert part.indices.tolist() == [6, 4]
    moved = part.to(torch.device("meta"))
    assert {tensor.device.type for tensor in tensors_of((moved.inputs, moved.targets))} == {"meta"}
    assert moved.indices.device.type == "cpu"
    assert type(moved.inputs["frozen"]) is Frozen
    with_mask = pick({"x": torch.zeros(3, 2), "mask": torch.zeros(5, 5)}, [1], num_samples=3)
    assert (with_mask["x"].shape, with_mask["mask"].shape) == ((1, 2), (5, 5))


def test_what_can_move_moves_itself_and_a_mapping_of_a_library_keeps_its_class() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(1)])
    moved = move({"x": packed}, torch.device("cpu"))
    assert type(moved["x"]) is PackedSequence

    class Graph:
        place = "host"

        def to(self, device: torch.device) -> None:
            self.place = str(device)

    graph = Graph()
    assert move([graph], torch.device("cpu")) == [graph]
    assert graph.place == "cpu"

    class Encoding(UserDict[str, Any]):
        extra = "tokenizer"

    found = map_tensors(Encoding(ids=torch.zeros(2)), lambda tensor: tensor + 1)
    assert type(found) is Encoding
    assert found["ids"].tolist() == [1, 1]


def test_none_beside_a_value_is_no_batch() -> None:
    assert stack([None, None]) is None
    with pytest.raises(TypeError, match="some samples have None"):
        stack([None, 1])
    with pytest.raises(TypeError):
        stack([torch.zeros(1), None])


def sparse_rows(samples: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.tensor([[row, column] for row, (column, _) in enumerate(samples)]).T
    size = (len(samples), 8)
    rows = torch.sparse_coo_tensor(places, torch.ones(len(samples)), size, check_invariants=True)
    return rows, torch.tensor([label for _, label in samples])


def nested_rows(samples: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [torch.full((1 + column,), float(column)) for column, _ in samples]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return nested, torch.tensor([label for _, label in samples])


@pytest.mark.parametrize("collate", [sparse_rows, nested_rows])
def test_sparse_and_nested_tensors_are_counted_and_compared_by_their_values(collate: Any) -> None:
    data = [(column, column % 2) for column in range(6)]
    inputs, _ = collate(data[4:5])
    read = Fetcher(data, seed=0, collate=collate)[(0, torch.arange(2))]
    assert read.num_samples == 2, read.bad
    assert Batch(Frozen(inputs, "x"), {"y": torch.tensor([0])}, torch.arange(1)).size_bytes() == 28
    prints = [
        fingerprint([rows], name="rows", arguments={}, collate=collate)  # type: ignore[list-item]
        for rows in (data, list(data), [(5 - column, label) for column, label in data])
    ]
    assert prints[0] == prints[1] != prints[2]
