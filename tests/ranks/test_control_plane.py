"""What the control plane asks of its one store: with many ranks, few questions of each."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hardened_ddp.guard.hang_consensus import HangConsensus
from hardened_ddp.guard.hang_rules import Hang, Report, decide
from hardened_ddp.guard.neighbours import Neighbours
from hardened_ddp.ranks.phase import ALARM, Phase, Tracker
from hardened_ddp.ranks.store import (
    BEAT_S,
    MOST_READ,
    RunStore,
    await_listeners,
    do_once,
    publish_failure,
    read_failures,
    tell_once,
)
from tests.harness.ranks import run_program

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


def test_of_ranks_with_the_same_error_one_tells_it_and_leaves_last() -> None:
    inner: Any = CountingStore()
    told: list[tuple[int, str]] = []

    def fail(rank: int, text: str, defer_s: float) -> bool:
        store = RunStore(inner)
        assert publish_failure(store, rank, text, is_last=False)

        def tell() -> None:
            time.sleep(0.1)  # the others must wait for it
            told.append((rank, text))

        is_mine = tell_once(store, rank, text, tell, world_size=6, defer_s=defer_s)
        assert any(text == other for _, other in told), f"rank {rank} left before it was told"
        return is_mine

    def fail_all(ranks: range, text: str, defer_s: float) -> list[int]:
        with ThreadPoolExecutor(len(ranks)) as pool:
            tellers = pool.map(lambda rank: fail(rank, text, defer_s), reversed(ranks))
            return [rank for rank, is_mine in zip(reversed(ranks), tellers, strict=True) if is_mine]

    assert len(fail_all(range(6), "step 3", 0.0)) == 1
    assert fail_all(range(6), "a user's mistake", 30.0) == [0]
    assert fail_all(range(4, 5), "of one rank", 0.0) == [4]
    assert fail_all(range(5, 6), "of one rank that defers to none", 0.05) == [5]
    assert len(told) == 4
    await_listeners(RunStore(inner), 6, 0.0)  # all have heard, so rank 0 may end the store


def test_of_ranks_that_can_do_the_same_one_does_it_and_the_others_wait_for_its_end() -> None:
    inner: Any = CountingStore()
    begun, may_end = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return may_end.wait(60)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(do_once, RunStore(inner), "save", work, rank=1, world_size=3)
        assert begun.wait(30)
        other = pool.submit(do_once, RunStore(inner), "save", lambda: True, rank=2, world_size=3)
        with pytest.raises(TimeoutError):  # when it has left, the launcher ends the first one
            other.result(2 * BEAT_S)
        may_end.set()
        assert first.result(30)
        assert not other.result(30)


def test_work_that_never_ends_is_not_waited_for_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_what_one_rank_can_not_do_another_one_does(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_rank_whose_store_is_gone_or_whose_teller_died_tells_its_error_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hardened_ddp.ranks.store.SILENT_S", 1.5)
    told: list[int] = []
    assert tell_once(RunStore(), 1, "x", lambda: told.append(1), world_size=1)
    inner: Any = CountingStore()
    inner.set(f"told/{sha256(b'x').hexdigest()}/0", "0")  # rank 0 died before it told it
    assert tell_once(RunStore(inner), 2, "x", lambda: told.append(2), world_size=3)

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    gone: Any = Gone()
    assert tell_once(RunStore(gone), 3, "x", lambda: told.append(3), world_size=3, defer_s=9.0)
    assert told == [1, 2, 3]


def test_missing_keys_are_found_with_few_questions() -> None:
    inner: Any = CountingStore()
    store = RunStore(inner)
    for number in range(256):
        if number not in (7, 200):
            store.set(f"key/{number}", str(number))
    inner.asked.clear()
    found = store.read([f"key/{number}" for number in range(256)])
    assert len(found) == 254
    assert found["key/9"] == "9"
    assert inner.asked.total() < 40
    assert store.read([]) == {}
    assert store.read(["nowhere"]) == {}
    assert store.look_up("nowhere") == ""


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_ranks_agree_on_who_hangs_and_all_but_the_witnesses_only_wait(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hardened_ddp.guard.hang_consensus.COLLECT_S", 0.3)
    inner: Any = CountingStore()
    world_size = 6

    def judge(rank: int) -> Hang | None:
        mine = replace(HUNG if rank == HUNG.rank else WAITING, rank=rank)
        consensus = HangConsensus(RunStore(inner), rank=rank, world_size=world_size)
        consensus.beat(mine, 1, (0, {}))
        consensus.alarm("hang" if rank == 1 else "")
        if is_silent and rank == HUNG.rank:
            return None
        return consensus.agree(mine, dict, is_witness=rank == 1, wait_limit_s=540.0)

    with ThreadPoolExecutor(world_size) as pool:
        verdicts = list(pool.map(judge, range(world_size)))
    expected = "rank 2, step 412, forward, 61 s" + (", no heartbeat" if is_silent else "; ranks 0")
    for rank, verdict in enumerate(verdicts):
        if not (is_silent and rank == HUNG.rank):
            assert verdict is not None
            assert verdict.ranks == (HUNG.rank,)
            assert verdict.text.startswith(expected)
    assert inner.asked["compare_set"] < 60


def test_a_neighbour_that_leaves_while_reports_are_awaited_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hardened_ddp.guard.hang_consensus.COLLECT_S", 0.3)
    store = RunStore(dist.HashStore())
    mine, other = (HangConsensus(store, rank=rank, world_size=2) for rank in (0, 1))
    other.leave()
    gone_at = time.monotonic() + 0.2

    def neighbours() -> dict[int, Report]:
        return {} if time.monotonic() > gone_at else {1: replace(HUNG, rank=1)}

    assert mine.agree(WAITING, neighbours, is_witness=True, wait_limit_s=540.0) is None


def test_one_rank_of_a_machine_asks_for_an_alarm_until_it_has_seen_one() -> None:
    others: Any = {rank: SimpleNamespace(silent_s=0.0, words=Tracker().words) for rank in (0, 2)}
    neighbours = object.__new__(Neighbours)
    neighbours._rank, neighbours._found = 1, others
    assert not neighbours.must_ask(0, tick_s=1.0), "rank 0 asks"
    others[2].words[ALARM] = 1
    assert neighbours.must_ask(0, tick_s=1.0)
    assert not neighbours.must_ask(1, tick_s=1.0), "this rank knows that alarm"
    others[0].silent_s = 3.5
    assert neighbours.must_ask(1, tick_s=1.0), "rank 0 is gone"
    neighbours._found = {}
    assert neighbours.must_ask(0, tick_s=1.0), "alone on its machine"


def test_a_rank_of_many_beats_more_rarely_and_is_not_silent_for_that() -> None:
    inner: Any = CountingStore()
    beating, watching = (HangConsensus(RunStore(inner), rank=r, world_size=2000) for r in (1, 0))
    report = replace(WAITING, rank=1, limit_s=2.0)
    for number in range(9):
        beating.beat(report, number, (0, {}))
        [seen] = watching.watch_beats(1.0).values()
        assert not seen.state
    assert inner.asked["set"] == 3
    silent = [watching.watch_beats(1.0)[1].state for _ in range(10)]
    assert silent[0] == ""
    assert silent[-1] != ""


def test_a_verdict_on_hundreds_of_ranks_stays_short() -> None:
    reports = [replace(HUNG, rank=rank) for rank in range(500)]
    verdict = decide(reports, wait_limit_s=540.0)
    assert verdict is not None
    assert len(verdict.ranks) == 500
    assert len(verdict.text) < 600
    assert "and 492 more ranks like these" in verdict.text


@pytest.mark.slow
def test_the_benchmark_measures_each_part_with_few_ranks() -> None:
    done = run_program(
        ["python", "benchmarks/control_plane.py", "--ranks", "12"], timeout_s=170
    ).ok()
    rows = [line for line in done.stdout.splitlines() if " bar " in line]
    assert len(rows) == 9
    # WHY not the sampler's: a tenth of a millisecond is missed on a machine that has other work
    assert all(row.endswith("ok") or row.startswith("sampler") for row in rows), done.stdout
