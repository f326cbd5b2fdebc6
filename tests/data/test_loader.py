"""Batches: every sample once, whoever reads it, and whatever happens to the reader."""

import errno
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from hardened_ddp.data.batches import read_errors, worker_pool
from hardened_ddp.data.batches.batch import Batch, BatchSource
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.loader import BatchReader
from hardened_ddp.data.batches.workers import WorkerPlan
from hardened_ddp.errors import LoaderError
from hardened_ddp.ranks.threads import call_within
from hardened_ddp.settings.config import DataConfig
from hardened_ddp.streams.block_reader import BlockReader
from tests.data.scripted import (
    MARKED,
    SIZE,
    WAYS_TO_READ,
    Act,
    Listed,
    Scripted,
    Whole,
    bad_numbers,
    content,
    die_once,
    make_loader,
    numbers,
    read,
)
from tests.harness.processes import HOUR_S, is_alive, wait_until
from tests.harness.ranks import run_ranks


def die_once_when_all_else_is_read(flag: Path) -> None:
    if not flag.exists():
        time.sleep(0.5)  # WHY: until what this worker sent before has been received
        die_once(flag)


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


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_errors, "WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(worker_pool, "POLL_S", 0.1)


@pytest.mark.parametrize("dataset", [Scripted(), Whole(), Listed()], ids=["one", "whole", "listed"])
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
    alone = content(read(make_loader(Scripted())))
    for world_size in (1, 2, 3, 4):
        ranks = [make_loader(dataset, rank=r, world_size=world_size) for r in range(world_size)]
        together = {}
        for loader in ranks:
            together.update(content(read(loader)))
        assert together == alone
    assert content(read(make_loader(Scripted()), epoch=1)) != alone


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
    expected = make_loader(Scripted())
    assert content(read(loader, 0)) == content(read(expected, 0))
    first = {process.pid for process in multiprocessing.active_children()}
    assert bool(first) == is_lasting
    windows = loader.windows(1, 0)
    for _ in windows:  # left in the middle, as a stop does it
        second = {process.pid for process in multiprocessing.active_children()}
        break
    assert (second == first) == is_lasting
    assert content(read(loader, 1)) == content(read(expected, 1))
    loader.close()


def test_a_worker_that_ends_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # WHY an hour: that is when torch itself would notice
    for number, act in enumerate((die_once, die_once_when_all_else_is_read)):
        caplog.clear()
        num_workers = 2 - number
        dataset = Scripted(act, tmp_path / str(number))
        loader = make_loader(dataset, num_workers, loader_timeout_s=HOUR_S)
        batches = read(loader)
        assert content(batches) == content(read(make_loader(Scripted())))
        assert content(read(loader, 1)) == content(read(make_loader(Scripted()), 1))
        loader.close()
        assert bad_numbers(batches) == []
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
    assert content(read(loader, 1)) == content(read(make_loader(Scripted()), 1))
    loader.close()
    assert [told in line for line in caplog.messages] == [True] * bool(told)


@pytest.mark.parametrize(
    ("act", "num_workers", "timeout_s", "told"),
    [(crash_always, 2, HOUR_S, "ended with SIGKILL"), (hang_always, 1, 1.0, "no batch in 1 s")],
)
def test_a_sample_that_ends_or_hangs_its_reader_is_named_and_the_rank_lives(
    act: Act, num_workers: int, timeout_s: float, told: str
) -> None:
    loader = make_loader(Scripted(act), num_workers, loader_timeout_s=timeout_s)
    batches = read(loader)
    loader.close()
    assert bad_numbers(batches) == [MARKED]
    assert told in next(bad.error for batch in batches for bad in batch.bad)
    expected = content(read(make_loader(Scripted())))
    del expected[MARKED]
    assert content(batches) == expected


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
def test_what_ends_all_reading_is_named(act: Act, num_workers: int, told: str) -> None:
    loader = make_loader(All(act), num_workers)
    loader.sampler.batch_size = 8
    with pytest.raises(LoaderError, match=told):
        read(loader)
    loader.close()


BAD = {raise_unpicklable: "Local: (1, 2)", ask_to_exit: "SystemExit"}


@pytest.mark.parametrize("act", BAD)
@pytest.mark.parametrize(("kind", "num_workers"), WAYS_TO_READ)
def test_a_bad_sample_costs_itself_only(act: Act, kind: type[Scripted], num_workers: int) -> None:
    loader = make_loader(kind(act), num_workers)
    batches = read(loader)
    loader.close()
    assert bad_numbers(batches) == [MARKED]
    assert BAD[act] in next(bad.error for batch in batches for bad in batch.bad)
    expected = content(read(make_loader(Scripted())))
    del expected[MARKED]
    found = {index: row[0] for index, row in content(batches).items()}
    assert found == {index: row[0] for index, row in expected.items()}


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

    assert bad_numbers(read(make_loader(Scripted(fail)))) == [MARKED]
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
    assert content(read(loader)) == content(read(make_loader(Scripted())))
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
    plan = WorkerPlan(num_workers=1, prefetch_factor=2, start_method="forkserver")
    stream = BatchReader(source, plan, DataConfig(), pin_memory=False)
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
