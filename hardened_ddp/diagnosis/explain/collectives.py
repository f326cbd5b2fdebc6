"""What the watchdogs of several ranks say together: who is missing, who is behind, who differs.

Owns one record per rank and process group, from the lines of NCCL's watchdog. A rank that prints
one waits; it is not the cause. Sequence numbers are compared within one process group only.
Does not own: flight recorder dumps, which say more (flight_recorder.py).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hardened_ddp.diagnosis.explain.events import Line

_WORK = re.compile(
    r"\[(?P<group>[^\]]*?)Rank (?P<rank>\d+)\] +(?:Process group watchdog .*\] +)?Watchdog caught "
    r"collective operation timeout: WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<numel>\d+), NumelOut=(?P<out>\d+))?"
)
_STATUS = re.compile(
    r"\[(?:(?P<group>PG [^\]]*?) )?Rank (?P<rank>\d+)\].*?(?:(?:sequence id|at work|NCCL work): "
    r"(?P<seq>\d+).*?)?[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+),.*?"
    r"last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
_LEAVING = re.compile(
    r"taking the entire process down|watchdog thread terminated with exception|Signal 6 \(SIGABRT\)"
    r"|first observed failure"
)
_EQUAL_SIZES = {
    "ALLREDUCE",
    "ALL_REDUCE",
    "BROADCAST",
    "_ALLGATHER_BASE",
    "_REDUCE_SCATTER_BASE",
    "REDUCE",
}
_DEFAULT_GROUP = re.compile(r"default_pg|GUID 0\b|^PG 0\b|^PG \(0\)|^$")
_NO_SEQ = -1


@dataclass(slots=True)
class Work:
    """The collective that one rank waited for."""

    rank: int
    seq: int
    op: str
    numel: int
    line: Line
    group: str = ""
    enqueued: int | None = None
    is_global: bool = True
    """rank counts in the whole job, not in a sub-group."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the records say together."""

    kind: str
    """mismatch, behind, missing, or waiting."""

    ranks: tuple[int, ...]
    """Those that are behind or missing."""

    text: str
    works: tuple[Work, ...]
    is_sure: bool = False


class Collectives:
    """Collects the records."""

    def __init__(self) -> None:
        self._works: dict[tuple[int, int, str], Work] = {}
        self._enqueued: dict[int, int] = {}
        self._history: dict[int, dict[int, Work]] = {}
        """What each rank called, by number."""

        self.num_leaving = 0

    def take(self, line: Line) -> None:
        """Note what a line says."""
        text = line.text
        if "atchdog" in text or "nqueued" in text:
            if match := _WORK.search(text):
                self._add_work(match, line)
            if match := _STATUS.search(text):
                self._add_status(match, line)
        if _LEAVING.search(text):
            self.num_leaving += 1

    def add(self, work: Work) -> None:
        """Note the collective that a rank did not complete."""
        self._works.setdefault((work.rank, work.seq, work.op), work)

    def note_newest(self, rank: int, seq: int) -> None:
        """Note a rank that completed all that it started."""
        self._enqueued.setdefault(rank, seq)

    def note_history(self, works: Iterable[Work]) -> None:
        """Note all collectives of a rank, also those that it completed."""
        for work in works:
            self._history.setdefault(work.rank, {}).setdefault(work.seq, work)

    def _first_difference(self) -> Finding | None:
        """Find the first number at which the ranks called different collectives."""
        ranks = list(self._history.values())
        common = set.intersection(*map(set, ranks)) if len(ranks) > 1 else set()
        found = (self._mismatch([known[seq] for known in ranks]) for seq in sorted(common))
        return next(filter(None, found), None)

    def _add_work(self, match: re.Match[str], line: Line) -> None:
        rank = int(match["rank"]) if line.rank is None else line.rank
        seq = int(match["seq"] or _NO_SEQ)
        self.add(Work(rank, seq, match["op"], int(match["numel"] or 0), line))

    def _add_status(self, match: re.Match[str], line: Line) -> None:
        rank = int(match["rank"]) if line.rank is None else line.rank
        enqueued = int(match["enqueued"])
        group = match["group"] or ""
        found = [
            work
            for work in self._works.values()
            if work.rank == rank and match["seq"] and work.seq == int(match["seq"])
        ]
        for work in found:
            work.group, work.enqueued = group or work.group, enqueued
        if not found and _DEFAULT_GROUP.search(group):
            self._enqueued.setdefault(rank, enqueued)

    def analyse(self, *, world_size: int | None) -> Finding | None:
        """Compare the records of the group that most ranks are in."""
        if differing := self._first_difference():
            return differing
        works = self._first_of_each_rank()
        if not works:
            return None
        by_rank = {work.rank: work for work in works}
        seqs = {work.seq for work in works}
        if len(seqs) == 1 and len(works) > 1 and _NO_SEQ not in seqs:
            differing = self._mismatch(works)
            if differing:
                return differing
        behind = self._behind(works)
        if behind:
            return behind
        lagging = sorted(
            rank
            for rank, enqueued in self._enqueued.items()
            if rank not in by_rank and max(seqs) != _NO_SEQ and enqueued < max(seqs)
        )
        if lagging:
            text = f"{_ranks(lagging)} had not started the collective that the others wait in"
            num_known = len(by_rank) + len(lagging)
            # WHY: of the ranks that say nothing, others may be behind, too
            is_whole = num_known == (world_size or max(*by_rank, *lagging) + 1)
            named = tuple(lagging) if is_whole else ()
            return Finding("missing", named, text, tuple(works), is_sure=is_whole)
        missing = self._missing(works, world_size)
        if missing:
            is_sure = world_size is not None
            text = f"{_ranks(missing)} did not reach the collective that the others wait in"
            return Finding("missing", tuple(missing), text, tuple(works), is_sure=is_sure)
        text = f"{_ranks(sorted(by_rank))} waited in {works[0].op}"
        return Finding("waiting", (), text, tuple(works))

    def _first_of_each_rank(self) -> list[Work]:
        """Take the largest group's records, and of each rank the earliest collective."""
        groups: dict[str, dict[int, Work]] = {}
        for work in self._works.values():
            key = "" if _DEFAULT_GROUP.search(work.group) else work.group
            mine = groups.setdefault(key, {})
            if work.rank not in mine or work.seq < mine[work.rank].seq:
                mine[work.rank] = work
        if not groups:
            return []
        # WHY the default group on equal size: only its ranks are those of the job
        name = max(groups, key=lambda key: (len(groups[key]), key == ""))
        works = sorted(groups[name].values(), key=lambda work: work.rank)
        for work in works:
            work.is_global = name == "" or work.line.rank is not None
        return works

    @staticmethod
    def _mismatch(works: Sequence[Work]) -> Finding | None:
        ops = {work.op for work in works}
        sizes = {work.numel for work in works}
        if len(ops) > 1 or (len(sizes) > 1 and ops <= _EQUAL_SIZES):
            shown = "; ".join(
                f"rank {work.rank}: {work.op} of {work.numel} elements" for work in works[:4]
            )
            text = f"at collective number {works[0].seq} the ranks called different ones ({shown})"
            return Finding("mismatch", (), text, tuple(works))
        return None

    @staticmethod
    def _behind(works: Sequence[Work]) -> Finding | None:
        """Find the ranks with the lowest number, if that is a minority."""
        known = [work for work in works if work.seq != _NO_SEQ]
        seqs = sorted({work.seq for work in known})
        if len(seqs) < 2:
            return None
        lowest = [work for work in known if work.seq == seqs[0]]
        text = (
            f"{_ranks([w.rank for w in lowest])} waited in collective number {seqs[0]}, the others "
            f"were at {seqs[1]} or later"
        )
        ranks = tuple(work.rank for work in lowest) if len(lowest) < len(known) else ()
        groups_known = all(work.group for work in known)
        return Finding("behind", ranks, text, tuple(known), is_sure=groups_known)

    def _missing(self, works: Sequence[Work], world_size: int | None) -> list[int]:
        """List the ranks without a record, if the log is whole enough to tell."""
        speakers = {work.rank for work in works}
        if self.num_leaving == 0 or not all(work.is_global for work in works):
            return []  # cut off, so other ranks may have spoken below; or ranks of a sub-group
        if len(speakers) < 2 and world_size is None:
            return []
        size = world_size if world_size is not None else max(speakers) + 1
        return sorted(set(range(size)) - speakers)


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
