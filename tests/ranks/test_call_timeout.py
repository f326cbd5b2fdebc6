"""Limits on waits: calls that may never return, and jobs that were stopped as a whole."""

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hardened_ddp.ranks import store as run_store
from hardened_ddp.ranks import threads
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.store import RunStore
from hardened_ddp.ranks.threads import AwakeTime, call_within
from tests.harness.ranks import run_ranks, start_ranks
from tests.ranks.test_shared_sum import rendezvous

TIMEOUT_S, PAUSE_S = 2.0, 4.0


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

    inner: Any = SimpleNamespace(compare_set=get)
    store = RunStore(inner)
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


def test_a_gap_counts_for_the_longest_that_running_explains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [50.0]
    monkeypatch.setattr(threads.time, "monotonic", lambda: now[0])
    waited = AwakeTime(2.0)
    for gap_s, total_s in ((1.0, 1.0), (3600.0, 3.0), (2.0, 5.0)):
        now[0] += gap_s
        assert waited.passed_s() == total_s


def go_on_after_a_pause(what: str) -> bool:
    """Rank 1 comes late each time, so that the pause falls into a wait of rank 0."""
    group = rendezvous(TIMEOUT_S)
    pids = group.gather_json(os.getpid())
    helper = os.fork() if group.launch.rank == 0 else 0
    if helper == 0 and group.launch.rank == 0:
        pause(pids)
    was_paused, last = False, time.monotonic()
    for number in range(200):
        if group.launch.rank == 1:
            time.sleep(0.02)
        meet(group, what, number)
        now = time.monotonic()
        was_paused, last = was_paused or now - last > PAUSE_S / 2, now
    if helper:
        os.waitpid(helper, 0)
    group.close()
    return was_paused


def pause(pids: list[int]) -> None:
    time.sleep(0.5)  # WHY: not a wait for something, the pause may come at any time
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    for pid in pids:  # rank 0 first, which then finds that rank 1 is not there
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    os._exit(0)


def meet(group: Group, what: str, number: int) -> None:
    mine = torch.tensor([float(number)])
    if what == "sum":
        assert group.sum_(mine).item() == 2 * number
        return
    work = group.start_max(mine)
    assert work is not None
    group.finish(work)
    assert mine.item() == number


@pytest.mark.slow
@pytest.mark.parametrize("what", ["sum", "agreement"])
def test_ranks_that_were_stopped_for_longer_than_the_timeout_go_on(what: str) -> None:
    assert run_ranks(go_on_after_a_pause, 2, what) == [True, True]


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
