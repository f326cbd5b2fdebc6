"""Loader workers share the tensors of a dataset, or have copies of them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from hardened_ddp.data.batches import worker_memory
from hardened_ddp.data.batches.batch import Batch, BatchSource
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.loader import BatchReader
from hardened_ddp.data.batches.worker_memory import SendingTrial
from hardened_ddp.data.batches.workers import WorkerPlan
from hardened_ddp.settings.config import DataConfig
from hardened_ddp.streams.block_reader import BlockReader
from tests.harness.ranks import run_ranks

MIB = 2**20


class InMemory(Dataset[Any]):
    """Ten samples; each says whether the worker that reads it shares the data."""

    def __init__(self, other: Any = None) -> None:
        self.data = torch.zeros(10, MIB // 4)
        self.view = self.data[:5]
        self.other = other

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(self.data.is_shared())]), 0


class Held:
    """A stream of one shard whose samples are tensors in memory."""

    num_shards = 1

    def __init__(self) -> None:
        self.samples = [torch.full((1,), float(i)) for i in range(1000)]

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        return iter(self.samples)


class Counting(Dataset[Any]):
    """Samples that say how often shared memory was made in their process since the first one."""

    count = -1

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.count < 0:
            make, self.count = torch.UntypedStorage._new_shared, 0

            def noted(*given: Any, **how: Any) -> torch.UntypedStorage:
                self.count += 1
                return make(*given, **how)

            torch.UntypedStorage._new_shared = noted  # type: ignore[method-assign]
        return torch.tensor([float(self.count)]), 0


def read_by_a_worker(source: BatchSource, **how: Any) -> Batch:
    """Read ten samples, twice; fail if the worker was given up."""
    plan = WorkerPlan(num_workers=1, prefetch_factor=2, start_method="forkserver", **how)
    stream = BatchReader(source, plan, DataConfig(), pin_memory=False)
    [_, batch] = list(stream.batches(lambda: iter([(0, torch.arange(10))] * 2)))
    stream.close()
    assert stream.num_workers == 1
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("shares_memory", [False, True])
def test_a_worker_that_is_told_to_send_through_pipes_makes_no_shared_memory(
    shares_memory: bool,
) -> None:
    batch = read_by_a_worker(Fetcher(Counting(), seed=0), shares_memory=shares_memory)
    assert bool(batch.inputs.any()) == shares_memory


def are_shared_in_a_worker() -> bool:
    return bool(read_by_a_worker(Fetcher(InMemory(), seed=0)).inputs.all())


def are_shared_with_temporary_files_in(folder: Path) -> bool:
    tempfile.tempdir = str(folder)
    found = are_shared_in_a_worker()
    assert tempfile.gettempdir() == str(folder)
    return found


def test_a_worker_is_reached_though_temporary_paths_are_too_long_for_a_socket(
    tmp_path: Path,
) -> None:
    folder = tmp_path / ("long " * 30)
    folder.mkdir()
    assert run_ranks(are_shared_with_temporary_files_in, 1, folder) == [True]
    assert not list(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("number", [254, 300])
def test_a_dataset_of_as_many_tensors_as_a_process_can_be_sent_files_has_a_worker(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = InMemory([torch.zeros(1) for _ in range(number)])
    assert not read_by_a_worker(Fetcher(dataset, seed=0)).inputs.any()
    assert not caplog.text


def test_a_stream_that_holds_many_tensors_has_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    assert len(read_by_a_worker(BlockReader(Held(), seed=0)).indices) == 10
    assert not caplog.text


def test_tensors_are_copied_where_shared_memory_is_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_memory, "_SHM_MARGIN", 1e12)
    assert not are_shared_in_a_worker()


def test_views_of_one_tensor_are_counted_once() -> None:
    trial = SendingTrial()
    trial.dump(Fetcher(InMemory(np.zeros(3 * MIB, np.uint8)), seed=0))
    assert [*trial.tensors.values()] == [10 * MIB]
    assert 3 * MIB <= trial.private_bytes < 3.1 * MIB


def test_many_small_tensors_are_copied_because_each_would_be_an_open_file() -> None:
    plan = WorkerPlan(num_workers=2, prefetch_factor=2, start_method="forkserver")
    many = Fetcher(InMemory([torch.zeros(1) for _ in range(1000)]), seed=0)
    assert worker_memory.plan_sending(many, plan).copies_data
    few = Fetcher(InMemory(), seed=0)
    assert not worker_memory.plan_sending(few, plan).copies_data


def test_workers_that_each_copy_much_are_told_with_the_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_memory, "MOST_PRIVATE_BYTES", 2 * MIB)
    plan = WorkerPlan(num_workers=4, prefetch_factor=2, start_method="forkserver")
    worker_memory.plan_sending(Fetcher(InMemory(), seed=0), plan)
    assert not caplog.text
    worker_memory.plan_sending(Fetcher(InMemory(np.zeros(30 * MIB, np.uint8)), seed=0), plan)
    assert "each of 4 workers takes about 30 MiB of memory" in caplog.text
