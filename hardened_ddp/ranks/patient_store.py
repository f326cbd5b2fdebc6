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

T = TypeVar("T")


class PatientStore:
    """A store whose calls return within PATIENCE_S, or raise RuntimeError."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._unanswered: threading.Event | None = None
        """The last call that took too long; set when it returns after all."""

    def has(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]))

    def get(self, key: str) -> str:
        return self._ask(lambda: self._store.get(key)).decode()

    def set(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(key, text))

    def add(self, key: str, number: int = 1) -> int:
        """Add to the number under key, 0 if there is none, and return the sum."""
        return self._ask(lambda: int(self._store.add(key, number)))

    def claim(self, key: str, name: str) -> str:
        """Write name under key if nothing is there yet; return what is there then."""
        return self._ask(lambda: self._store.compare_set(key, "", name)).decode()

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the values of those keys that exist."""

        def look() -> dict[str, bytes]:
            there = list(keys)
            if not self._store.check(there):
                there = [key for key in keys if self._store.check([key])]
            return dict(zip(there, self._store.multi_get(there) if there else [], strict=True))

        return {key: raw.decode() for key, raw in self._ask(look).items()}

    def read_numbered(self, counter: str, prefix: str, most: int) -> list[str]:
        """Return the values of prefix1, prefix2 and so on, as many as counter says, at most most.

        Those that are counted but not written yet are left out.
        """

        def look() -> list[bytes]:
            if not self._store.check([counter]):
                return []
            count = min(int(self._store.get(counter)), most)
            keys = [f"{prefix}{number}" for number in range(1, count + 1)]
            there = [key for key in keys if self._store.check([key])]
            return list(self._store.multi_get(there)) if there else []

        return [raw.decode() for raw in self._ask(look)]

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
