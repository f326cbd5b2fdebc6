"""Which rank is guilty: only if the evidence names it, since a wrong rank is worse than none.

Owns the rank of an event whose line does not say it, and the choice between several ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_doctor.explain.collectives import Finding
from ddp_doctor.explain.collector import Evidence
from ddp_doctor.explain.events import Blame, Event, Tier
from ddp_doctor.explain.exits import Exit

CERTAIN, LIKELY, GUESS = "certain", "likely", "guess"


@dataclass(frozen=True, slots=True)
class Guilty:
    """The rank that failed first, and how sure that is."""

    rank: int | None
    host: str | None
    confidence: str
    reason: str


def place_events(evidence: Evidence) -> None:
    """Give events a rank where the launcher's own numbering is that of the job."""
    is_one_node = evidence.num_nodes == 1 and not any(
        ended.rank != ended.local
        for ended in evidence.exits.exits
        if ended.rank is not None and ended.local is not None
    )
    if is_one_node:
        for ended in evidence.exits.exits:
            ended.rank = ended.local if ended.rank is None else ended.rank
    of_local = _ranks_of_locals(evidence)
    tasks_are_ranks = evidence.labels_are_ranks and not evidence.has_elastic
    if tasks_are_ranks:
        for ended in evidence.exits.exits:
            ended.rank = ended.task if ended.rank is None else ended.rank
    for event in evidence.events:
        line = event.line
        if event.rank is not None:
            continue
        if line.local is not None:
            if (line.host, line.local) in of_local:
                event.rank = of_local[line.host, line.local]
            elif is_one_node and len(evidence.hosts) <= 1:
                event.rank = line.local
        elif line.task is not None and tasks_are_ranks:
            event.rank = line.task


def _ranks_of_locals(evidence: Evidence) -> dict[tuple[str | None, int], int]:
    """Read from lines with both prefixes which local rank is which rank."""
    found: dict[tuple[str | None, int], int] = {}
    doubtful = set()
    for event in evidence.events:
        line = event.line
        if line.rank is not None and line.local is not None:
            key = (line.host, line.local)
            if found.setdefault(key, line.rank) != line.rank:
                doubtful.add(key)
    return {key: rank for key, rank in found.items() if key not in doubtful}


def who(
    root: Event, events: Sequence[Event], evidence: Evidence, finding: Finding | None
) -> tuple[Guilty | None, tuple[int, ...]]:
    """Name the guilty rank of the cause, or none; and the ranks that failed in the same way."""
    cause = root.cause
    is_named = cause is not None and cause.accuses == Blame.NAMED
    # WHY all events: the line that names them may come after one of a rank that only noticed
    if is_named and (named := _all_named(root, events)):
        return _of_list(named, root), named if len(named) > 1 else ()
    is_of_ranks = root.tier == Tier.TIMEOUT or (cause and cause.code == "collective-mismatch")
    if finding is not None and finding.kind != "waiting" and is_of_ranks:
        if len(finding.ranks) == 1:
            confidence = LIKELY if finding.is_sure else GUESS
            return Guilty(finding.ranks[0], None, confidence, finding.text), ()
        return None, finding.ranks
    if root.tier == Tier.TIMEOUT and cause is not None and cause.accuses == Blame.NOBODY:
        return None, ()  # WHY not those that say it: they wait
    alike = _alike(root, events)
    if len(alike) > 1:
        return None, alike
    if root.tier in (Tier.MISMATCH, Tier.TIMEOUT, Tier.LOST):
        return None, ()
    if cause is not None and cause.accuses == Blame.NOBODY:
        return _by_process(root, evidence), ()
    if root.rank is None and len(alike) == 1:
        return Guilty(alike[0], root.host, CERTAIN, "the message names the rank"), ()
    if root.rank is not None:
        return Guilty(root.rank, _host(root, evidence), CERTAIN, "its own line says the rank"), ()
    return _by_process(root, evidence), ()


def _all_named(root: Event, events: Sequence[Event]) -> tuple[int, ...]:
    """Collect the ranks that all messages of this cause accuse."""
    same = [event for event in events if event.cause is root.cause and event.tier == root.tier]
    return tuple(sorted({rank for event in same for rank in event.ranks}))


def _of_list(ranks: tuple[int, ...], root: Event) -> Guilty | None:
    if len(set(ranks)) != 1:
        return None
    confidence = LIKELY if root.tier == Tier.LOST else CERTAIN
    return Guilty(ranks[0], None, confidence, "the message names the rank")


def _alike(root: Event, events: Sequence[Event]) -> tuple[int, ...]:
    """List the ranks that report the same cause by themselves."""
    ranks: set[int] = set()
    for event in events:
        if event.is_weak != root.is_weak or event.kind == "exit":
            continue
        is_same = event.cause is root.cause and event.tier == root.tier
        if is_same and root.cause is not None and root.cause.is_generic and root.raised:
            is_same = event.raised is not None and event.raised.type == root.raised.type
        if is_same and root.cause is None and root.raised and event.raised:
            is_same = event.raised.type == root.raised.type
        if is_same:
            ranks |= {event.rank} if event.rank is not None else set(event.ranks)
    if root.kind == "exit" and root.rank is not None:
        return _exits_alike(root, events)
    if root.rank is not None:
        ranks.add(root.rank)
    return tuple(sorted(ranks))


def _exits_alike(root: Event, events: Sequence[Event]) -> tuple[int, ...]:
    same = [e for e in events if e.kind == "exit" and e.cause is root.cause and e.tier == root.tier]
    return tuple(sorted({event.rank for event in same if event.rank is not None}))


def _host(root: Event, evidence: Evidence) -> str | None:
    if root.host:
        return root.host
    for ended in evidence.exits.exits:
        if ended.rank == root.rank and ended.host:
            return ended.host
    return None


def _by_process(root: Event, evidence: Evidence) -> Guilty | None:
    """Find the rank through the pid, or through the only process that failed."""
    exits = [ended for ended in evidence.exits.exits if ended.status != 0]
    pid = root.fields.get("pid")
    for ended in exits:
        if pid and ended.rank is not None and str(ended.pid) == pid:
            return Guilty(
                ended.rank, ended.host, CERTAIN, "the launcher names the rank of this pid"
            )
    is_killed = root.tier == Tier.KILLED
    killed = {ended.rank: ended for ended in exits if ended.status == -9 and ended.rank is not None}
    if is_killed and len(killed) == 1:
        [ended] = killed.values()
        return Guilty(ended.rank, ended.host, LIKELY, "only this rank was killed")
    if root.cause is not None and root.cause.accuses == Blame.NOBODY:
        return Guilty(None, root.host, LIKELY, "its own line says the host") if root.host else None
    only = _only_failure(exits)
    if only is not None and root.count == 1 and root.tier == Tier.EXCEPTION:
        return Guilty(only.rank, only.host, LIKELY, "no other process failed")
    return Guilty(None, root.host, LIKELY, "its own line says the host") if root.host else None


def _only_failure(exits: Sequence[Exit]) -> Exit | None:
    """Give the process that failed, if torchrun's table has one only that it did not end itself."""
    own = [ended for ended in exits if ended.from_block and (ended.is_root or ended.status != -15)]
    named = {ended.rank: ended for ended in own}
    return next(iter(named.values())) if len(named) == 1 else None
