"""The store of a run during training, and the reasons of ranks that failed, which peers read there.

Owns RunStore, which limits the time of each call; the keys of the reasons, and which of several
ranks with the same reason tells it. All reasons are lines of one value: so a peer that lost a rank
reads them with one question, and not with one for each of a thousand ranks.
Does not own: the rendezvous of the ranks (rendezvous.py).
What goes wrong here: the rank that serves the store is stopped or hangs, or its cable is cut. Then
torch's own calls wait forever, and a rank could neither save nor report what happened.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from typing import TypeVar

import torch.distributed as dist

from hardened_ddp.ranks.call_timeout import call_within

log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 2.0
TELL_LIMIT_S = 2.0
"""How long a rank waits for another one that is about to tell the same error."""

DEFER_S = 4.0
"""How long a rank waits for rank 0, which may be slower, before it tells such an error itself."""

MOST_READ = 8  # those that failed first; later ones are consequences as a rule

_COUNTER, _REASONS = "failures", "failures/reasons"
_NOTHING = "\0nothing"

# Times the number of ranks: one thread serves the store for all of them.
_POLL_PER_RANK_S = 2e-4
_LEAST_POLL_S = 0.02

T = TypeVar("T")


class RunStore:
    """A store whose calls return within ANSWER_LIMIT_S, or raise RuntimeError."""

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

    def second(self) -> "RunStore":
        """Return the same store over a separate connection, if torch supports that.

        WHY: a call that waits forever would block everybody who shares its connection.
        """
        clone = getattr(self._store, "clone", None)
        return RunStore(self._store if clone is None else self._ask(clone))

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
            return call_within(ask, ANSWER_LIMIT_S)
        except TimeoutError:
            self._unanswered = is_answered
            raise RuntimeError(f"the store gave no answer for {ANSWER_LIMIT_S:g} s") from None


def poll_s(world_size: int) -> float:
    """Return how long each of so many ranks waits until it asks the store again."""
    return max(_LEAST_POLL_S, _POLL_PER_RANK_S * world_size)


def ask_store(store: RunStore | None, question: Callable[[RunStore], T], *, otherwise: T) -> T:
    """Ask the store. Return otherwise if there is none, or it died or hangs. Rank-local.

    WHY: it may have died with the rank that served it, and then this rank goes on by itself.
    """
    try:
        return otherwise if store is None else question(store)
    except RuntimeError as error:
        log.debug("the store does not answer: %s", error)
        return otherwise


def publish_failure(store: RunStore | None, rank: int, text: str, *, is_last: bool = True) -> bool:
    """Write why a rank failed; return whether that was possible. Rank-local.

    is_last: it asks the store for nothing after this.
    """

    def publish(store: RunStore) -> bool:
        if store.add(_COUNTER) <= MOST_READ:
            store.append(_REASONS, json.dumps([rank, text]) + "\n")
        if is_last:
            _note_heard(store, rank)  # it has a cause of its own, and reads no other
        return True

    return ask_store(store, publish, otherwise=False)


def tell_once(
    store: RunStore | None,
    rank: int,
    text: str,
    tell: Callable[[], None],
    *,
    world_size: int,
    defer_s: float = 0.0,
) -> bool:
    """Call tell unless another rank tells the same text; return whether it was called. Rank-local.

    The first rank that comes tells it. The others wait until that is done. WHY: when one has left,
    the launcher ends the rest, which might be the one that is about to tell it.
    defer_s: how long rank 0 is waited for, where all ranks have such an error as a rule.
    """
    key = f"told/{sha256(text.encode()).hexdigest()}"

    def is_told_by_another(store: RunStore) -> bool:
        if rank > 0 and defer_s > 0:
            _await_text(store, key, limit_s=defer_s, world_size=world_size)
        if store.claim(key, str(rank)) == str(rank):
            return False
        return _await_text(store, f"{key}/done", limit_s=TELL_LIMIT_S, world_size=world_size)

    is_mine = not ask_store(store, is_told_by_another, otherwise=False)
    if is_mine:
        tell()
        ask_store(store, lambda store: store.set(f"{key}/done", "told"), otherwise=None)
    ask_store(store, lambda store: _note_heard(store, rank), otherwise=None)
    return is_mine


def _note_heard(store: RunStore, rank: int) -> None:
    """Say that this rank reads no more of the store, which await_listeners waits for."""
    store.set(f"heard/{rank}", "")


def _await_text(store: RunStore, key: str, *, limit_s: float, world_size: int) -> bool:
    """Wait until there is a text under key; return whether there is."""
    end = time.monotonic() + limit_s
    while not store.look_up(key):
        if time.monotonic() > end:
            return False
        time.sleep(poll_s(world_size))
    return True


def read_failures(store: RunStore | None, *, reader: int) -> dict[int, str]:
    """Return the reason of each other rank that failed, as far as known. Rank-local."""
    found: dict[int, str] = {}
    lines = ask_store(store, lambda store: store.look_up(_REASONS), otherwise="").splitlines()
    for rank, reason in map(json.loads, lines):
        if rank != reader:
            found.setdefault(rank, reason)
    if found:
        ask_store(store, lambda store: _note_heard(store, reader), otherwise=None)
    return found


def await_listeners(store: RunStore | None, world_size: int, limit_s: float) -> None:
    """Wait until all ranks but 0 have heard, at most limit_s. For rank 0, which ends the store."""
    heard = [f"heard/{rank}" for rank in range(1, world_size)]
    ask_store(store, lambda store: store.wait(heard, limit_s), otherwise=None)
