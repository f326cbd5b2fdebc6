"""What a run folder of ours says beside its logs: each rank's status, and the stacks of a hang.

Owns naming a rank that ended without a word, and where each rank stood in a hang, by line, also
when only some ranks' files are there.
Does not own: the files' format (reporting/rank_status.py, guard/hang.py).
"""

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_doctor.explain.catalogue import BY_CODE
from ddp_doctor.explain.events import Event, Frame, Line, Tier

SILENT, HUNG = "killed-outside", "DDP-G05"
_SAME_START_S = 600.0
_THREAD = re.compile(r"(?:Current t|T)hread (?P<id>0x[0-9a-f]+)")
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_HEAD = re.compile(
    r"rank (?P<rank>\d+), process \d+(?: on (?P<host>\S+):)? ?(?P<phase>[\w -]+?) of step "
    r"(?P<step>\d+) for (?P<age>[\d.]+) s; its main thread is (?P<thread>0x[0-9a-f]+)"
)
WAITS = frozenset(("all-reduce", "broadcast", "gather", "agreement on a stop"))
"""The phases in which a rank only waits for others, as the trainer names them."""

_OUR_FILES = re.compile(r"(?:^|/)(?:hardened_ddp/|ddp_training\.py$)")


@dataclass(frozen=True, slots=True)
class LastStatus:
    """The newest status of one rank."""

    rank: int
    line: Line
    entry: dict[str, Any]  # Any: JSON

    @property
    def is_running(self) -> bool:
        return self.entry.get("state") == "running"

    @property
    def sign(self) -> float:
        """Its last sign of life, in seconds since the epoch."""
        return float(self.entry["now"])

    def is_dead(self) -> bool:
        """Whether its process is gone, or it gave no sign of life for long."""
        process = self.entry.get("process")
        gone = _is_gone(process) if isinstance(process, dict) else None
        limit_s = float(self.entry.get("silent_after_s", 30.0))  # older runs do not say it
        return gone if gone is not None else time.time() - self.sign > limit_s


@dataclass(frozen=True, slots=True)
class RankStack:
    """Where one rank, or one of its workers, stood when a hang was found."""

    rank: int
    worker: str
    line: Line
    """The frame of the program, as evidence."""

    step: int
    is_waiting: bool | None
    """None: it did not answer, and was asked from outside."""


def read_status(text: str, name: str) -> LastStatus | None:
    """Read status/rank-N.json; None if it is cut off or something else."""
    try:
        entry: Any = json.loads(text)  # Any: whatever the file has
        rank, now_s = int(entry["rank"]), float(entry["now"])
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now_s))
        told = f"{entry.get('state')}: step {entry.get('step')}, {entry.get('phase')}, "
        told += f"{entry.get('rss_mib')} MiB; last written {clock} UTC"
        float(entry.get("silent_after_s", 0.0))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return LastStatus(rank, Line(file=name, number=1, text="", raw=told, rank=rank), entry)


def _is_gone(process: dict[str, Any]) -> bool | None:  # Any: JSON
    """Return whether a process has ended; None if it can't be seen from here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    if (boot, namespace) != (process.get("boot"), process.get("namespace")):
        return None
    try:
        stat = Path(f"/proc/{process.get('pid')}/stat").read_bytes()
    except OSError:
        return True
    # WHY after the last bracket: the name before it may contain blanks and brackets
    fields = stat.rpartition(b")")[2].decode().split()
    return fields[0] in ("Z", "X") or fields[19] != process.get("started")


def read_stack(text: str, name: str, rank: int, worker: str) -> RankStack:
    """Read one file of hangs/."""
    lines = text.splitlines()
    head = _HEAD.match(lines[0]) if lines else None
    number, place = _place(lines, head["thread"] if head else "")
    who = f"worker {worker} of rank {rank}" if worker else f"rank {rank}"
    phase = f", {head['phase']} of step {head['step']}" if head else ""
    raw = f"{who}{phase}: {place or 'no stack, it did not answer'}"
    return RankStack(
        rank=rank,
        worker=worker,
        line=Line(file=name, number=number, text=raw, raw=raw, rank=rank),
        step=int(head["step"]) if head else 0,
        is_waiting=head["phase"] in WAITS if head else None,
    )


def _place(lines: Sequence[str], thread: str) -> tuple[int, str]:
    """Find the innermost line of the program in the main thread, and what it called."""
    threads: list[list[tuple[int, Frame]]] = []
    main = None
    for number, text in enumerate(lines, start=1):
        if found := _THREAD.match(text):
            threads.append([])
            main = threads[-1] if found["id"] == thread else main
        elif threads and (match := _FRAME.match(text)):
            entry = Frame(match["file"], int(match["line"]), match["function"])
            threads[-1].append((number, entry))
    whole = [frames for frames in threads if frames and frames[-1][1].is_entry]
    frames = main if main is not None else (whole or threads or [[]])[-1]
    if not frames:
        return 1, ""
    own = [(n, frame) for n, frame in frames if not frame.is_library]
    theirs = [(n, f) for n, f in own if not f.is_entry and not _OUR_FILES.search(f.file)]
    number, frame = (theirs or own or frames)[0]
    place, innermost = f"{frame.file}:{frame.line} in {frame.function}", frames[0][1]
    if innermost is not frame:
        place += f", in {innermost.file}:{innermost.line} {innermost.function}"
    return number, place


def events_of_folder(statuses: Sequence[LastStatus], stacks: Sequence[RankStack]) -> list[Event]:
    """Make events of what a run folder says beside its logs."""
    found = (_silent_event(statuses), _hang_event(stacks))
    return [event for event in found if event is not None]


def _silent_event(statuses: Sequence[LastStatus]) -> Event | None:
    """Find the ranks that ended without a word, while others said how they ended."""
    newest = max(statuses, key=lambda status: status.sign, default=None)
    if newest is None:
        return None
    size, began = int(newest.entry.get("world_size", 0)), newest.entry.get("began_at", 0.0)
    known = [
        status
        for status in statuses
        if status.rank < size and abs(status.entry.get("began_at", 0.0) - began) < _SAME_START_S
    ]
    silent = [status for status in known if status.is_running]
    if not silent or (len(silent) == len(known) and not all(s.is_dead() for s in silent)):
        return None
    first = min(silent, key=lambda status: status.sign)
    hosts = {str(status.entry.get("process", {}).get("host", "?")) for status in silent}
    return Event(
        kind="status",
        tier=Tier.LOST,
        line=first.line,
        cause=BY_CODE[SILENT],
        ranks=tuple(sorted(status.rank for status in silent)),
        host=hosts.pop() if len(hosts) == 1 else None,
        fields={
            "pid": str(first.entry.get("process", {}).get("pid", "?")),
            "others": "the others say how they ended"
            if len(silent) < len(known)
            else "no rank has given a sign of life since",
            "last": first.line.raw.removeprefix("running: "),
        },
    )


def newest_stacks(stacks: Sequence[RankStack]) -> list[RankStack]:
    """Keep those of the newest hang: of each rank first the rank, then its workers."""
    newest = max((stack.line.file.rpartition("/")[0] for stack in stacks), default="")
    found = [stack for stack in stacks if stack.line.file.rpartition("/")[0] == newest]
    return sorted(found, key=lambda stack: (stack.is_waiting is True, stack.rank, stack.worker))


def _hang_event(stacks: Sequence[RankStack]) -> Event | None:
    """Judge stacks without a verdict: who does not wait at the earliest step holds up the rest."""
    ranks = [stack for stack in stacks if not stack.worker]
    if not ranks:
        return None
    deaf = [stack for stack in ranks if stack.is_waiting is None]
    working = [stack for stack in ranks if stack.is_waiting is False]
    first = min((stack.step for stack in working), default=0)
    held = deaf or [stack for stack in working if stack.step == first]
    text = "all ranks whose stacks are here wait for others; the missing ranks hold them up"
    if held:
        names = ", ".join(str(stack.rank) for stack in held)
        text = f"rank {names} does not wait for others; the rest waits"
    return Event(
        kind="message",
        tier=Tier.TIMEOUT,
        line=(held or ranks)[0].line,
        cause=BY_CODE[HUNG],
        ranks=tuple(stack.rank for stack in held),
        fields={"message": text},
    )
