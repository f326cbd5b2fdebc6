"""The store of a run during training: each call returns soon, or raises.

Owns PatientStore, which limits the time of each call. Does not own: the rendezvous of the ranks
(rendezvous.py).
What goes wrong here: the rank that serves the store is stopped or hangs, or its cable is cut. Then
torch's own calls wait forever, and a rank could neither save nor report what happened.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from hardened_ddp.ranks.patience import ask_within

PATIENCE_S = 2.0
_NOTHING = "\0nothing"

# Times the number of ranks: one thread serves the store for all of them.
_POLL_PER_RANK_S = 2e-4
_LEAST_POLL_S = 0.02

T = TypeVar("T")


class PatientStore:
    """A store whose calls return within PATIENCE_S, or raise RuntimeError."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._unanswered: threading.Event | None = None
        """The last call that took too long; set when it returns after all."""

    def has(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]))

    def look_up(self, key: str) -> str:
        """Return the value of key; empty if there is none.

        WHY compare_set: one question. check and then get, which waits for the key, are three.
        """
        raw = self._ask(lambda: self._store.compare_set(key, _NOTHING, _NOTHING))
        return "" if raw == _NOTHING.encode() else raw.decode()

    def set(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(key, text))

    def add(self, key: str, number: int = 1) -> int:
        """Add to the number under key, 0 if there is none, and return the sum."""
        return self._ask(lambda: int(self._store.add(key, number)))

    def claim(self, key: str, name: str) -> str:
        """Write name under key if nothing is there yet; return what is there then."""
        return self._ask(lambda: self._store.compare_set(key, "", name)).decode()

    def append(self, key: str, text: str) -> None:
        """Add text to the end of the value of key."""
        self._ask(lambda: self._store.append(key, text))  # type: ignore[attr-defined]  # no stub

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the values of those keys that exist."""

        def existing(keys: Sequence[str]) -> list[str]:
            # WHY halves: to find a few missing keys takes a few questions, not one for each key
            if self._store.check(list(keys)):
                return list(keys)
            middle = len(keys) // 2
            return [] if not middle else existing(keys[:middle]) + existing(keys[middle:])

        def look() -> dict[str, bytes]:
            there = existing(keys) if keys else []
            return dict(zip(there, self._store.multi_get(there) if there else [], strict=True))

        return {key: raw.decode() for key, raw in self._ask(look).items()}

    def second(self) -> "PatientStore":
        """Return the same store over a separate connection, if torch supports that.

        WHY: a call that waits forever would block everybody who shares its connection.
        """
        clone = getattr(self._store, "clone", None)
        return PatientStore(self._store if clone is None else self._ask(clone))

    def wait(self, keys: list[str], limit_s: float) -> None:
        """Wait until all keys exist. For the rank that serves the store."""
        self._store.wait(keys, timedelta(seconds=limit_s))

    def _ask(self, question: Callable[[], T]) -> T:
        if self._unanswered is not None and not self._unanswered.is_set():
            # WHY at once: the connection is still blocked by the last call
            raise RuntimeError("the store does not answer")
        is_answered = threading.Event()

        def ask() -> T:
            try:
                return question()
            finally:
                is_answered.set()

        try:
            return ask_within(ask, PATIENCE_S)
        except TimeoutError:
            self._unanswered = is_answered
            raise RuntimeError(f"the store gave no answer for {PATIENCE_S:g} s") from None


def poll_s(world_size: int) -> float:
    """Return how long each of so many ranks waits until it asks the store again."""
    return max(_LEAST_POLL_S, _POLL_PER_RANK_S * world_size)
