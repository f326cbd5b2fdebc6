"""The store of a run as it is asked while training: an answer soon, or an error.

Owns PatientStore, which puts a limit to each question. Does not own: how ranks meet
(rendezvous.py).
What goes wrong here: the rank that serves the store is stopped or hangs, or its cable is cut. Then
torch's own calls wait for ever, and a rank could neither save nor say what happened.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from hardened_ddp.ranks.patience import ask_within

PATIENCE_S = 2.0

T = TypeVar("T")


class PatientStore:
    """A store of which each question is answered within PATIENCE_S, or raises RuntimeError."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._unanswered: threading.Event | None = None
        """Set when the last question that took too long is answered after all."""

    def has(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]))

    def get(self, key: str) -> str:
        return self._ask(lambda: self._store.get(key)).decode()

    def set(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(key, text))

    def claim(self, key: str, name: str) -> str:
        """Write name where nothing is yet; give the name that stands there."""
        return self._ask(lambda: self._store.compare_set(key, "", name)).decode()

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Give what stands under those of the keys that are there."""

        def look() -> dict[str, bytes]:
            there = list(keys)
            if not self._store.check(there):
                there = [key for key in keys if self._store.check([key])]
            return dict(zip(there, self._store.multi_get(there) if there else [], strict=True))

        return {key: raw.decode() for key, raw in self._ask(look).items()}

    def second(self) -> "PatientStore":
        """Give the same store over a connection of its own, where torch can do that.

        WHY: a call that waits for ever would hold up whoever shares its connection.
        """
        clone = getattr(self._store, "clone", None)
        return PatientStore(self._store if clone is None else self._ask(clone))

    def wait(self, keys: list[str], limit_s: float) -> None:
        """Wait for all keys. For the rank that serves the store."""
        self._store.wait(keys, timedelta(seconds=limit_s))

    def _ask(self, question: Callable[[], T]) -> T:
        if self._unanswered is not None and not self._unanswered.is_set():
            # WHY at once: the connection still waits for the last answer
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
