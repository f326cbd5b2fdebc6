"""Faults of the data path: dead workers, full shared memory, failing storage, bad samples.

Each ends in the batches, or the weights, of a run without it; or in exactly the bad samples left
out, by name. Workers that are lost in simpler ways: test_loader.py.
"""

import ctypes
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from hardened_ddp.data.batches import loader as data_loader
from hardened_ddp.data.batches import read_errors, worker_pool
from hardened_ddp.data.batches.batch import Batch, take
from hardened_ddp.data.batches.checks import Checks
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.images import MemoryImages
from hardened_ddp.data.batches.loader import BatchReader, TrainLoader
from hardened_ddp.data.batches.read_errors import file_of
from hardened_ddp.data.batches.worker_pool import WorkersLost
from hardened_ddp.data.batches.workers import WorkerPlan
from tests.data.scripted import (
    SIZE,
    WAYS_TO_READ,
    Act,
    Scripted,
    bad_numbers,
    content,
    make_loader,
    read,
)
from tests.harness.processes import HOUR_S
from tests.harness.ranks import run_ranks, train
from tests.marks import slow_after
from tests.plugins import cause_fault
from tests.run_folder import last_tensors, only_run, read_summary

CLONE_NEWNS = 0x00020000  # of linux/sched.h


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_errors, "WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(worker_pool, "POLL_S", 0.1)


def undisturbed(epoch: int = 0) -> dict[int, tuple[float, ...]]:
    return content(read(make_loader(Scripted()), epoch))


# Shared memory and open files.


def strike_bus_once(flag: Path) -> None:
    if not flag.exists():
        flag.touch()
        cause_fault("bus")


def test_after_a_bus_error_batches_come_through_pipes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(Scripted(strike_bus_once, tmp_path / "flag"), 1)
    batches = read(loader)
    assert loader.reader.level == plan(1, shares_memory=False, copies_data=True)
    loader.close()
    assert content(batches) == undisturbed()
    assert bad_numbers(batches) == []
    assert "SIGBUS" in caplog.text
    assert "with 1 worker through pipes instead of 1 worker" in caplog.text


class Many(Dataset[Any]):
    """Samples of 20 tensors of 40 KB: much shared memory, and many open files."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        parts = {str(number): torch.full((10_000,), float(index)) for number in range(20)}
        return {**parts, "labels": index % 3}


def check_many(limit: str) -> str:
    """Read all samples under a real limit; say how it went on. In a process of its own."""
    match limit:
        case "file size":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        case "open files":
            used = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, used + 60))
        case "shared memory":
            assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"]
            subprocess.run(command, check=True)
    loader = make_loader(Many(), 1)
    batches = read(loader)
    level = loader.reader.level
    loader.close()
    seen = []
    for batch in batches:
        assert batch.inputs.keys() == {str(number) for number in range(20)}
        for tensor in batch.inputs.values():
            assert torch.equal(tensor[:, 0], batch.indices.float())
        seen += batch.indices.tolist()
    assert seen == loader.sampler.order(0).take(0, SIZE).tolist()
    return str(level)


def may_mount() -> bool:
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({CLONE_NEWNS}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("limit", slow_after(1, ["file size", "open files", "shared memory"]))
def test_too_little_shared_memory_or_too_many_open_files_cost_no_sample(limit: str) -> None:
    if limit == "shared memory" and not may_mount():
        pytest.skip("only root can mount a small /dev/shm for one process")
    assert run_ranks(check_many, 1, limit) == ["1 worker through pipes"]


def give_dead_pinning_thread(loader: TrainLoader) -> Any:
    """Return torch's iterator; without a GPU it has no such thread, else in this place."""
    assert loader.reader._pool is not None
    iterator: Any = loader.reader._pool._iterator
    iterator._pin_memory_thread = threading.Thread()
    iterator._pin_memory_thread.start()
    iterator._pin_memory_thread.join()
    iterator._pin_memory_thread_done_event = threading.Event()
    return iterator


def test_a_worker_is_not_killed_while_it_sends_to_the_thread_that_pins_memory() -> None:
    loader = make_loader(Scripted(), 1)
    windows = loader.windows(0, 0)
    assert list(next(windows)[1])
    lock = give_dead_pinning_thread(loader)._worker_result_queue._wlock
    loader.close()  # with the lock of the sender, or torch's thread would stay: see conftest.py
    assert lock.acquire(timeout=30)
    lock.release()  # a thread of the queue may need it yet, for the sign of the end


def test_a_dead_pinning_thread_costs_no_sample(caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(Scripted(), 1, loader_timeout_s=HOUR_S)
    windows = loader.windows(0, 0)
    batches = list(next(windows)[1])
    iterator = give_dead_pinning_thread(loader)
    # As if the worker had been killed while it sent: no batch comes, and torch would start a thread
    # that waits for this lock to end the other one.
    assert iterator._worker_result_queue._wlock.acquire(timeout=30)
    batches += [batch for _, share in windows for batch in share]
    loader.close()
    assert content(batches) == undisturbed()
    assert "the thread that pins memory has ended" in caplog.text


# Going back up.


def plan(num_workers: int, **how: Any) -> WorkerPlan:
    return WorkerPlan(num_workers=num_workers, prefetch_factor=2, start_method="fork", **how)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Give the clock of the loaders."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(data_loader, "time", clock)
    return clock


def lose(reader: BatchReader) -> None:
    assert not list(reader._recover(WorkersLost("gone")))


def test_after_calm_the_loader_goes_up_each_time(clock: SimpleNamespace) -> None:
    reader = make_loader(Scripted(), 4, loader_quiet_s=10.0).reader
    for _ in range(3):
        for num_workers in (2, 1, 0):
            lose(reader)
            clock.now += 9
            reader._go_up_if_quiet()
            assert reader.num_workers == num_workers
        clock.now += 1
        reader._go_up_if_quiet()
        assert reader.level == plan(4)
    never = make_loader(Scripted(), 2, loader_quiet_s=0.0).reader
    lose(never)
    clock.now += 10**9
    never._go_up_if_quiet()
    assert never.num_workers == 1


@pytest.mark.parametrize("low", slow_after(1, [plan(0), plan(1), plan(2, shares_memory=False)]))
def test_going_up_keeps_every_sample_in_its_place(
    low: WorkerPlan, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(Scripted(), 2, loader_quiet_s=100.0)
    loader.reader.level = low
    batches = []
    for number, (_, share) in enumerate(loader.windows(0, 0)):
        batches += share
        if number == 1:
            assert loader.reader.level == low
            clock.now += 101
    assert loader.reader.level == plan(2)
    assert content(batches) == undisturbed()
    assert caplog.text.count("Continuing at the same sample with 2 workers instead of") == 1
    loader.reader.level = low
    clock.now += 101
    assert content(read(loader, 1)) == undisturbed(1)
    assert loader.reader.level == plan(2)
    loader.close()


# Storage that fails for a moment.


def transient(error: Exception) -> Act:
    """Make an act that fails twice, whoever calls it."""

    def act(flag: Path) -> None:
        num_tries = len(flag.read_text()) if flag.exists() else 0
        flag.write_text("x" * (num_tries + 1))
        if num_tries < 2:
            raise error

    return act


def _wrapped() -> Exception:
    error = ValueError("can't decode")
    error.__cause__ = OSError(errno.EIO, "input/output error")
    return error


PASSING: dict[str, Exception] = {"wrapped": _wrapped(), "timeout": TimeoutError("no answer")}


@pytest.mark.parametrize("way", WAYS_TO_READ)
@pytest.mark.parametrize("name", slow_after(1, PASSING))
def test_a_read_that_fails_for_a_moment_costs_nothing(
    name: str, way: tuple[type[Scripted], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, num_workers = way
    loader = make_loader(kind(transient(PASSING[name]), tmp_path / "tries"), num_workers)
    batches = read(loader)
    loader.close()
    assert bad_numbers(batches) == []
    # With the same random numbers, of the samples read after it too.
    expected = read(make_loader(kind()))
    assert [batch.indices.tolist() for batch in batches] == [b.indices.tolist() for b in expected]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(batches, expected, strict=True))
    assert "the storage had errors: 2 reads were retried" in caplog.text
    assert caplog.text.count("storage had errors") == 1


def test_many_retries_are_logged_when_their_number_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = make_loader(Scripted(), 0).reader
    for number in range(100):
        reader.tell_retries([f"TimeoutError: {number}"])
    told = [record.getMessage().split()[4] for record in caplog.records]
    assert told == ["1", "2", "4", "8", "16", "32", "64"]
    assert caplog.records[-1].getMessage().endswith("the last one after TimeoutError: 63")


# Values that a model can't take.


def problems(checks: Checks, batch: Batch) -> Mapping[int, str]:
    return checks.find(batch, (take(batch, [i]) for i in range(batch.num_samples)))


def test_values_that_a_model_cannot_take_are_found_in_their_samples() -> None:
    rows = torch.full((6, 2), torch.finfo(torch.float32).max)
    rows[1, 1], rows[2, 0] = torch.nan, -torch.inf
    labels = torch.tensor([0, 1, 1, -1, 3, 1.5])
    batch = Batch(rows, labels, torch.arange(6))
    assert problems(Checks(3), batch).keys() == {3, 4, 5}
    assert problems(Checks(3, inputs=True), batch) == {
        1: "1 values of its input are NaN or infinite",
        2: "1 values of its input are NaN or infinite",
        3: "its label is -1.0, and there are 3 classes, 0 to 2",
        4: "its label is 3.0, and there are 3 classes, 0 to 2",
        5: "its label is 1.5, and there are 3 classes, 0 to 2",
    }
    # in a mapping infinity may be a mask
    batch = Batch({"x": rows}, torch.tensor([0, 1, 2, 0, 1, 2]), torch.arange(6))
    assert problems(Checks(3, inputs=True), batch) == {1: "1 values of its input are NaN"}
    for kind in (torch.uint8, torch.float32, torch.bool):
        made = Fetcher(TensorDataset(rows, (labels > 0).to(kind)), seed=0, checks=Checks(3))
        assert made[(0, torch.arange(6))].targets.tolist() == [0, 1, 1, 0, 1, 1]
        assert made[(0, torch.arange(6))].targets.dtype == torch.int64


def test_of_data_in_memory_the_same_is_found() -> None:
    rows = torch.zeros(6, 1, 2, 2)
    rows[4, 0, 1, 1] = float("inf")
    labels = torch.tensor([0, 1, 2, 5, 0, -1])
    images = MemoryImages(rows, labels, classes=["a", "b", "c"])
    tensors = TensorDataset(rows, labels)
    for dataset in (images, tensors, Subset(tensors, range(6))):
        checks = Checks.of(dataset, num_classes=3, inputs=True)
        batch = Fetcher(dataset, seed=0, checks=checks)[(0, torch.tensor([5, 0, 4, 1, 3]))]
        assert batch.indices.tolist() == [0, 1]
        assert sorted(bad.index for bad in batch.bad) == [3, 4, 5]


def test_the_file_of_a_sample_is_found_where_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "b.jpg").touch()
    folder = SimpleNamespace(samples=[("gone.jpg", 0), (str(tmp_path / "b.jpg"), 1)])
    assert file_of(folder, 1) == str(tmp_path / "b.jpg")
    assert file_of(folder, 0) == ""
    assert file_of(folder, 0, FileNotFoundError(errno.ENOENT, "gone", "gone.jpg")) == "gone.jpg"
    part: Any = Subset(folder, [1])  # type: ignore[arg-type]  # all that is looked at is samples
    assert file_of(part, 0) == str(tmp_path / "b.jpg")
    assert file_of(TensorDataset(torch.zeros(2)), 0) == ""


# Whole runs.

RUN = ["--dataset", "tests.plugins:faulty_points", "--cpu_only", "--ledger", "--model", "mlp"]
RUN += ["--batch_size", "4", "--epochs", "2", "--num_workers", "0", "--eval_every", "0"]


def run(folder: Path, *flags: str | Path, world_size: int = 2, **faults: Any) -> Any:
    """Train on points with these faults; what happened once is remembered in folder/flags."""
    flags_folder = folder / "flags"
    flags_folder.mkdir(parents=True)
    for index in range(40):
        (flags_folder / f"point-{index}").touch()
    arguments = {"flags": str(flags_folder), **faults}
    given = ["--dataset_args", json.dumps(arguments), "--output_dir", folder / "runs"]
    return train([*RUN, *given, *flags], world_size)


@pytest.mark.slow
def test_bad_values_are_left_out_by_name_with_the_weights_of_samples_that_are_broken(
    tmp_path: Path,
) -> None:
    faults = {3: "nan", 13: "label", 22: "half", 30: "infinite"}
    flags, of_tests = ["--continue_on_error"], {"test_faults": {2: "label", 16: "nan"}}
    wrong = run(tmp_path / "wrong", *flags, "--eval_every", "1", faults=faults, **of_tests).ok()
    run(tmp_path / "broken", *flags, faults=dict.fromkeys(faults, "broken")).ok()
    assert last_tensors(tmp_path / "wrong/runs") == last_tensors(tmp_path / "broken/runs")
    folder = only_run(tmp_path / "wrong/runs")
    lines = (folder / "skipped_samples.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    assert sorted(entry["index"] for entry in entries) == sorted([*faults] * 2)
    for entry in entries:
        assert entry["file"] == str(tmp_path / f"wrong/flags/point-{entry['index']}")
        assert f"left out sample {entry['index']} ({entry['file']})" in wrong.output
        assert "its " in entry["error"]
    assert read_summary(folder)["num_left_out"] == 8
    verified = train(["verify-ledger", folder], launcher="none").ok().output
    assert verified.count("40 samples, each exactly once") == 2
    assert verified.count("4 of them left out") == 2
    assert "(15 samples, 2 left out)" in wrong.outputs[0]
    [told] = re.findall(r"left out of the evaluation: test sample (.*)", wrong.outputs[0])
    assert {"2 (", "16 ("} <= set(re.findall(r"\b\d+ \(", told))


@pytest.mark.parametrize(
    "case", slow_after(1, [("label", "--shared_memory"), ("nan", "--no_shared_memory")])
)
def test_without_the_flag_one_bad_sample_stops_all_ranks_with_that_cause(
    case: tuple[str, str], tmp_path: Path
) -> None:
    kind, form = case
    finished = run(tmp_path, form, faults={13: kind})
    assert all(finished.statuses)
    assert re.search(r"rank \d, step \d+, data: can't read sample 13 \(", finished.output)
    assert finished.output.count("] ERROR [DDP-") == 1  # by one rank
    assert f"{tmp_path}/flags/point-13" in finished.output
    assert "Traceback" not in finished.output
