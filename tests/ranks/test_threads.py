"""Helper threads and the store: limits on waits for calls that may never return, few questions.

Threads work on the GPU of their rank. And jobs that were stopped as a whole.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hardened_ddp.guard.hang_consensus import HangConsensus
from hardened_ddp.guard.hang_rules import Report, decide
from hardened_ddp.ranks import store as run_store
from hardened_ddp.ranks import threads
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.store import MOST_READ, RunStore, do_once, publish_failure, read_failures
from hardened_ddp.ranks.threads import AwakeTime, HelperThread, call_within, keep_ready, repeating
from tests.harness.ranks import start_ranks
from tests.ranks.test_shared_sum import rendezvous


class Cuda:
    """The device that each thread has, 0 at first, as with CUDA."""

    def __init__(self) -> None:
        self._own = threading.local()
        self.is_lost = False

    def get(self) -> int:
        return getattr(self._own, "index", 0)

    def set(self, index: int) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._own.index = index


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    cuda = Cuda()
    monkeypatch.setattr(threads, "_ready", [])  # those of other tests have other devices
    with mock.patch.multiple(
        "torch.cuda", is_initialized=lambda: True, current_device=cuda.get, set_device=cuda.set
    ):
        cuda.set(5)
        yield cuda


def test_a_thread_works_on_the_gpu_of_the_rank_that_starts_it(cuda: Cuda) -> None:
    seen: list[int] = []

    def work() -> None:
        seen.append(cuda.get())
        seen.append(call_within(cuda.get, 60))  # as the hang watch does, to copy the state

    thread = HelperThread(work, name="work")
    assert (thread.name, thread.daemon) == ("work", True)
    thread.start()
    thread.join(60)
    assert seen == [5, 5]


def test_a_gpu_that_is_lost_does_not_keep_a_thread_from_working(cuda: Cuda) -> None:
    cuda.is_lost = True
    assert call_within(lambda: "told", 60) == "told"
    with mock.patch("torch.cuda.current_device", side_effect=RuntimeError("CUDA error")):
        assert call_within(lambda: "told", 60) == "told"


def test_a_question_to_the_store_touches_no_gpu(cuda: Cuda) -> None:
    # Its driver may be stuck, and torch would keep the GIL while it waits.
    store = RunStore(dist.HashStore())
    with mock.patch("torch.cuda.set_device", side_effect=AssertionError("it would wait")):
        assert store.claim("key", "mine") == "mine"
        with repeating(lambda: None, every_s=60):
            pass


def test_a_question_to_a_device_that_is_stuck_starts_no_thread(cuda: Cuda) -> None:
    # Such a thread would set its GPU, which may wait there, and torch would keep the GIL.
    end = keep_ready(1)
    assert call_within(cuda.get, 60) == 5
    while not threads._ready:  # the thread has answered, and takes the next question soon
        time.sleep(0.001)
    with mock.patch("torch.cuda.set_device", side_effect=AssertionError("it would wait")):
        assert call_within(cuda.get, 60) == 5
    while not threads._ready:
        time.sleep(0.001)
    end()


def test_without_cuda_a_thread_starts_none() -> None:
    with mock.patch("torch.cuda.current_device", side_effect=AssertionError("it would start CUDA")):
        assert call_within(lambda: "told", 60) == "told"


def test_an_answer_or_an_error_comes_through_or_the_limit_of_the_wait() -> None:
    assert call_within(lambda: "yes", 10) == "yes"
    assert call_within(lambda: None, 10) is None
    with pytest.raises(ZeroDivisionError):
        call_within(lambda: 1 // 0, 10)
    answered = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer for 0\.05 s"):
        call_within(answered.wait, 0.05)
    answered.set()


def test_a_store_is_asked_again_only_when_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "ANSWER_LIMIT_S", 0.05)
    answered, asked = threading.Event(), []

    def get(key: str, *values: str) -> bytes:
        asked.append(key)
        answered.wait()
        return b"found"

    store = RunStore(SimpleNamespace(compare_set=get))
    for _ in range(2):
        assert not store.look_up("key")
        assert store.is_gone
    assert len(asked) == 1
    answered.set()
    assert store._is_answered.wait(60)
    assert store.look_up("key") == "found"
    assert not store.is_gone


def test_a_store_whose_connection_broke_is_not_asked_again() -> None:
    """Each try would print a stack of torch's C++."""
    asked = []

    def compare_set(*words: str) -> bytes:
        asked.append(words)
        raise dist.DistNetworkError("Broken pipe")

    store = RunStore(SimpleNamespace(compare_set=compare_set))  # type: ignore[arg-type]
    assert [store.claim("key", "me") for _ in range(3)] == ["me"] * 3
    assert store.is_gone
    assert len(asked) == 1


def test_a_gap_counts_for_the_longest_that_work_explains(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    waited = AwakeTime(2.0)
    for gap_s, total_s in ((1.0, 1.0), (3600.0, 3.0), (2.0, 5.0)):
        now[0] += gap_s
        assert waited.passed_s() == total_s


def test_an_agreement_waits_in_time_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a job that was stopped as a whole; of a sum: tests/guard/test_hangs.py."""
    hours = iter(range(0, 36_000, 3600))
    monkeypatch.setattr(threads.time, "monotonic", lambda: float(next(hours)))
    are_there = iter([False, False, True])
    group = Group(Launch(world_size=2), torch.device("cpu"), timeout_s=3.0)
    work: Any = SimpleNamespace(is_completed=lambda: next(are_there), wait=lambda: None)
    group.finish(work)
    work.is_completed = lambda: False
    with pytest.raises(RuntimeError, match="Timed out waiting 3 s"):
        group.finish(work)


def close_with_an_agreement_under_way() -> bool:
    group = rendezvous(60)
    group.sum_(torch.zeros(1))
    if group.launch.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    work = group.start_max(torch.zeros(1))
    assert work is not None
    group.close()
    return True


def test_a_group_closes_while_an_agreement_waits_for_a_rank_that_is_stopped() -> None:
    with start_ranks(close_with_an_agreement_under_way, 2) as running:
        running.wait_for(lambda: running.living() == [1], timeout_s=20, what="rank 0's end")
        running.kill(1)
        assert running.wait(10).statuses[0] == 0


HUNG = Report(2, 412, int(Phase.FORWARD), 61.0, 60.0)
WAITING = Report(0, 412, int(Phase.ALL_REDUCE), 61.0, 540.0)


class CountingStore:
    """A HashStore that counts the questions to it."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._store, name)


def test_a_rank_reads_the_reasons_of_others_with_one_question() -> None:
    inner: Any = CountingStore()
    store = RunStore(inner)
    assert read_failures(store, reader=0) == {}
    assert inner.asked.total() == 1
    for rank in range(MOST_READ + 3):
        assert publish_failure(store, rank, f"rank {rank}\nfailed")
    inner.asked.clear()
    found = read_failures(store, reader=1)
    assert list(found) == [rank for rank in range(MOST_READ) if rank != 1]
    assert found[3] == "rank 3\nfailed"
    assert inner.asked == {"compare_set": 1, "set": 1}, "one question, and that it has read them"


def test_work_that_never_ends_is_waited_for_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a disk hangs: once the others have left, the launcher ends the rank at work."""
    monkeypatch.setattr("hardened_ddp.ranks.store.MOST_WAIT_S", 0.5)
    inner: Any = CountingStore()
    may_end = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(do_once, RunStore(inner), "save", may_end.wait, rank=0, world_size=2)
        other = pool.submit(
            do_once, RunStore(inner), "save", may_end.is_set, rank=1, world_size=2, head_start_s=30
        )
        try:
            assert not other.result(30)
        finally:
            may_end.set()


@pytest.mark.parametrize("how", ["it fails", "it died", "the store died with it"])
def test_what_one_rank_can_not_do_another_does(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardened_ddp.ranks.store.SILENT_S", 1.5)
    inner: Any = CountingStore()
    store, done = RunStore(inner), []

    def work() -> bool:
        done.append(1)
        return True

    with ThreadPoolExecutor(1) as pool:
        if how == "it fails":
            first = pool.submit(do_once, store, "save", lambda: False, rank=0, world_size=2)
        else:
            inner.set("save/0", "0")
        if how == "the store died with it":
            monkeypatch.setattr(CountingStore, "compare_set", _raise_once_claimed, raising=False)
        assert do_once(store, "save", work, rank=1, world_size=2, head_start_s=30.0)
        assert how != "it fails" or not first.result(30)
    assert done == [1]


def _raise_once_claimed(self: Any, key: str, expected: str, value: str) -> Any:
    if not expected:  # a claim
        return self._store.compare_set(key, expected, value)
    raise RuntimeError("Connection reset by peer")


def test_without_a_store_or_teller_a_rank_tells_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardened_ddp.ranks.store.SILENT_S", 1.5)
    told: list[int] = []
    assert do_once(RunStore(), "x", lambda: told.append(1), rank=1, world_size=1)
    inner: Any = CountingStore()
    inner.set("x/0", "0")  # rank 0 died before it told it
    assert do_once(RunStore(inner), "x", lambda: told.append(2), rank=2, world_size=3)

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    tell = partial(told.append, 3)
    assert do_once(RunStore(Gone()), "x", tell, rank=3, world_size=3, head_start_s=9.0)
    assert told == [1, 2, 3]


def test_a_neighbour_that_leaves_amid_reports_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardened_ddp.guard.hang_consensus.COLLECT_S", 0.3)
    store = RunStore(dist.HashStore())
    mine, other = (HangConsensus(store, rank=rank, world_size=2) for rank in (0, 1))
    other.leave()
    gone_at = time.monotonic() + 0.2

    def neighbours() -> dict[int, Report]:
        return {} if time.monotonic() > gone_at else {1: replace(HUNG, rank=1)}

    assert mine.agree(WAITING, neighbours, is_witness=True, wait_limit_s=540.0) is None


def test_a_verdict_on_hundreds_of_ranks_stays_short() -> None:
    reports = [replace(HUNG, rank=rank) for rank in range(500)]
    verdict = decide(reports, wait_limit_s=540.0)
    assert len(verdict.ranks) == 500
    assert len(verdict.text) < 600
    assert "and 492 more ranks like these" in verdict.text
