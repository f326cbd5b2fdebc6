"""What the control plane asks of its one store: with many ranks, few questions of each."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from hardened_ddp.guard.hang_consensus import HangConsensus
from hardened_ddp.guard.hang_rules import Report, decide
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.store import MOST_READ, RunStore, do_once, publish_failure, read_failures

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
