"""Samples nested in any way: through collating, workers, the way to a device, and taking apart."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from hardened_ddp.data.batches.batch import Batch, move, take
from hardened_ddp.data.batches.collate import split_targets
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.nesting import leaves, map_tensors, pick, stack
from hardened_ddp.data.sources.facts import fingerprint
from tests.data.scripted import make_loader, read


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
    loader = make_loader(Nested(), num_workers)
    fallback = loader.reader.fallback
    fallback.level = replace(fallback.level, shares_memory=shares_memory)
    batches = read(loader)
    loader.close()
    for batch in batches:
        numbers = batch.indices.tolist()
        check_batch(batch.inputs, numbers)
        assert batch.targets["class"].tolist() == [number % 3 for number in numbers]
        assert batch.targets["caption"] == [f"label {number}" for number in numbers]
        assert batch.targets["box"] is None
    assert sorted(n for batch in batches for n in batch.indices.tolist()) == list(range(8))


def test_some_samples_are_taken_from_any_nesting() -> None:
    batch = Fetcher(Nested(), seed=0)[(0, torch.tensor([4, 5, 6]))]
    part = take(batch, [2, 0])
    check_batch(part.inputs, [6, 4])
    assert part.targets["caption"] == ["label 6", "label 4"]
    assert part.indices.tolist() == [6, 4]
    with_mask = pick({"x": torch.zeros(3, 2), "mask": torch.zeros(5, 5)}, [1], num_samples=3)
    assert (with_mask["x"].shape, with_mask["mask"].shape) == ((1, 2), (5, 5))


def test_any_nesting_moves_to_a_device() -> None:
    batch = Fetcher(Nested(), seed=0)[(0, torch.tensor([0, 1]))]
    moved = batch.to(torch.device("meta"))
    found = [leaf for leaf in leaves((moved.inputs, moved.targets))]
    tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.indices.device.type == "cpu"
    assert [leaf for leaf in found if str(leaf).startswith("label")] == ["label 0", "label 1"]
    assert type(moved.inputs["frozen"]) is Frozen


def test_what_knows_how_to_move_moves_itself() -> None:
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


def test_a_mapping_of_a_library_keeps_its_class_and_what_else_it_holds() -> None:
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


def test_labels_are_found_in_dataclasses_and_namedtuples_too() -> None:
    @dataclass
    class Sample:
        image: int
        mask: int
        label: int

    class Row(NamedTuple):
        text: int
        mask: int
        labels: int

    assert split_targets(Sample(1, 2, 3)) == ({"image": 1, "mask": 2}, 3)
    assert split_targets(Row(1, 2, 3)) == ({"text": 1, "mask": 2}, 3)
    assert split_targets(Pair(1, 2)) == (1, 2)


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
