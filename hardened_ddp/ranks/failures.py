"""The reasons of the ranks that failed, in the store, where their peers read them.

Owns the keys. All reasons are lines of one value: so a peer that lost a rank reads them with one
question, and not with one for each of a thousand ranks.
"""

import json
import logging

from hardened_ddp.ranks.patient_store import PatientStore

log = logging.getLogger(__name__)

_COUNTER, _REASONS = "failures", "failures/reasons"
MOST_READ = 8  # those that failed first; later ones are consequences as a rule


def publish_failure(store: PatientStore | None, rank: int, text: str) -> bool:
    """Write why a rank failed; return whether that was possible. Rank-local."""
    try:
        if store is not None:
            if store.add(_COUNTER) <= MOST_READ:
                store.append(_REASONS, json.dumps([rank, text]) + "\n")
            store.set(f"heard/{rank}", "")  # it has a cause of its own, and reads no other
    except RuntimeError as error:  # the store may have died with the rank that served it
        log.debug("could not publish a failure: %s", error)
        return False
    return store is not None


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
