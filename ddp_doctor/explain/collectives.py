"""What the watchdogs of several ranks say together: who is missing, who is behind, who differs.

Owns one record per rank and process group, from the lines of NCCL's watchdog and of gloo's check of
collectives (TORCH_DISTRIBUTED_DEBUG=DETAIL). A rank that prints one waits; it is the cause only if
most ranks agree and it differs. Sequence numbers are compared within one process group only.
Flight recorder dumps, which say more, are read without running anything: a pickle may hold
numbers, texts and containers only.
"""

import io
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_doctor.explain.events import Line

_WORK = re.compile(
    r"\[(?P<group>[^\]]*?)Rank (?P<rank>\d+)\] +(?:Process group watchdog .*\] +)?Watchdog caught "
    r"collective operation timeout: WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)(?=,)"
    r"(?:, NumelIn=(?P<numel>\d+), NumelOut=\d+)?"
)
_STATUS = re.compile(
    r"\[(?:(?P<group>PG [^\]]*?) )?Rank (?P<rank>\d+)\].*?(?:(?:sequence id|at work|NCCL work): "
    r"(?P<seq>\d+).*?)?[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+),.*?"
    r"last completed (?:NCCL )?work: -?\d+"
)
_FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=(?P<seq>\d+)"
    r", OpType=(?P<op>\w+)(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?"
)
_LEAVING = re.compile(
    r"taking the entire process down|watchdog thread terminated with exception|Signal 6 \(SIGABRT\)"
    r"|first observed failure"
)
_EQUAL_SIZES = re.compile(r"(?:ALL_?)?REDUCE|BROADCAST|_ALLGATHER_BASE|_REDUCE_SCATTER_BASE")
_DEFAULT_GROUP = re.compile(r"default_pg|GUID 0\b|^PG 0\b|^PG \(0\)|^$")
_NO_SEQ = -1
_MOST_APART = 100
_MOST_PLACES, _MOST_NAMED = 4, 16
_RANK = re.compile(r"(\d+)$")
_WHY = {
    "apart": "They wait in different collectives, which no time heals: one took another branch, or "
    "has another number of batches; the lower number is behind.",
    "missing": "What that rank did then is in its own log: data, a save, a crash, another branch.",
    "all": "All ranks are in it, so none is missing: data does not get from GPU to GPU "
    "(interface, firewall, peer-to-peer access, shared memory), or a GPU is stuck.",
    "heard": "No rank that prints is missing. If there is no other, data does not get from GPU to "
    "GPU, or a GPU is stuck; else the one that prints nothing crashed, hangs or branched.",
    "first": "It is the first one, so nothing was exchanged yet: a rank did not come so far "
    "(reading data, building the model, compiling), or the GPUs can't reach each other.",
    "some": "The ranks that print this wait for one that did not come: it crashed, hangs, is slow "
    "(data, evaluation or a save on one rank), took another branch, or has fewer batches.",
}
"""By what is found; of ranks that only wait by whether it is all of them, or the first time."""

PICKLE = b"\x80"
MAX_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class Work:
    """The collective that one rank waited for."""

    rank: int
    seq: int
    op: str
    numel: int
    line: Line
    group: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the records say together."""

    kind: str
    """mismatch, apart, missing, or waiting."""

    ranks: tuple[int, ...]
    """Those that are missing, or elsewhere than most; none if it can't be told."""

    text: str
    works: Sequence[Work]
    is_sure: bool = False

    @property
    def why(self) -> str:
        """Say what may hold up the ranks, by what each of them waits in."""
        if self.kind in _WHY:
            return _WHY[self.kind]
        if self.is_sure:
            return _WHY["all"]
        heard = [work.rank for work in self.works]
        if heard == list(range(max(2, len(heard)))):
            return _WHY["heard"]
        return _WHY["first" if all(work.seq <= 1 for work in self.works) else "some"]


class Collectives:
    """Collects the records."""

    def __init__(self) -> None:
        self._works: dict[tuple[int, int, str], Work] = {}
        self._enqueued: dict[int, int] = {}
        self._history: dict[int, dict[int, Work]] = {}
        """What each rank called, by number."""

        self.is_any_leaving = False
        self.ranks_heard: set[int] = set()
        """The ranks that have a log of their own, or lines among those of others."""

    def take(self, line: Line) -> None:
        """Note what a line says."""
        text = line.text
        if "atchdog" in text or "nqueued" in text:
            if match := _WORK.search(text):
                rank = int(match["rank"]) if line.rank is None else line.rank
                seq, numel = int(match["seq"] or _NO_SEQ), int(match["numel"] or 0)
                self._add(Work(rank, seq, match["op"], numel, line, match["group"]))
            if match := _STATUS.search(text):
                self._add_status(match, line)
        elif "FingerPrint" in text:
            found = list(_FINGERPRINT.finditer(text))
            # WHY: within a sub-group its ranks have other numbers
            if found and line.rank in (None, int(found[0]["rank"])):
                for match in found:
                    numel = math.prod(map(int, re.findall(r"\d+", match["shape"] or "")))
                    rank, seq = int(match["rank"]), int(match["seq"])
                    self._add(Work(rank, seq, match["op"], numel, line))
        self.is_any_leaving |= _LEAVING.search(text) is not None

    def _add(self, work: Work) -> None:
        """Note the collective that a rank did not complete."""
        known = self._works.setdefault((work.rank, work.seq, work.op), work)
        known.group = known.group or work.group

    def take_dump(self, dump: Mapping[str, Any], name: str) -> Line | None:
        """Add one rank's collectives of the default group; return a line for the dump."""
        found = _RANK.search(name)  # the file's name ends with it
        rank = int(found[1]) if found else dump.get("rank")
        entries = [entry for entry in dump["entries"] if _is_of_default_group(entry)]
        if rank is None or not entries:
            return None
        line = Line(file=name, number=1, text="", rank=rank)
        calls = [(entry, _work_of(entry, rank, line)) for entry in entries]
        newest = max(work.seq for _, work in calls)
        line.text = f"flight recorder of rank {rank}: collective {newest} is the newest"
        for entry, work in calls:
            if not entry.get("is_p2p"):  # WHY: these have numbers of their own
                self._history.setdefault(rank, {}).setdefault(work.seq, work)
        waiting = (work for entry, work in calls if not _is_done(entry, dump))
        if first := min(waiting, key=lambda work: work.seq, default=None):
            line.text += f", number {first.seq} ({first.op}) is not complete"
            self._add(first)
        else:
            self._enqueued.setdefault(rank, newest)
        line.raw = line.text
        return line

    def _first_difference(self, world_size: int | None) -> Finding | None:
        """Find the first number at which the ranks called different collectives."""
        ranks = list(self._history.values())
        common = set.intersection(*map(set, ranks)) if len(ranks) > 1 else set()
        found = (self._mismatch([of[seq] for of in ranks], world_size) for seq in sorted(common))
        return next(filter(None, found), None)

    def _add_status(self, match: re.Match[str], line: Line) -> None:
        rank = int(match["rank"]) if line.rank is None else line.rank
        group = match["group"] or ""
        seq = int(match["seq"]) if match["seq"] else None
        found = [w for w in self._works.values() if (w.rank, w.seq) == (rank, seq)]
        for work in found:
            work.group = group or work.group
        if not found and _DEFAULT_GROUP.search(group):
            self._enqueued.setdefault(rank, int(match["enqueued"]))

    def analyse(self, *, world_size: int | None) -> Finding | None:
        """Compare the records of the group that most ranks are in."""
        differing, works = self._first_difference(world_size), self._first_of_each_rank()
        if differing or not works:
            return differing
        waiting = {work.rank for work in works}
        seqs = {work.seq for work in works}
        is_one_place = len(seqs) == 1 and _NO_SEQ not in seqs
        compare = self._mismatch if is_one_place else self._apart
        if differing := compare(works, world_size):
            return differing
        if not all(_DEFAULT_GROUP.search(work.group) for work in works):
            # WHY no more: which ranks are in a smaller group is not known
            return Finding("waiting", (), _told(works), works)
        behind = {rank for rank, enqueued in self._enqueued.items() if enqueued < max(seqs)}
        if lagging := sorted(behind - waiting):
            text = f"{ranks_of(lagging)} had not started the collective that the others wait in"
            num_known = len(waiting) + len(lagging)
            # WHY: of the ranks that say nothing, others may be behind, too
            is_whole = num_known == (world_size or max(*waiting, *lagging) + 1)
            named = tuple(lagging) if is_whole else ()
            return Finding("missing", named, text, works, is_sure=is_whole)
        return self._missing(works, world_size) or Finding(
            "waiting", (), _told(works), works, is_sure=len(waiting) == world_size
        )

    def _first_of_each_rank(self) -> list[Work]:
        """Take the largest group's records, and of each rank the earliest collective."""
        groups: dict[str, dict[int, Work]] = {}
        for work in self._works.values():
            key = "" if _DEFAULT_GROUP.search(work.group) else work.group
            mine = groups.setdefault(key, {})
            if work.rank not in mine or work.seq < mine[work.rank].seq:
                mine[work.rank] = work
        # WHY the default group on equal size: only its ranks are those of the job
        name = max(groups, key=lambda key: (len(groups[key]), key == ""), default="")
        return sorted(groups.get(name, {}).values(), key=lambda work: work.rank)

    @staticmethod
    def _mismatch(works: Sequence[Work], world_size: int | None) -> Finding | None:
        """Compare what the ranks called at one number."""

        def called(work: Work) -> tuple[str, int]:
            return work.op, work.numel if _EQUAL_SIZES.fullmatch(work.op) else 0

        if len(set(map(called, works))) == 1:
            return None
        text = f"at one number the ranks called different collectives: {_told(works)}"
        odd = _odd_ones(works, called, world_size)
        return Finding("mismatch", odd, text, works, is_sure=True)

    @staticmethod
    def _apart(works: Sequence[Work], world_size: int | None) -> Finding | None:
        """Find the ranks that are at another number than most."""
        known = [work for work in works if work.seq != _NO_SEQ]
        seqs = {work.seq for work in known}
        if len(seqs) < 2:
            return None
        is_one_group = all(work.group for work in known)
        # WHY: within one group no rank gets far ahead, so these may count in different groups
        is_near = is_one_group or max(seqs) - min(seqs) <= _MOST_APART
        odd = _odd_ones(known, lambda work: (work.seq, work.op), world_size) if is_near else ()
        return Finding("apart", odd, _told(known), known, is_sure=is_one_group)

    def _missing(self, works: Sequence[Work], world_size: int | None) -> Finding | None:
        """Find the ranks without a record, and name them if the log is whole enough to tell."""
        speakers = {work.rank for work in works}
        size = world_size if world_size is not None else max(speakers) + 1
        missing = sorted(set(range(size)) - speakers)
        if not missing or (len(speakers) < 2 and world_size is None):
            return None
        if not self.is_any_leaving:  # it may be cut off, and other ranks may have spoken below
            text = f"{_told(works)}; nothing is known of {ranks_of(missing)}"
            return Finding("missing", (), text, works)
        elsewhere = [w for w in self._works.values() if w.rank in missing and w.line.rank == w.rank]
        # WHY first those without a record: the others may wait for them in a smaller group
        named = [rank for rank in missing if rank not in {w.rank for w in elsewhere}] or missing
        text = f"{_told(works)}; {ranks_of(named)} reported no wait"
        if named == missing and elsewhere:
            text = f"{_told(works)}; {_told(elsewhere)}, of another group"
        elif not set(named) <= self.ranks_heard:
            # WHY these two: a file of all ranks would have what the few that are missing report
            is_file_of_one = len(works) == len({work.line.file for work in works}) > 1
            if is_file_of_one or 2 * len(named) >= size:
                text = f"{_told(works)}; of {ranks_of(named)} there is no log here"
                named = []
        return Finding("missing", tuple(named), text, works, is_sure=world_size is not None)


def _odd_ones(
    works: Sequence[Work], place_of: Callable[[Work], object], world_size: int | None
) -> tuple[int, ...]:
    """List the ranks that are not where most ranks are; none if no place has most of all ranks."""
    [(place, count)] = Counter(map(place_of, works)).most_common(1)
    is_whole_job = all(_DEFAULT_GROUP.search(work.group) for work in works)
    size = max(len(works), world_size or 0 if is_whole_job else 0)
    if 2 * count <= size:
        return ()
    return tuple(sorted(work.rank for work in works if place_of(work) != place))


def _told(works: Sequence[Work]) -> str:
    """Say which ranks wait in which collective, the fewest first."""
    places: dict[tuple[int, str, int], list[int]] = {}
    for work in works:
        places.setdefault((work.seq, work.op, work.numel), []).append(work.rank)
    parts = []
    for (seq, op, numel), ranks in sorted(places.items(), key=lambda item: (len(item[1]), item[1])):
        number = f" number {seq}" if seq != _NO_SEQ else ""
        size = f" of {numel} elements" if numel else ""
        parts.append(f"{ranks_of(ranks)} in {op}{number}{size}")
    more = f"; {len(parts) - _MOST_PLACES} more" if len(parts) > _MOST_PLACES else ""
    return "; ".join(parts[:_MOST_PLACES]) + more


def ranks_of(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:_MOST_NAMED]))
    if len(ranks) > _MOST_NAMED:
        names += f" and {len(ranks) - _MOST_NAMED} more"
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every class: a dump has none, and a stranger's file may have bad ones."""

    def find_class(self, module_name: str, global_name: str) -> Any:  # Any: it never returns
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain data")


def read_dump(data: bytes) -> Mapping[str, Any] | None:
    """Read a dump; None if this is something else. Any: whatever the file has."""
    try:
        dump = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception:  # WHY broad: a broken pickle raises nearly anything
        return None
    return dump if isinstance(dump, dict) and isinstance(dump.get("entries"), list) else None


def _is_done(entry: Mapping[str, Any], dump: Mapping[str, Any]) -> bool:
    """Whether a collective has completed. WHY not by its state alone: gloo's stays scheduled."""
    if entry.get("state") == "scheduled":
        group = entry.get("process_group") or [""]
        status = (dump.get("pg_status") or {}).get(str(group[0])) or {}
        last = status.get("last_completed_collective", -1)
        return bool(entry.get("retired")) or int(entry["collective_seq_id"]) <= last
    return entry.get("state") == "completed"


def _is_of_default_group(entry: object) -> bool:
    """Whether an entry of a dump is a collective of all ranks, with its number."""
    if not isinstance(entry, dict) or not isinstance(entry.get("collective_seq_id"), int):
        return False
    group = entry.get("process_group") or (entry.get("pg_name", ""), entry.get("pg_desc", ""))
    words = [str(word) for word in group] if isinstance(group, list | tuple) else [str(group)]
    return "default_pg" in words or words[:1] == ["0"]


def _work_of(entry: Mapping[str, Any], rank: int, line: Line) -> Work:
    op = str(entry.get("profiling_name", "?")).rpartition(":")[2].upper()
    tensors = [sizes for sizes in entry.get("input_sizes") or [] if isinstance(sizes, list | tuple)]
    numel = sum(math.prod(size for size in of if isinstance(size, int)) for of in tensors)
    return Work(rank, entry["collective_seq_id"], op, numel, line)
