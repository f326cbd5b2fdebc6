"""The store of a run during training, and the reasons of ranks that failed, which peers read there.

RunStore limits the time of each call: if the rank that serves the store is stopped or hangs, or its
cable is cut, torch's own calls wait forever, and a rank could neither save nor report what
happened. All reasons are lines of one value, which a peer that lost a rank reads at once.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from hardened_ddp.ranks.threads import AwakeTime, call_within, repeating

log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 2.0
# How often a rank at work for all says so, and after how long a silence another one does it.
BEAT_S, SILENT_S = 1.0, 5.0
MOST_WAIT_S = 600.0  # for such work: its disk may hang, and then the launcher must end it
MOST_TRIES = 3  # ranks that try such work, one after the other: what fails on so many fails on all
# How long a rank waits for rank 0, which may be slower, before it tells such an error itself.
DEFER_S = 4.0
MOST_READ = 8  # those that failed first; later ones are consequences as a rule

HEARD = "heard/{}"
_COUNTER, _REASONS = "failures", "failures/reasons"
_NOTHING, _DONE, _FAILED = "\0nothing", "done", "failed"

# Times the number of ranks: one thread serves the store for all of them.
_POLL_PER_RANK_S = 2e-4
_LEAST_POLL_S = 0.02

T = TypeVar("T")


class RunStore:
    """The store of a run. Each call returns within ANSWER_LIMIT_S.

    Without a store, or if it died or hangs, nothing is found and nothing is kept: it may have died
    with the rank that served it, and then this rank goes on by itself.
    """

    def __init__(self, store: dist.Store | None = None) -> None:
        self._store = store
        self.is_gone = store is None  # the last call got no answer
        self._is_answered = threading.Event()  # the last call that failed, perhaps later
        self._is_answered.set()

    def look_up(self, key: str) -> str:
        nothing = _NOTHING.encode()  # WHY compare_set: get waits for a key that is missing
        raw = self._ask(lambda s: s.compare_set(key, _NOTHING, _NOTHING), otherwise=nothing)
        return "" if raw == nothing else raw.decode()

    def set(self, key: str, text: str) -> None:
        self._ask(lambda store: store.set(key, text), otherwise=None)

    def count(self, key: str) -> int:
        """Add 1 to the number under key, 0 if there is none, and return the sum."""
        return self._ask(lambda store: int(store.add(key, 1)), otherwise=0)

    def claim(self, key: str, name: str) -> str:
        """Write name under key if nothing is there yet; return what is there then."""
        mine = name.encode()
        return self._ask(lambda store: store.compare_set(key, "", name), otherwise=mine).decode()

    def append(self, key: str, text: str) -> None:
        self._ask(
            lambda store: store.append(key, text),  # type: ignore[attr-defined]  # no stub
            otherwise=None,
        )

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        def look(store: dist.Store) -> dict[str, bytes]:
            # WHY all at once, first: as a rule only the first moments of a run lack some
            has_all = store.check(list(keys))
            there = [key for key in keys if has_all or store.check([key])]
            return dict(zip(there, store.multi_get(there) if there else [], strict=True))

        nothing: dict[str, bytes] = {}
        return {key: raw.decode() for key, raw in self._ask(look, otherwise=nothing).items()}

    def second(self) -> "RunStore":
        """Return the same store over a connection that no call of others can block."""
        return RunStore(
            self._ask(lambda store: store.clone(), otherwise=None)  # type: ignore[attr-defined]  # no stub
        )

    def note_heard(self, rank: int) -> None:
        """Say that this rank reads no more here: rank 0, which serves the store, waits for that."""
        self.set(HEARD.format(rank), "")

    def wait(self, keys: list[str], limit_s: float) -> None:
        """Wait until all keys exist, at most limit_s. For the rank that serves the store."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.wait(keys, timedelta(seconds=limit_s))

    def _ask(self, question: Callable[[dist.Store], T], *, otherwise: T) -> T:
        store, is_answered = self._store, threading.Event()
        # WHY not asked then: the connection is still blocked by the last call
        if store is None or not self._is_answered.is_set():
            self.is_gone = True
            return otherwise

        def ask() -> T:
            try:
                return question(store)
            finally:
                is_answered.set()

        try:
            answer = call_within(ask, ANSWER_LIMIT_S, uses_gpu=False)
        except (RuntimeError, TimeoutError) as error:
            log.debug("the store does not answer: %s", error)
            self._is_answered, self.is_gone = is_answered, True
            if isinstance(error, dist.DistNetworkError):
                self._store = None  # WHY: it never connects again, and torch prints each try
            return otherwise
        self.is_gone = False
        return answer


def poll_s(world_size: int) -> float:
    return max(_LEAST_POLL_S, _POLL_PER_RANK_S * world_size)


def publish_failure(store: RunStore, rank: int, text: str) -> bool:
    """Write why a rank failed; return whether that was possible."""
    if 0 < store.count(_COUNTER) <= MOST_READ:
        store.append(_REASONS, json.dumps([rank, text]) + "\n")
    return not store.is_gone


def do_once(
    store: RunStore,
    key: str,
    work: Callable[[], object],
    *,
    rank: int,
    world_size: int,
    head_start_s: float = 0.0,
) -> bool:
    """Have one of the ranks that call this do work; return whether this rank did.

    The first one that comes does it. The others wait: when one has left, the launcher ends the
    rest, also the one at work. If it can't do it (False), or is silent because it died, another one
    does; without a store each rank. head_start_s: how long rank 0 is waited for.
    """
    end = time.monotonic() + head_start_s
    while rank > 0 and time.monotonic() < end and not (store.look_up(f"{key}/0") or store.is_gone):
        time.sleep(poll_s(world_size))
    mine, can_work = str(rank), True
    for number in range(MOST_TRIES):
        claim = f"{key}/{number}"
        if can_work and store.claim(claim, mine) == mine:  # also if the store died with rank 0
            with repeating(partial(_beat, store, claim, mine), every_s=BEAT_S):
                can_work = work() is not False
            store.set(claim, _DONE if can_work else _FAILED)
            if can_work:
                return True
        elif _await_end(store, claim, world_size=world_size) != _FAILED:
            return False
    return False


def _beat(store: RunStore, claim: str, mine: str) -> None:
    store.set(claim, f"{mine} {time.monotonic()}")


def _await_end(store: RunStore, claim: str, *, world_size: int) -> str:
    """Wait until the work that another rank claimed has ended; return how.

    Empty: no rank claimed it, or it takes longer than MOST_WAIT_S.
    """
    seen, silent, all_of_it = "", AwakeTime(BEAT_S), AwakeTime(BEAT_S)
    while silent.passed_s() < SILENT_S:
        text = store.look_up(claim)
        if store.is_gone or text in (_DONE, _FAILED):
            return text or _FAILED
        if text != seen:
            seen, silent = text, AwakeTime(BEAT_S)
        if all_of_it.passed_s() > MOST_WAIT_S:
            return ""
        time.sleep(poll_s(world_size))
    return _FAILED if seen else ""


def read_failures(store: RunStore, *, reader: int) -> dict[int, str]:
    """Return the reason of each other rank that failed, as far as known."""
    found: dict[int, str] = {}
    for rank, reason in map(json.loads, store.look_up(_REASONS).splitlines()):
        if rank != reader:
            found.setdefault(rank, reason)
    if found:
        store.note_heard(reader)
    return found
