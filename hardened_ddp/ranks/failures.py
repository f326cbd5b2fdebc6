"""The reasons of the ranks that failed, in the store, where their peers read them.

Owns the keys, and which of several ranks with the same reason tells it. All reasons are lines of
one value: so a peer that lost a rank reads them with one question, and not with one for each of a
thousand ranks.
"""

import json
import logging
import time
from collections.abc import Callable
from hashlib import sha256

from hardened_ddp.ranks.patient_store import PatientStore, poll_s

log = logging.getLogger(__name__)

_COUNTER, _REASONS = "failures", "failures/reasons"
TELL_LIMIT_S = 2.0
"""How long a rank waits for another one that is about to tell the same error."""

DEFER_S = 4.0
"""How long a rank waits for rank 0, which may be slower, before it tells such an error itself."""

MOST_READ = 8  # those that failed first; later ones are consequences as a rule


def publish_failure(
    store: PatientStore | None, rank: int, text: str, *, is_last: bool = True
) -> bool:
    """Write why a rank failed; return whether that was possible. Rank-local.

    is_last: it asks the store for nothing after this.
    """
    try:
        if store is not None:
            if store.add(_COUNTER) <= MOST_READ:
                store.append(_REASONS, json.dumps([rank, text]) + "\n")
            if is_last:
                store.set(f"heard/{rank}", "")  # it has a cause of its own, and reads no other
    except RuntimeError as error:  # the store may have died with the rank that served it
        log.debug("could not publish a failure: %s", error)
        return False
    return store is not None


def tell_once(
    store: PatientStore | None,
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
    try:
        if store is not None:
            if rank > 0 and defer_s > 0:
                _await_text(store, key, limit_s=defer_s, world_size=world_size)
            is_mine = store.claim(key, str(rank)) == str(rank)
            if not is_mine and _await_text(
                store, f"{key}/done", limit_s=TELL_LIMIT_S, world_size=world_size
            ):
                store.set(f"heard/{rank}", "")
                return False
    except RuntimeError as error:
        log.debug("the store is gone: %s", error)
    tell()
    try:
        if store is not None:
            store.set(f"{key}/done", "told")
            store.set(f"heard/{rank}", "")
    except RuntimeError as error:
        log.debug("the store is gone: %s", error)
    return True


def _await_text(store: PatientStore, key: str, *, limit_s: float, world_size: int) -> bool:
    """Wait until there is a text under key; return whether there is."""
    end = time.monotonic() + limit_s
    while not store.look_up(key):
        if time.monotonic() > end:
            return False
        time.sleep(poll_s(world_size))
    return True


def read_failures(store: PatientStore | None, *, reader: int) -> dict[int, str]:
    """Return the reason of each other rank that failed, as far as known. Rank-local."""
    found: dict[int, str] = {}
    try:
        text = "" if store is None else store.look_up(_REASONS)
        for rank, reason in map(json.loads, text.splitlines()):
            if rank != reader:
                found.setdefault(rank, reason)
        if found and store is not None:
            store.set(f"heard/{reader}", "")
    except RuntimeError as error:
        log.debug("the store is gone: %s", error)
    return found


def await_listeners(store: PatientStore | None, world_size: int, limit_s: float) -> None:
    """Wait until all ranks but 0 have heard, at most limit_s. For rank 0, which ends the store."""
    try:
        if store is not None:
            store.wait([f"heard/{rank}" for rank in range(1, world_size)], limit_s)
    except RuntimeError as error:
        log.debug("not every rank has read the failure: %s", error)
