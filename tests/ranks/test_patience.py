"""Questions that may never be answered: to a device, to a store whose server hangs."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hardened_ddp.ranks import store as run_store
from hardened_ddp.ranks.call_timeout import call_within
from hardened_ddp.ranks.store import RunStore


def test_an_answer_or_an_error_comes_through() -> None:
    assert call_within(lambda: "yes", 10) == "yes"
    assert call_within(lambda: None, 10) is None
    with pytest.raises(ZeroDivisionError):
        call_within(lambda: 1 // 0, 10)


def test_a_question_without_an_answer_ends_after_its_limit() -> None:
    answered = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer for 0\.05 s"):
        call_within(answered.wait, 0.05)
    answered.set()


def test_a_store_is_asked_again_only_when_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "ANSWER_LIMIT_S", 0.05)
    answered, asked = threading.Event(), []

    def check(keys: list[str]) -> bool:
        asked.append(keys)
        return answered.wait()

    inner: Any = SimpleNamespace(check=check)
    store = RunStore(inner)
    with pytest.raises(RuntimeError, match=r"no answer for 0\.05 s"):
        store.has("key")
    with pytest.raises(RuntimeError, match="does not answer"):
        store.has("key")
    assert len(asked) == 1
    late = store._unanswered
    assert late is not None
    answered.set()
    assert late.wait(60)
    assert store.has("key")
