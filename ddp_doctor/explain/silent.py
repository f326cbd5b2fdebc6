"""Ranks that ended without a word, told by torchrun's table and by what the others lost.

Owns the conditions under which that is sure: the table is there, and each rank that lost a
connection is known.
Does not own: failures that have a message of their own.
"""

from collections.abc import Sequence

from ddp_doctor.explain.catalogue.silent import FINISHED, SILENT
from ddp_doctor.explain.events import Event, Tier
from ddp_doctor.explain.evidence import Evidence


def silent_ends(events: Sequence[Event], evidence: Evidence) -> list[Event]:
    """Give the end that the lost connections follow from, if all of them name their rank."""
    table = [ended for ended in evidence.exits.exits if ended.from_block]
    lost = [event for event in events if event.tier == Tier.LOST and event.kind == "exception"]
    spoken = [e for e in events if e.kind == "exception" and e.tier < Tier.LAUNCHER]
    speakers = {event.rank for event in spoken}
    has_other = any(event.tier < Tier.LOST and not event.is_weak for event in events)
    if not table or not lost or has_other or None in speakers:
        return []
    failed = [ended for ended in table if ended.status > 0]
    silent = [ended for ended in failed if ended.rank not in speakers]
    if len(silent) == 1:
        [ended] = silent
        end = Event(
            kind="exit",
            tier=Tier.EXCEPTION,
            line=ended.line,
            cause=SILENT,
            rank=ended.rank,
            host=ended.host,
        )
        return [end]
    is_one_node = evidence.num_nodes == 1 and all(e.rank == e.local for e in table)
    if failed and not silent and is_one_node and len(speakers) == len(lost) == len(table):
        line = min((event.line for event in lost), key=lambda line: line.order)
        return [Event(kind="message", tier=Tier.MISMATCH, line=line, cause=FINISHED)]
    return []
