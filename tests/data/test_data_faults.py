"""Batches: every sample once, whoever reads it, and whatever happens to the reader.

Dead workers, full shared memory, failing storage and bad samples end in the batches, or the
weights, of a run without them; or in exactly the bad samples left out, by name.
"""

import ctypes
import errno
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from hardened_ddp.data.batches import loader as data_loader
from hardened_ddp.data.batches import read_errors, worker_pool
from hardened_ddp.data.batches.batch import Batch, BatchSource, take
from hardened_ddp.data.batches.checks import Checks
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.images import MemoryImages
from hardened_ddp.data.batches.loader import BatchReader, TrainLoader
from hardened_ddp.data.batches.read_errors import file_of
from hardened_ddp.data.batches.worker_pool import WorkersLost
from hardened_ddp.data.batches.workers import WorkerPlan
from hardened_ddp.errors import LoaderError
from hardened_ddp.ranks.threads import call_within
from hardened_ddp.settings.config import DataConfig
from hardened_ddp.streams.block_reader import BlockReader
from tests.data import scripted
from tests.data.scripted import MARKED, SIZE, Scripted, content, make_loader, numbers, read
from tests.harness.processes import HOUR_S, is_alive, wait_until
from tests.harness.ranks import run_ranks, train
from tests.marks import slow_after
from tests.plugins import cause_fault
from tests.run_folder import last_tensors, only_run, read_summary

CLONE_NEWNS = 0x00020000  # of linux/sched.h


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_errors, "WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(worker_pool, "POLL_S", 0.1)


def undisturbed(epoch: int = 0, *, without: int = -1) -> dict[int, tuple[float, ...]]:
    whole = content(read(make_loader(Scripted()), epoch))
    return {index: row for index, row in whole.items() if index != without}


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
    assert scripted.bad_numbers(batches) == []
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
            sys.dont_write_bytecode = True  # else it is cut, too
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


def transient(error: Exception) -> scripted.Act:
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


@pytest.mark.parametrize("way", scripted.WAYS_TO_READ)
@pytest.mark.parametrize("name", slow_after(1, PASSING))
def test_a_read_that_fails_for_a_moment_costs_nothing(
    name: str, way: tuple[type[Scripted], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, num_workers = way
    loader = make_loader(kind(transient(PASSING[name]), tmp_path / "tries"), num_workers)
    batches = read(loader)
    loader.close()
    assert scripted.bad_numbers(batches) == []
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


def die_once_when_all_else_is_read(flag: Path) -> None:
    if not flag.exists():
        time.sleep(0.5)  # WHY: until what this worker sent before has been received
        scripted.die_once(flag)


def crash_always(flag: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_always(flag: Path) -> None:
    time.sleep(60)  # the test kills it


def be_unreachable(flag: Path) -> None:
    raise OSError(errno.EIO, "input/output error")


def need_memory(flag: Path) -> None:
    raise MemoryError("8 GiB")


def raise_unpicklable(flag: Path) -> None:
    class Local(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(first, second)

    raise Local(1, 2)


def ask_to_exit(flag: Path) -> None:
    sys.exit(0)


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
        process.join(60)
    assert not left


@pytest.mark.parametrize(
    "dataset", [Scripted(), scripted.Whole(), scripted.Listed()], ids=["one", "whole", "listed"]
)
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_batch_is_the_same_whoever_reads_it(dataset: Scripted, num_workers: int) -> None:
    loader = make_loader(dataset, num_workers)
    batches = read(loader)
    loader.close()
    expected = read(make_loader(dataset))
    assert numbers(batches) == numbers(expected)
    assert [batch.num_samples for batch in batches] == [batch.num_samples for batch in expected]
    assert sorted(numbers(batches)) == list(range(SIZE))
    assert content(batches) == content(expected)


@pytest.mark.parametrize("is_part", [False, True])
def test_a_sample_is_the_same_on_any_number_of_ranks(is_part: bool) -> None:
    dataset: Dataset[Any] = Scripted()
    if is_part:  # a Subset has __getitems__, which must not make its random numbers the batch's
        dataset = torch.utils.data.Subset(Scripted(), range(SIZE))
    alone = undisturbed()
    for world_size in (1, 2, 3, 4):
        ranks = [make_loader(dataset, rank=r, world_size=world_size) for r in range(world_size)]
        together = {}
        for loader in ranks:
            together.update(content(read(loader)))
        assert together == alone
    assert undisturbed(1) != alone


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_rank_without_samples_gets_the_step_without_a_batch(num_workers: int) -> None:
    dataset = torch.utils.data.Subset(Scripted(), [0, 1, 2])
    loader = make_loader(dataset, num_workers, rank=3, world_size=4)
    found = list(loader.windows(0, 0))
    loader.close()
    assert [(window.size, batches) for window, batches in found] == [(3, [])]


@pytest.mark.parametrize("is_lasting", [True, False])
def test_workers_serve_epoch_after_epoch_and_breaks_between(is_lasting: bool) -> None:
    loader = make_loader(Scripted(), 2, persistent_workers=is_lasting)
    assert content(read(loader, 0)) == undisturbed()
    first = {process.pid for process in multiprocessing.active_children()}
    assert bool(first) == is_lasting
    windows = loader.windows(1, 0)
    for _ in windows:  # left in the middle, as a stop does it
        second = {process.pid for process in multiprocessing.active_children()}
        break
    assert (second == first) == is_lasting
    assert content(read(loader, 1)) == undisturbed(1)
    loader.close()


def test_a_worker_that_ends_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # WHY an hour: that is when torch itself would notice
    for number, act in enumerate((scripted.die_once, die_once_when_all_else_is_read)):
        caplog.clear()
        num_workers = 2 - number
        dataset = Scripted(act, tmp_path / str(number))
        loader = make_loader(dataset, num_workers, loader_timeout_s=HOUR_S)
        batches = read(loader)
        assert content(batches) == undisturbed()
        assert content(read(loader, 1)) == undisturbed(1)
        loader.close()
        assert scripted.bad_numbers(batches) == []
        assert "ended with SIGKILL" in caplog.text
        assert caplog.text.count("No sample is lost") == 1
        fewer = ("1 worker instead of 2 workers", "no workers instead of 1 worker")[number]
        assert f"continuing at the same sample with {fewer}" in caplog.text


@pytest.mark.parametrize(("sent", "told"), [(signal.SIGSTOP, ""), (signal.SIGKILL, "SIGKILL")])
def test_idle_workers_may_answer_late_and_a_dead_one_is_told_at_once(
    sent: signal.Signals, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(Scripted(), 2)
    read(loader)
    workers = multiprocessing.active_children()
    for worker in workers:
        os.kill(worker.pid or 0, sent)
    if sent == signal.SIGKILL:
        workers[0].join(60)
    for worker in workers if sent == signal.SIGSTOP else ():
        threading.Timer(0.5, os.kill, (worker.pid, signal.SIGCONT)).start()
    assert content(read(loader, 1)) == undisturbed(1)
    loader.close()
    assert [told in line for line in caplog.messages] == [True] * bool(told)


@pytest.mark.parametrize(
    ("act", "num_workers", "timeout_s", "told"),
    [(crash_always, 2, HOUR_S, "ended with SIGKILL"), (hang_always, 1, 1.0, "no batch in 1 s")],
)
def test_a_sample_that_ends_or_hangs_its_reader_is_named_and_the_rank_lives(
    act: scripted.Act, num_workers: int, timeout_s: float, told: str
) -> None:
    loader = make_loader(Scripted(act), num_workers, loader_timeout_s=timeout_s)
    batches = read(loader)
    loader.close()
    assert scripted.bad_numbers(batches) == [MARKED]
    assert told in next(bad.error for batch in batches for bad in batch.bad)
    assert content(batches) == undisturbed(without=MARKED)


def test_workers_that_do_not_start_are_told_as_such(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # WHY 3 s: within them each healthy worker has started, also on a busy machine
    monkeypatch.setattr(worker_pool, "START_S", 3.0)
    monkeypatch.setattr(worker_pool.WorkerPool, "_has_begun", lambda pool: False)
    loader = make_loader(Scripted(hang_always), 2, loader_timeout_s=1.0)
    assert len(content(read(loader))) == SIZE - 1
    loader.close()
    assert "not all workers have started in 3 s. No sample is lost" in caplog.text


class All(Scripted):
    """The same happens at each sample."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(MARKED)


def test_a_lock_that_a_killed_worker_holds_is_not_waited_for() -> None:
    """A worker takes that of torch's event, for a moment, before each request that it answers."""
    plan = WorkerPlan(num_workers=1, prefetch_factor=2, start_method="forkserver")
    fetcher = Fetcher(Scripted(), seed=0)
    pool = worker_pool.WorkerPool(fetcher, plan, pin_memory=False, timeout_s=HOUR_S)
    pool.start(iter([(0, torch.arange(2))] * 9))
    assert pool.receive() is not None
    vars(pool._iterator)["_workers_done_event"]._cond.acquire()
    call_within(partial(pool.close, is_broken=True), 60)


@pytest.mark.parametrize(
    ("act", "num_workers", "told"),
    [
        (crash_always, 1, "ended or hung the worker each time"),
        (be_unreachable, 1, r"could not be reached.*input/output error"),
        (need_memory, 0, r"out of memory while reading samples \[\d+, .*8 GiB"),
    ],
)
def test_what_ends_all_reading_is_named(act: scripted.Act, num_workers: int, told: str) -> None:
    loader = make_loader(All(act), num_workers)
    loader.sampler.batch_size = 8
    with pytest.raises(LoaderError, match=told):
        read(loader)
    loader.close()


BAD = {raise_unpicklable: "Local: (1, 2)", ask_to_exit: "SystemExit"}


@pytest.mark.parametrize("act", BAD)
@pytest.mark.parametrize(("kind", "num_workers"), scripted.WAYS_TO_READ)
def test_a_bad_sample_costs_itself_only(
    act: scripted.Act, kind: type[Scripted], num_workers: int
) -> None:
    loader = make_loader(kind(act), num_workers)
    batches = read(loader)
    loader.close()
    assert scripted.bad_numbers(batches) == [MARKED]
    assert BAD[act] in next(bad.error for batch in batches for bad in batch.bad)
    found = {index: row[0] for index, row in content(batches).items()}
    assert found == {index: row[0] for index, row in undisturbed(without=MARKED).items()}


def test_a_batch_of_bad_samples_only_is_empty() -> None:
    batch = Fetcher(Scripted(raise_unpicklable), seed=0)[(0, torch.tensor([MARKED]))]
    assert (batch.num_samples, batch.indices.tolist(), batch.targets.tolist()) == (0, [], [])
    assert [bad.index for bad in batch.bad] == [MARKED]


@pytest.mark.parametrize(
    ("error", "num_tries"),
    [(FileNotFoundError(errno.ENOENT, "gone"), 1), (OSError("image file is truncated"), 2)],
)
def test_what_will_not_change_is_not_waited_for(error: OSError, num_tries: int) -> None:
    attempts: list[int] = []

    def fail(flag: Path) -> None:
        attempts.append(1)
        raise error

    assert scripted.bad_numbers(read(make_loader(Scripted(fail)))) == [MARKED]
    assert len(attempts) == num_tries


class Unsendable(Scripted):
    """Its batches hold something that can't be pickled."""

    def __getitems__(self, indices: list[int]) -> Any:
        inputs = {"x": torch.zeros(len(indices), 2), "names": [lambda: 0]}
        return inputs, torch.zeros(len(indices), dtype=torch.int64)


def test_batches_that_cannot_be_sent_do_not_hang(caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(Unsendable(), 1, loader_timeout_s=HOUR_S)
    assert sorted(numbers(read(loader))) == list(range(SIZE))
    loader.close()
    assert "continuing at the same sample with no workers instead of 1 worker" in caplog.text


class SlowToStart(Scripted):
    """A worker takes longer to get it than a batch may take."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(2.5)
        self.__dict__.update(state)


SLOW: list[tuple[Scripted, float, str]] = [
    (Scripted(lambda flag: time.sleep(0.7)), 30.0, "fork"),  # several turns of POLL_S
    (SlowToStart(), 1.0, "forkserver"),  # WHY: a forked worker has the dataset, and is not sent it
]


@pytest.mark.parametrize(("dataset", "timeout_s", "method"), SLOW, ids=["batch", "start"])
def test_what_is_slow_is_waited_for(dataset: Scripted, timeout_s: float, method: str) -> None:
    loader = make_loader(dataset, 1, loader_timeout_s=timeout_s, start_method=method)
    assert numbers(read(loader)) == loader.sampler.order(0).take(0, SIZE).tolist()
    assert loader.reader.num_workers == 1
    loader.close()


SIGNALS_OF_A_RANK = {signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}


def blocked_signals(pid: int | None) -> set[int]:
    mask = int(status_of(pid, "SigBlk"), 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def status_of(pid: int | None, name: str) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    return text.partition(f"{name}:")[2].split()[0]


@pytest.mark.slow
def test_the_fork_server_leaves_them_alone_while_it_imports_torch() -> None:
    loader = make_loader(Scripted(), 1, start_method="forkserver")
    assert content(read(loader)) == undisturbed()
    (worker,) = multiprocessing.active_children()
    fork_server = int(status_of(worker.pid, "PPid"))
    assert fork_server != os.getpid()
    assert blocked_signals(fork_server) >= SIGNALS_OF_A_RANK
    assert not blocked_signals(os.getpid()) & SIGNALS_OF_A_RANK
    loader.close()


def leave_a_worker() -> None:
    loader = make_loader(Scripted(), 1)
    next(loader.windows(0, 0))
    kept.append(loader)


kept: list[object] = []


def test_a_process_that_left_its_workers_ends() -> None:
    """They take no SIGTERM, which multiprocessing sends at the end before it waits for them."""
    run_ranks(leave_a_worker, 1, timeout_s=20)


def test_workers_leave_the_ranks_signals_alone_and_die_with_it() -> None:
    loader = make_loader(Scripted(), 1)
    rest = loader.windows(0, 0)
    first = next(rest)
    (worker,) = multiprocessing.active_children()
    for number in SIGNALS_OF_A_RANK:
        os.kill(worker.pid or 0, number)
    # WHY without: programs that the dataset starts have the worker's mask, and end by SIGTERM
    assert blocked_signals(worker.pid) & SIGNALS_OF_A_RANK == SIGNALS_OF_A_RANK - {signal.SIGTERM}
    assert len([first, *rest]) == loader.sampler.num_windows
    assert multiprocessing.active_children() == [worker]
    loader.close()
    assert not worker.is_alive()


def touch_and_hang(flag: Path) -> None:
    flag.write_text(str(os.getpid()))
    time.sleep(60)  # the test kills it


def read_until_killed(flag: Path) -> None:
    read(make_loader(Scripted(touch_and_hang, flag), 1))


def test_no_worker_outlives_a_killed_rank(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    rank = multiprocessing.get_context("fork").Process(target=read_until_killed, args=(flag,))
    rank.start()
    # WHY: between two requests a worker looks for its parent itself; in a hung sample it can't.
    worker = int(wait_until(lambda: flag.exists() and flag.read_text(), 20, "a worker"))
    assert worker != rank.pid
    assert is_alive(worker)
    rank.kill()
    rank.join(60)
    wait_until(lambda: not is_alive(worker), 5, "the end of the worker")


def test_all_generators_are_seeded_for_a_sample() -> None:
    class Random(Scripted):
        def __getitem__(self, index: int) -> Any:
            drawn = [float(torch.rand(())), random.random(), np.random.rand()]
            return torch.tensor(drawn), 0

    fetcher = Fetcher(Random(), seed=1)
    together = fetcher[(0, torch.tensor([4, 5]))].inputs
    assert torch.equal(fetcher[(0, torch.tensor([5]))].inputs[0], together[1])
    assert not (together[0] == together[1]).any()


def test_a_batch_stays_where_it_is_and_its_images_take_the_memory_format() -> None:
    batch = Batch(torch.zeros(2, 3, 4, 4), torch.zeros(2), torch.arange(2))
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("cpu"), channels_last=True)
    assert moved.inputs.is_contiguous(memory_format=torch.channels_last)


def test_what_was_asked_and_what_runs_is_said(caplog: pytest.LogCaptureFixture) -> None:
    told = "asked 4, running 0"
    plan = WorkerPlan(num_workers=0, prefetch_factor=2, start_method="fork", reason=told)
    BatchReader(Fetcher(Scripted(), seed=0), plan, DataConfig(), pin_memory=False)
    assert "asked 4, running 0" in caplog.text


# How a dataset gets to the workers: its tensors shared, or copied.


class InMemory(Dataset[Any]):
    """Ten samples; each says whether the worker that reads it shares the data."""

    def __init__(self, other: Any = None) -> None:
        self.data, self.other = torch.zeros(10, 2**18), other

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


def read_by_a_worker(source: BatchSource) -> Batch:
    """Read ten samples, twice; fail if the worker was given up."""
    stream = scripted.make_reader(source, 1, "forkserver")
    [_, batch] = list(stream.batches(lambda: iter([(0, torch.arange(10))] * 2)))
    stream.close()
    assert stream.num_workers == 1
    return batch


def are_shared_in_a_worker() -> bool:
    return bool(read_by_a_worker(Fetcher(InMemory(), seed=0)).inputs.all())


def are_shared_with_temporary_files_in(folder: Path) -> bool:
    tempfile.tempdir = str(folder)
    found = are_shared_in_a_worker()
    assert tempfile.gettempdir() == str(folder)
    return found


def test_a_worker_is_reached_though_temporary_paths_are_too_long(tmp_path: Path) -> None:
    folder = tmp_path / ("long " * 30)
    folder.mkdir()
    assert run_ranks(are_shared_with_temporary_files_in, 1, folder) == [True]
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_a_dataset_of_very_many_tensors_has_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    dataset = InMemory([torch.zeros(1) for _ in range(254)])
    assert not read_by_a_worker(Fetcher(dataset, seed=0)).inputs.any()
    assert len(read_by_a_worker(BlockReader(Held(), seed=0)).indices) == 10
    assert not caplog.text


def test_tensors_are_copied_where_sharing_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = WorkerPlan(num_workers=2, prefetch_factor=2, start_method="forkserver")
    many = Fetcher(InMemory([torch.zeros(1) for _ in range(1000)]), seed=0)
    assert worker_pool.plan_sending(many, plan).copies_data
    few = Fetcher(InMemory(), seed=0)
    assert not worker_pool.plan_sending(few, plan).copies_data
    monkeypatch.setattr(worker_pool, "_SHM_MARGIN", 1e12)
    assert worker_pool.plan_sending(few, plan).copies_data
    assert not are_shared_in_a_worker()
