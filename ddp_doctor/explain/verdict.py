"""The verdict: which event is the cause, which rank is guilty, and what only follows from it.

Owns the order of the tiers, and what makes one event of a tier come before another: specific before
general, earlier before later, and of one rank its first exception.
Names a rank only if the evidence does, since a wrong rank is worse than none. Also what no message
tells: a rank that ended without a word, seen in torchrun's table.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ddp_doctor.explain.catalogue import BY_CODE
from ddp_doctor.explain.catalogue.python import BUILT_IN
from ddp_doctor.explain.collectives import Finding, ranks_of
from ddp_doctor.explain.collector import LOOSE, WARNS, Evidence
from ddp_doctor.explain.endings import (
    activity_before,
    is_closing,
    nan_event,
    read_numbers,
    weaken_survived,
    without_restarted,
)
from ddp_doctor.explain.events import Blame, Cause, Event, Line, Tier
from ddp_doctor.explain.exits import Exit
from ddp_doctor.explain.run_folder import HUNG, events_of_folder, newest_stacks

_OF_SIGNAL = {
    -9: "killed-sigkill", -11: "killed-segfault", -8: "killed-sigfpe", -7: "killed-bus",
    -4: "killed-sigill", -6: "stop-aborted", -15: "stop-sigterm", -2: "stop-interrupt",
    -1: "stop-sighup",
}  # fmt: skip
_SILENT, _FINISHED = BY_CODE["stop-silent"], BY_CODE["lost-finished-rank"]
_FORCED, _TERMINATED = -9, -15
_WEAK = Tier.TEARDOWN + 0.5
_NEAR, _MOST_NEAR, _AT_END = 60, 3, 12  # lines
_MILD = re.compile(
    r"(?i)warn|info\b(?!.*store based)|\[[IW]\d|: W |not found|finish|succeed|step \d|epoch \d"
    r"|\b0 (?:fail|err)|xfail|register cu|rebuil|back to|ignor|retry|tokens"
)

CERTAIN, LIKELY, UNKNOWN = "certain", "likely", "unknown"


@dataclass(frozen=True, slots=True)
class Guilty:
    """The rank that failed first, and how sure that is."""

    rank: int | None
    host: str | None
    confidence: str
    reason: str


@dataclass(slots=True)
class Verdict:
    """What explain found."""

    kind: str
    """explained; healthy: it ended as it should; open: no failure, and no end; or unknown."""

    root: Event | None = None
    guilty: Guilty | None = None
    finding: Finding | None = None
    evidence: list[Line] = field(default_factory=list)
    first_exceptions: list[Event] = field(default_factory=list)
    """Of each rank, in order."""

    num_echoes: int = 0
    root_exit: Exit | None = None
    next_step: str = ""
    ranks_alike: tuple[int, ...] = ()
    """Several ranks that failed in the same way."""

    activity: tuple[str, str] = ("", "")
    """What one rank did while the others waited in vain, and the line that says so."""

    later: list[Event] = field(default_factory=list)
    """Failures that do not follow from the cause."""

    near: list[Line] = field(default_factory=list)
    """What else tells of trouble, nearest to the cause: of an answer that is not certain."""

    @property
    def cause(self) -> Cause | None:
        return self.root.cause if self.root is not None else None


def judge(evidence: Evidence) -> Verdict:
    """Choose the cause among the events."""
    verdict = _judge(evidence)
    _tell_case(verdict)
    nan = nan_event(evidence.endings)
    if verdict.kind == "healthy":
        if nan is not None:
            return Verdict(kind="explained", root=nan, evidence=[nan.line])
        verdict.kind = "healthy" if evidence.ends_well else "open"
    verdict.near = _near(verdict, evidence)
    if nan is not None and verdict.root and "nan" not in verdict.root.line.text.lower():
        if _was_over(verdict.root, evidence):
            earlier = [verdict.root] * (verdict.cause is not None)
            return Verdict("explained", nan, evidence=[nan.line], later=earlier)
        verdict.later.append(nan)
    return verdict


def _near(verdict: Verdict, evidence: Evidence) -> list[Line]:
    """Choose the lines that no entry knows, and that may say why: before the cause rather."""
    told = [(line.file, line.number) for line in verdict.evidence]
    lines = [line for line in evidence.notable.values() if (line.file, line.number) not in told]
    if verdict.kind == "open":
        ends = {name: ending.last - _AT_END for name, ending in evidence.endings.items()}
        lines = [o for o in lines if o.number > ends.get(o.file, 0) and not _MILD.search(o.raw)]
        return [line for line in lines if not evidence.goes_well(line)][-_MOST_NEAR:]
    if verdict.root is None:
        lines = lines if verdict.kind == "unknown" else []
        return lines if len(lines) <= _MOST_NEAR else [*lines[:2], lines[-1]]
    start = verdict.root.line

    def away(line: Line) -> int:
        back = start.number - line.number
        return back if back > 0 else -3 * back

    near = [line for line in lines if line.file == start.file and away(line) < _NEAR]
    return sorted(sorted(near, key=away)[:_MOST_NEAR], key=lambda line: line.order)


def _tell_case(verdict: Verdict) -> None:
    """Put why and fix of a case in place of the cause's own, if the log says what it needs."""
    root, cause = verdict.root, verdict.cause
    if root is None or cause is None or (verdict.finding is not None and verdict.finding.ranks):
        return
    # WHY no line around it: a neighbour may be of something else
    said = [root.raised.whole] if root.raised is not None else [root.line.text]
    said += [root.detail.text] if root.detail is not None else []
    frames = root.raised.frames if root.raised is not None else []
    said += [frame.function for frame in frames] + [frame.file for frame in frames[-1:]]
    for expression, why, fix in cause.cases:
        if re.search(expression, "\n".join(said)):
            has_others = cause.is_generic or bool(cause.or_else)
            most = LIKELY if cause.most == UNKNOWN else cause.most
            cause = replace(cause, why=why, fix=fix, is_generic=has_others, or_else="", most=most)
            root.cause = replace(cause, lightning="", accelerate="", trainer="")
            return


def _was_over(root: Event, evidence: Evidence) -> bool:
    """Whether training went on after a failure, until its loss was NaN."""
    file, ends = root.line.file, [ended.line for ended in evidence.exits.exits if ended.status]
    if file not in evidence.endings or any(line.file != file for line in ends):
        return False
    last = max(root.again, *(line.number for line in (root.line, *ends)))
    return last < evidence.endings[file].nan_since


def _judge(evidence: Evidence) -> Verdict:
    place_events(evidence)
    exits = without_restarted(evidence.exits.exits, evidence.endings)
    restarted = [ended for ended in evidence.exits.exits if ended not in exits]
    evidence.exits.exits = exits
    failed = [ended for ended in exits if ended.status != 0]
    weaken_survived(evidence.events, evidence.endings, restarted=restarted, failed=failed)
    finding = evidence.collectives.analyse(world_size=evidence.world_size) or _unheard(evidence)
    events = _with_inferred(evidence, finding)
    total = sum(event.count for event in evidence.events)
    if not events and not failed:
        if evidence.ends_with_error and not evidence.ends_well:
            return _unknown(evidence, events, total)
        return Verdict(kind="healthy")
    root = _root(events, evidence)
    if root is None or (root.is_weak and not failed and evidence.goes_well(root.line)):
        if (root is not None or evidence.ends_well) and not failed:
            return Verdict(kind="healthy", num_echoes=total)
        return _unknown(evidence, events, total)
    if root.is_weak and root.kind == "message" and not failed and not evidence.ends_with_error:
        return Verdict(kind="healthy", num_echoes=total)
    is_quoted = root.is_weak and root.raised is not None and not root.raised.frames
    if root.cause is None or (is_quoted and not failed):
        return _unknown(evidence, events, total, root=root)
    # WHY not mpirun's own word: a launcher that was told to stop fails, too
    told = [ended for ended in failed if "non-zero" not in ended.line.text]
    before = [e for e in told if e.status > 0 and e.line.order < root.line.order]
    earlier = [ended for ended in before if not evidence.goes_well(ended.line)]
    is_echo = is_closing(root) and any(ended.status != _TERMINATED for ended in told)
    if is_echo or (root.code == "stop-cancelled" and earlier):
        return _unknown(evidence, events, total)
    read_numbers(root)
    guilty, alike = who(root, events, evidence, finding)
    verdict = Verdict(
        kind="explained",
        root=root,
        guilty=guilty,
        finding=finding if root.tier in (Tier.TIMEOUT, Tier.MISMATCH) else None,
        evidence=_support(root, events, evidence, finding),
        first_exceptions=_first_exceptions(events),
        root_exit=_exit_of(root, evidence),
        next_step=evidence.next_step,
        ranks_alike=alike,
        later=_later_failures(root, events, evidence),
    )
    if root.tier == Tier.TIMEOUT and len(evidence.endings) == 1:
        # WHY one: in logs of single ranks it would be what the waiting rank did
        verdict.activity = activity_before(evidence.before_wait or "")
    verdict.num_echoes = max(0, total - len(verdict.evidence))
    return verdict


def _unheard(evidence: Evidence) -> Finding | None:
    """Say which ranks of torchrun's table wrote nothing, if most raised that they wait in vain."""
    table = {ended.rank: ended.status for ended in evidence.exits.exits if ended.from_block}
    raised = [e for e in evidence.events if e.kind == "exception" and e.tier < Tier.LAUNCHER]
    waiting = sorted({e.rank for e in raised if e.rank is not None and e.tier == Tier.TIMEOUT})
    silent = sorted(set(range(len(table))) - {e.rank for e in raised})
    is_whole = set(table) == {*waiting, *silent} and all(table[r] == _TERMINATED for r in silent)
    if not silent or not is_whole or 2 * len(waiting) <= len(table):
        return None
    text = f"{ranks_of(waiting)} waited in vain; {ranks_of(silent)} reported no wait"
    return Finding("missing", (), text, (), is_sure=True)


def _with_inferred(evidence: Evidence, finding: Finding | None) -> list[Event]:
    """Give the events with those that no line tells: from exits, collectives, a run's folder."""
    events = [event for event in evidence.events if event.tier != Tier.ADVICE]
    if finding is not None and finding.kind == "mismatch":
        cause, line = BY_CODE["collective-mismatch"], finding.works[0].line
        fields = {"what": finding.text}
        events.append(
            Event(kind="collective", tier=cause.tier, line=line, cause=cause, fields=fields)
        )
    _weaken_crashes(events, evidence.exits.exits)
    ended = _exit_events(evidence)
    known = {event.code for event in ended}
    # WHY: the line that tells of the end is in there, with the rank
    details = {e.code: e.detail for e in events if e.kind == "message" and e.code in known}
    events = [e for e in events if not (e.kind == "message" and e.code in known)]
    events += [replace(event, detail=details.get(event.code)) for event in ended]
    events += silent_ends(events, evidence)
    _weaken_time_limit(events, evidence)
    evidence.stacks = newest_stacks(evidence.stacks)
    has_verdict = any(event.code == HUNG for event in events)
    events += events_of_folder(evidence.statuses, [] if has_verdict else evidence.stacks)
    return events


def _weaken_crashes(events: Sequence[Event], ends: Sequence[Exit]) -> None:
    """Take a crash in native code for an effect where its log told of a lost or late rank before.

    WHY: torch's watchdog aborts the process then, and its end may crash.
    """
    told = set()
    closing = [e.line.order for e in ends if "Forcefully terminating all other" in e.line.text]
    for event in sorted(events, key=lambda event: event.line.order):
        if event.code == "killed-sigkill" and min(closing, default=math.inf) < event.line.order:
            event.tier = Tier.LAUNCHER  # Lightning did it, since another rank had failed
        is_crash = event.kind == "message" and event.code in ("killed-segfault", "stop-aborted")
        if event.tier in (Tier.TIMEOUT, Tier.LOST):
            told.add(event.line.file)
        elif is_crash and event.line.file in told:
            event.tier = Tier.TEARDOWN


def _weaken_time_limit(events: Sequence[Event], evidence: Evidence) -> None:
    """Take a time limit for an effect, if a rank failed before and nothing went on after it.

    WHY: the other ranks wait for a dead or late one until the scheduler ends them all.
    """
    orders = [
        e.line.order
        for e in events
        if Tier.KILLED < e.tier <= Tier.TIMEOUT
        and e.kind != "exit"
        and not (e.is_weak or evidence.goes_well(e.line))
    ]
    for event in events:
        if event.code == "stop-time-limit" and min(orders, default=math.inf) < event.line.order:
            event.tier = Tier.TEARDOWN


def _exit_events(evidence: Evidence) -> list[Event]:
    """Make events of processes that a signal ended."""
    events = []
    others_failed = any(e.status not in (0, _FORCED) for e in evidence.exits.exits)
    stops = [e.line.order for e in evidence.events if e.code == "stop-cancelled"]
    closed = evidence.exits.closed
    for ended in evidence.exits.exits:
        if code := _OF_SIGNAL.get(ended.status):
            # WHY: srun ends tasks with SIGKILL after one of them failed, or after scancel
            is_srun = "srun: error" in ended.line.text and ended.status == _FORCED
            event = _exit_event(ended, BY_CODE[code])
            is_told = others_failed or min(stops, default=math.inf) < ended.line.order
            is_closed = ended.pid in closed or _is_late(ended, evidence.exits.exits)
            is_closed &= ended.status in (_FORCED, _TERMINATED)
            if (is_srun and is_told) or is_closed:
                event.tier = Tier.TEARDOWN
            elif closed and ended.from_block and ended.status == _TERMINATED:
                event.tier = Tier.KILLED  # not by torchrun
            events.append(event)
    return events


def _is_late(ended: Exit, exits: Sequence[Exit]) -> bool:
    """Whether torchrun killed it: another one of the host had failed half a minute before.

    WHY not less: its times are when it looked, or when an exception was raised; it waits 30 s.
    """
    return ended.from_block and any(
        25 <= ended.at - other.at < 100 and other.status not in (0, _TERMINATED)
        for other in exits
        if other.from_block and other.host == ended.host
    )


def _exit_event(ended: Exit, cause: Cause) -> Event:
    return Event(
        kind="exit",
        tier=cause.tier,
        line=ended.line,
        cause=cause,
        rank=ended.rank,
        host=ended.host,
        fields={"pid": str(ended.pid)} if ended.pid else {},
    )


def _root(events: Sequence[Event], evidence: Evidence) -> Event | None:
    """Take the first event of the lowest tier."""
    found = _without_aftermath([event for event in events if event.tier < Tier.LAUNCHER])
    found = _without_reworded(found)
    if not found:
        return None
    times = {bool(event.line.time) for event in found if event.tier == Tier.EXCEPTION}
    by_time = times == {True}
    # WHY these types: no rank raises one because another has failed, and what a program prints
    # before may be a note that it goes on from
    own = [e for e in found if e.cause in BUILT_IN.values() and not e.is_weak]
    raised = [e for e in found if e.kind == "exception" and e.tier == Tier.EXCEPTION]
    is_known = any(not (e.is_weak or e.cause is None or e.cause.is_generic) for e in raised)

    def place(event: Event) -> tuple[object, ...]:
        # WHY of its form: what only prints another exception has got over that one
        is_printed = is_known and LOOSE.match(event.line.text) is not None
        return _order(event, by_time, has_own=bool(own) or is_printed)

    root = min(found, key=place)
    ends = [e.rank for e in evidence.exits.exits if "failed (exitcode" in e.line.text]
    own = [event for event in own if [event.rank] == ends]
    is_of_other = root.tier == Tier.EXCEPTION and root.rank is not None and [root.rank] != ends
    return min(own, key=place) if own and is_of_other else root


def _without_reworded(events: Sequence[Event]) -> list[Event]:
    """Drop what no entry knows, as a queue's Empty, if what was raised because of it has one.

    And what a library looked up in vain, as in its cache, before it failed otherwise.
    """
    reworded = set()
    for event in events:
        before = event.chained
        if before is not None and event.cause is not None and not event.cause.is_of_type:
            was_lookup = before.raised is not None and before.raised.catcher == 2
            if before.cause is None or (before.cause.is_of_type and was_lookup):
                reworded.add(id(before))
    return [event for event in events if id(event) not in reworded]


def _order(event: Event, by_time: bool, *, has_own: bool) -> tuple[object, ...]:
    """The key by which the cause comes first."""
    tier = _WEAK if event.is_weak else float(event.tier)
    is_general = event.cause is None or event.cause.is_generic
    # Explicit lists of ranks first; a process that raised before one that was only seen to end.
    names_none = not event.ranks and event.tier in (Tier.TIMEOUT, Tier.LOST)
    is_note = is_general or has_own or WARNS.search(event.line.raw) is not None
    return (
        tier,
        names_none,
        event.kind == "exit" or (event.kind == "message" and is_note),
        is_general and not (by_time and event.kind == "exception"),
        event.began.time if by_time else "",
        event.began.order,
        is_general,
        event.line.order,
    )


def _without_aftermath(events: Sequence[Event]) -> list[Event]:
    """Drop what a rank says after its own first exception: the process is already ending."""
    first: dict[int, int] = {}
    for event in sorted(events, key=lambda event: event.line.order):
        is_first = event.kind == "exception" and event.tier == Tier.EXCEPTION and not event.is_weak
        if is_first and event.rank is not None:
            first.setdefault(event.rank, event.began.order)
    return [
        event
        for event in events
        if event.tier not in (Tier.EXCEPTION, Tier.MISMATCH)
        or event.kind in ("exit", "collective")
        or event.rank is None
        or event.began.order <= first.get(event.rank, event.began.order)
    ]


def _support(
    root: Event, events: Sequence[Event], evidence: Evidence, finding: Finding | None
) -> list[Line]:
    """Choose one to five lines that show it: the cause, its like on other ranks, its effects."""
    chosen = [root.line]
    if root.code == HUNG:
        chosen += [stack.line for stack in evidence.stacks[:4]]
    detail = evidence.error_line if root.cause is _SILENT else root.detail
    chosen += [detail] if detail is not None else []
    shown = [event for event in events if event.chained is root]  # what became of it
    shown += [e for e in events if e is not root and e.cause is root.cause is not None][:2]
    chosen += [event.line for event in shown]
    if finding is not None and root.tier in (Tier.TIMEOUT, Tier.MISMATCH):
        others = {w.line.number: w.line for w in finding.works if w.line.number != root.line.number}
        chosen += [*others.values()][: max(0, 4 - len(chosen))]
    shown.append(root)
    later = [e.line for e in events if e not in shown and e.tier > root.tier and not e.is_weak]
    chosen += sorted(later, key=lambda line: line.order)[:1]
    ended = _exit_of(root, evidence)
    chosen += [ended.line] if ended is not None else []
    return [*{(line.file, line.number): line for line in chosen}.values()][:5]


def _later_failures(root: Event, events: Sequence[Event], evidence: Evidence) -> list[Event]:
    """List failures of their own: of other attempts, or what another rank surely raised itself."""
    order = root.line.order
    ends = [e.line.order for e in evidence.exits.exits if "failed (exitcode" in e.line.text]
    restart = min((end for end in ends if end >= order), default=math.inf)
    found: dict[str, Event] = {}
    for event in sorted(events, key=lambda event: event.line.order):
        cause, place = event.cause, event.line.order
        if cause is None or cause is root.cause or event.is_weak or event.tier > Tier.EXCEPTION:
            continue
        is_sure = not (cause.is_generic or cause.or_else or cause.is_of_type)
        is_of_other = None not in (root.rank, event.rank) and event.rank != root.rank
        is_own = place > restart or (is_sure and is_of_other and place > order)
        if is_own if event.raised is not None else place < order and place in ends:
            found.setdefault(cause.code, event)
    return list(found.values())[:3]


def _exit_of(root: Event, evidence: Evidence) -> Exit | None:
    """Find how the process of the cause ended."""
    pid = root.fields.get("pid")
    for ended in evidence.exits.exits:
        if root.rank is not None and ended.rank == root.rank:
            return ended
        if pid and ended.pid is not None and str(ended.pid) == pid:
            return ended
    roots = [ended for ended in evidence.exits.exits if ended.is_root]
    return roots[0] if len(roots) == 1 and root.rank is None else None


def _first_exceptions(events: Sequence[Event]) -> list[Event]:
    """List the first exception of each rank."""
    first: dict[object, Event] = {}
    for event in sorted(events, key=lambda event: (event.is_weak, event.line.order)):
        if event.kind == "exception" and event.tier < Tier.LAUNCHER:
            key = event.rank if event.rank is not None else (event.line.file, event.line.local)
            first.setdefault(key, event)
    return sorted(first.values(), key=lambda event: event.line.order)[:16]


def _unknown(
    evidence: Evidence, events: Sequence[Event], total: int, *, root: Event | None = None
) -> Verdict:
    guilty, alike = who(root, events, evidence, None) if root is not None else (None, ())
    exits = [ended for ended in evidence.exits.exits if ended.status != 0]
    roots = [ended for ended in exits if ended.is_root] or exits
    if len({ended.host for ended in roots}) == 1 and all(ended.at > 0 for ended in roots):
        roots = sorted(roots, key=lambda ended: ended.at)
    last = root.line if root is not None else evidence.error_line
    return Verdict(
        kind="unknown",
        root=root,
        guilty=guilty,
        evidence=[last] if last is not None else [],
        first_exceptions=_first_exceptions(events),
        num_echoes=max(0, total - 1),
        root_exit=roots[0] if roots else None,
        ranks_alike=alike,
    )


def silent_ends(events: Sequence[Event], evidence: Evidence) -> list[Event]:
    """Give the end that the lost connections follow from, if all of them name their rank."""
    table = [ended for ended in evidence.exits.exits if ended.from_block]
    lost = [event for event in events if event.tier == Tier.LOST and event.kind == "exception"]
    spoken = [e for e in events if e.kind == "exception" and e.tier < Tier.LAUNCHER]
    speakers = {event.rank for event in spoken}
    has_other = any(event.tier < Tier.LOST and not event.is_weak for event in events)
    if not lost or has_other or None in speakers:
        return []
    first = min((event.line for event in lost), key=lambda line: line.order)
    left = [e for e in evidence.events if e.cause is _FINISHED and e.rank not in speakers]
    if len(left) == 1 and left[0].rank is not None and left[0].line.order < first.order:
        return [replace(left[0], tier=Tier.MISMATCH, is_weak=False)]
    if not table:
        return _silent_log(speakers, evidence)
    failed = [ended for ended in table if ended.status > 0]
    silent = [ended for ended in failed if ended.rank not in speakers]
    if len(silent) == 1:
        return [_exit_event(silent[0], _SILENT)]
    is_one_node = evidence.num_nodes == 1 and all(e.rank == e.local for e in table)
    is_one_node &= evidence.exits.closed <= {e.pid for e in table}  # others had not ended yet
    if failed and not silent and is_one_node and len(speakers) == len(lost) == len(table):
        return [Event(kind="message", tier=Tier.MISMATCH, line=first, cause=_FINISHED)]
    return []


def _silent_log(speakers: set[int | None], evidence: Evidence) -> list[Event]:
    """Give the end of the one log without an error, if each rank has its own log."""
    quiet = {rank: name for name, rank in evidence.rank_of_file.items() if rank not in speakers}
    if len(quiet) != 1 or evidence.exits.exits:
        return []
    [(rank, name)] = quiet.items()
    ending = evidence.endings.get(name)
    if ending is None or ending.success or not ending.last_text:
        return []
    text = f"the log of rank {rank} ends with: {ending.last_text}"
    line = Line(file=name, number=ending.last, text=text, raw=text, rank=rank)
    return [Event(kind="exit", tier=_SILENT.tier, line=line, cause=_SILENT, rank=rank)]


def place_events(evidence: Evidence) -> None:
    """Give events a rank where the launcher's own numbering is that of the job."""
    is_one_node = evidence.num_nodes == 1 and not any(
        ended.rank != ended.local
        for ended in evidence.exits.exits
        if ended.rank is not None and ended.local is not None
    )
    tasks_are_ranks = evidence.labels_are_ranks and not evidence.has_elastic
    for ended in evidence.exits.exits:
        if ended.rank is None and is_one_node:
            ended.rank = ended.local
        if ended.rank is None and tasks_are_ranks:
            ended.rank = ended.task
    of_local = _ranks_of_locals(evidence)
    locals_are_ranks = is_one_node and len(evidence.hosts) <= 1
    for event in evidence.events:
        line = event.line
        if event.rank is not None:
            continue
        if line.local is not None:
            other = line.local if locals_are_ranks else None
            event.rank = of_local.get((line.host, line.local), other)
        elif tasks_are_ranks:
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
    like = [event for event in events if event.cause is cause and event.tier == root.tier]
    named = tuple(sorted({rank for event in like for rank in event.ranks}))
    if is_named and named:
        if len(named) > 1:
            return None, named
        confidence = LIKELY if root.tier == Tier.LOST else CERTAIN
        return Guilty(named[0], None, confidence, "the message names the rank"), ()
    is_of_ranks = root.tier == Tier.TIMEOUT or (cause and cause.code == "collective-mismatch")
    if finding is not None and finding.kind != "waiting" and is_of_ranks:
        if len(finding.ranks) == 1:
            confidence = LIKELY if finding.is_sure else UNKNOWN
            return Guilty(finding.ranks[0], None, confidence, finding.text), ()
        return None, finding.ranks
    if cause is _FINISHED and root.rank is not None:
        return Guilty(root.rank, None, LIKELY, "it ended, and then the others lost a rank"), ()
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
        hosts = [e.host for e in evidence.exits.exits if e.rank == root.rank and e.host]
        host = root.host or next(iter(hosts), None)
        if root.kind == "exit" and not evidence.exits.exits:
            return Guilty(root.rank, host, LIKELY, "all others say that they lost a rank"), ()
        is_alone = not evidence.exits.exits and {e.rank for e in evidence.events} == {root.rank}
        if is_alone and root.kind != "exit" and not evidence.rank_of_file:
            return Guilty(root.rank, host, UNKNOWN, "no failure of another rank is in this log"), ()
        by_itself = {e.rank for e in evidence.exits.exits if e.from_block and e.status > 0}
        raised = [e for e in evidence.events if e.kind == "exception" and e.tier < Tier.LAUNCHER]
        heard = {event.rank for event in raised if not _is_cut_off(event)}
        cut = {event.rank for event in filter(_is_cut_off, raised)} - {None, root.rank}
        if root.kind == "exception" and (cut or (None not in heard and by_itself - heard)):
            return None, ()  # others failed, too, and do not say how
        return Guilty(root.rank, host, CERTAIN, "its own line says the rank"), ()
    return _by_process(root, evidence), ()


def _is_cut_off(event: Event) -> bool:
    """Whether it is a rank's traceback without its last line."""
    return event.raised is not None and not event.raised.type and event.tier < Tier.LAUNCHER


def _alike(root: Event, events: Sequence[Event]) -> tuple[int, ...]:
    """List the ranks that report the same cause by themselves."""

    def is_like(event: Event) -> bool:
        if event.cause is not root.cause or event.tier != root.tier:
            return False
        is_known = root.cause is not None and not root.cause.is_generic
        if is_known or root.raised is None:
            return True
        return event.raised is not None and event.raised.type == root.raised.type

    is_exit = root.kind == "exit" and root.rank is not None
    said = (root.raised.message or None) if root.raised is not None else None
    own = [e for e in events if (e.kind == "exit") == is_exit]
    own = [e for e in own if e.is_weak == root.is_weak or (e.raised and e.raised.message == said)]
    like = [root, *filter(is_like, own)] if root.rank is not None else [*filter(is_like, own)]
    ranks = (e.ranks if e.rank is None else (e.rank,) for e in like)
    return tuple(sorted(set().union(*ranks)))


def _by_process(root: Event, evidence: Evidence) -> Guilty | None:
    """Find the rank through the pid, or through the only process that failed."""
    exits = [ended for ended in evidence.exits.exits if ended.status != 0]
    pid = root.fields.get("pid")
    for ended in exits:
        if pid and ended.rank is not None and str(ended.pid) == pid:
            reason = "the launcher names the rank of this pid"
            return Guilty(ended.rank, ended.host, CERTAIN, reason)
    is_killed = root.tier == Tier.KILLED
    killed = {ended.rank: ended for ended in exits if ended.status == -9 and ended.rank is not None}
    if is_killed and len(killed) == 1:
        [ended] = killed.values()
        return Guilty(ended.rank, ended.host, LIKELY, "only this rank was killed")
    # in torchrun's table, without those that it ended itself
    own = {e.rank: e for e in exits if e.from_block and (e.is_root or e.status != _TERMINATED)}
    is_blamed = root.cause is None or root.cause.accuses != Blame.NOBODY
    like = [e for e in evidence.events if (e.cause, e.kind) == (root.cause, root.kind)]
    num_raised = sum(e.count for e in like if e is root or not (e.is_weak or e.chained))
    has_cut = any(e.rank not in own for e in evidence.events if e is not root and _is_cut_off(e))
    is_only = len(own) == 1 and num_raised == 1 and not has_cut
    if is_only and is_blamed and root.tier == Tier.EXCEPTION:
        [only] = own.values()
        return Guilty(only.rank, only.host, LIKELY, "no other process failed")
    hosts = {event.host for event in evidence.events if event.cause is root.cause}
    is_alone = len(hosts) == 1 and (root.tier <= Tier.KILLED or len(evidence.hosts) > 1)
    if root.host is None or not is_alone:
        return None  # WHY: who only posted a traceback is not guilty
    return Guilty(None, root.host, LIKELY, "its own line says the host")
