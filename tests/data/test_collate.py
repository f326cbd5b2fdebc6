"""Batches made by the user's collate: padding, faults of its own, and parts of such a batch."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset, Subset

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.data.batches.batch import take
from hardened_ddp.data.batches.checks import Checks
from hardened_ddp.data.batches.collate import find_collate, split_targets
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.loader import TrainLoader
from hardened_ddp.data.batches.sampler import WindowSampler
from hardened_ddp.errors import DataError, SampleError
from tests.data.scripted import make_stream, read
from tests.harness.ranks import train
from tests.plugins import Forwards

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


def drop_one(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return pad(samples[:-1] or samples)


def raise_always(samples: list[Any]) -> Any:
    raise RuntimeError("not today")


def raise_for_two(samples: list[Any]) -> Any:
    """Refuse what is there together only."""
    if len(samples) > 1:
        raise RuntimeError("one at a time")
    return pad(samples)


def refuse_no_length(samples: list[Any]) -> Any:
    if any(len(row) == NO_LENGTH for row, _ in samples):
        raise ValueError(f"{NO_LENGTH} is no length")
    return pad(samples)


class Padding:
    def __call__(self, samples: list[Any]) -> Any:
        return pad(samples)


class Needy:
    def __init__(self, tokenizer: object) -> None: ...


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


def rows(train: bool) -> Rows:
    return PaddedRows()


class SumOfRow(torch.nn.Module):
    """Takes rows padded with zeros; rank 1 has no memory for more of them than most_rows."""

    num_forwards = Forwards()

    def __init__(self, num_classes: int, most_rows: int = 99) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, num_classes)
        self.most_rows, self.num_forwards = most_rows, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        is_late = os.environ["RANK"] == "1" and self.training and self.num_forwards > 3
        if is_late and len(inputs) > self.most_rows:
            raise torch.OutOfMemoryError("a fault of this model")
        logits: torch.Tensor = self.layer(inputs.sum(dim=1, keepdim=True))
        return logits


def make_loader(collate: Any, num_workers: int = 0, **how: Any) -> TrainLoader:
    dataset = Rows()
    sampler = WindowSampler(dataset, num_replicas=1, rank=0, seed=1, global_batch=8, batch_size=4)
    stream = make_stream(dataset, num_workers, **how)
    stream.fetcher.collate = collate
    stream.fetcher.reads_batches = False
    return TrainLoader(sampler, stream)


def rows_of(batches: list[Any]) -> dict[int, list[float]]:
    """Give each sample's numbers, without the zeros that pad it."""
    return {
        int(index): row[: int(index) + 1].tolist()
        for batch in batches
        for index, row in zip(batch.indices, batch.inputs, strict=True)
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_packed_sequences_come_through_the_loader(num_workers: int) -> None:
    loader = make_loader(pack, num_workers)
    loader.reader.fetcher.checks = Checks(inputs=True)
    batches = read(loader)
    loader.close()
    for batch in batches:
        assert type(batch.inputs) is PackedSequence
        rows, lengths = pad_packed_sequence(batch.inputs, batch_first=True)
        assert lengths.tolist() == [index + 1 for index in batch.indices.tolist()]
        assert batch.size_bytes() > rows.element_size() * int(lengths.sum())
    assert len(batches) == 3


def test_samples_that_all_differ_are_not_bad_but_need_a_collate() -> None:
    fetcher = Fetcher(Rows(), seed=0)
    with pytest.raises(SampleError, match="of 4 shapes") as caught:
        fetcher[(0, torch.arange(4))]
    assert "--collate" in caught.value.fix
    most = [(torch.zeros(3), 0)] * 3 + [(torch.zeros(4), 0)]
    batch = Fetcher(most, seed=0)[(0, torch.arange(4))]
    assert [(bad.index, "set --collate" in bad.error) for bad in batch.bad] == [(3, True)]


@pytest.mark.parametrize("collate", [pad, join])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_part_of_a_collated_batch_has_the_same_samples(collate: Any, num_workers: int) -> None:
    loader = make_loader(collate, num_workers)
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


@pytest.mark.parametrize(
    ("collate", "told"),
    [
        (drop_one, "3 labels for 4 samples: some are left out"),
        (raise_always, "RuntimeError: not today"),
        (raise_for_two, "RuntimeError: one at a time"),
        (lambda samples: None, "a sample is a NoneType"),
    ],
)
def test_a_collate_that_fails_is_told_with_its_samples(collate: Any, told: str) -> None:
    fetcher = Fetcher(Rows(), seed=0, collate=collate)
    with pytest.raises(SampleError) as caught:
        fetcher[(0, torch.arange(4))]
    assert caught.value.message.startswith("collate failed on samples [0, 1, 2, 3]")
    assert told in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_the_collate_cannot_take_costs_itself_only(num_workers: int) -> None:
    loader = make_loader(refuse_no_length, num_workers)
    batches = read(loader)
    loader.close()
    bad = [bad for batch in batches for bad in batch.bad]
    assert [(one.index, "ValueError: 5 is no length" in one.error) for one in bad] == [(4, True)]
    assert "test_collate.py:" in bad[0].error
    assert sorted(rows_of(batches)) == [i for i in range(12) if i != 4]


@pytest.mark.parametrize("collate", [pad, join])
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


def test_the_collate_of_the_dataset_is_used_unless_another_is_named() -> None:
    dataset = PaddedRows()
    assert find_collate(dataset, "auto") is PaddedRows.collate_fn
    assert find_collate(Subset(dataset, [0]), "auto") is PaddedRows.collate_fn
    assert find_collate(Rows(), "auto") is None
    assert find_collate(dataset, "tests.data.test_collate:join") is join
    assert isinstance(find_collate(dataset, "tests.data.test_collate:Padding"), Padding)


def test_a_collate_that_needs_arguments_is_told() -> None:
    with pytest.raises(DataError, match="can't be made without arguments") as caught:
        find_collate(Rows(), "tests.data.test_collate:Needy")
    assert caught.value.fix


@pytest.mark.slow
def test_a_step_over_padded_rows_is_retried_in_parts(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--dataset", "tests.data.test_collate:rows", "--batch_size", "3"]
    argv += ["--model", "tests.data.test_collate:SumOfRow", "--epochs", "3", "--run_name", "run"]
    argv += ["--optimizer", "sgd", "--num_workers", "0", "--output_dir"]
    train([*argv, tmp_path / "whole"], 2).ok()
    train([*argv, tmp_path / "parts", "--model_args", "{most_rows: 2}"], 2).ok()
    logs = (tmp_path / "parts/run/logs").iterdir()
    assert any("retrying step" in log.read_text() for log in logs)
    found, expected = (
        load_checkpoint(open_checkpoint(tmp_path / name / "run"))[0] for name in ("parts", "whole")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("data", "inputs", "targets"),
    [
        ((1, 2), 1, 2),
        ((1, 2, 3), (1, 2), 3),
        ([1], 1, None),
        ({"x": 1, "label": 2}, {"x": 1}, 2),
        ({"x": 1}, {"x": 1}, None),
    ],
    ids=str,
)
def test_the_labels_of_a_batch_are_found_or_there_are_none(
    data: Any, inputs: Any, targets: Any
) -> None:
    assert split_targets(data) == (inputs, targets)
