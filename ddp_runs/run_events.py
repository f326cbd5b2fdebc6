"""What happened to a run: the warnings and errors in RUN/logs/rank-N.log.

Owns what kind of event a line is: a retry, a rollback, a hang, a stop. The kind follows from the
module that logged it, so a new message needs no change here. Why a run failed is told by explain.
"""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from hardened_ddp.reporting.run_json import files_in, read_text

_LINE = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)"
)
_STEP = re.compile(r"\bstep (\d+)")
_FILE = re.compile(r"rank-(\d+)\.log")
_SAME_EVENT_S = 5.0
_ADVICE = "why: "  # how a line begins that follows an error, and is no further one
_MAX_BYTES = 4 * 2**20
_MAX_TEXT = 400

# The beginning of a module's name -> what its warnings tell of. What stands first counts.
_KINDS = (
    ("hardened_ddp.step.left_out", "left out"),
    ("hardened_ddp.step", "retry"),
    ("hardened_ddp.training.rollback", "rollback"),
    ("hardened_ddp.training.survivor_save", "survivor save"),
    ("hardened_ddp.training.building", "resize"),
    ("hardened_ddp.guard.slow", "slow"),
    ("hardened_ddp.guard.hang", "hang"),
    ("hardened_ddp.guard", "stop"),
    ("hardened_ddp.data", "data"),
    ("hardened_ddp.streams", "data"),
    ("hardened_ddp.checkpoint", "checkpoint"),
    ("hardened_ddp.training.state", "checkpoint"),
    ("hardened_ddp.training.run_folder", "checkpoint"),
)
# Kinds that tell of something that went wrong, the gravest first.
FAULTS = ("error", "hang", "rollback", "retry", "left out", "data", "slow", "survivor save")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that was logged as a warning or an error, perhaps by several ranks."""

    time: float  # in seconds since the epoch: the log's local time is read as that of this machine
    kind: str
    level: str
    text: str
    ranks: tuple[int, ...]
    step: int | None


def read_events(folder: Path, problems: list[str]) -> tuple[Event, ...]:
    """Read the events of all ranks of a run, oldest first. What can't be read goes to problems."""
    found: list[Event] = []
    for path in files_in(folder / "logs", problems):
        rank = _FILE.fullmatch(path.name)
        text = read_text(path, problems, most_bytes=_MAX_BYTES) if rank else ""
        if rank is None or not text:
            continue
        if not any(map(_LINE.match, text.splitlines())):
            problems.append(f"{path.name}: has no line of a log")
        found += events_of(text, rank=int(rank[1]))
    return tuple(merged(found))


def events_of(text: str, *, rank: int) -> list[Event]:
    """Read the events of one rank's log."""
    found = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or match[2] in ("DEBUG", "INFO") or match[4].startswith(_ADVICE):
            continue
        step = _STEP.search(match[4])
        found.append(
            Event(
                time=_seconds(match[1]),
                kind=_kind(match[3], match[2], match[4]),
                level=match[2],
                text=match[4][:_MAX_TEXT],
                ranks=(rank,),
                step=int(step[1]) if step else None,
            )
        )
    return found


def merged(events: Iterable[Event]) -> list[Event]:
    """Merge what several ranks say of one event, and sort by time."""
    found: list[Event] = []
    newest: dict[tuple[str, str], int] = {}
    for event in sorted(events, key=lambda event: event.time):
        at = newest.get((event.kind, event.text))
        if at is not None and event.time - found[at].time < _SAME_EVENT_S:
            ranks = tuple(sorted({*found[at].ranks, *event.ranks}))
            found[at] = replace(found[at], ranks=ranks)
            continue
        newest[event.kind, event.text] = len(found)
        found.append(event)
    return found


def _kind(logger: str, level: str, text: str) -> str:
    if " is slow: " in text:  # hang detection says it, too
        return "slow"
    if " is no longer slow: " in text:
        return "no longer slow"
    if logger == "hardened_ddp":
        return "stop" if ": stopping " in text else "error" if level != "WARNING" else "warning"
    for beginning, kind in _KINDS:
        if logger.startswith(beginning):
            return kind
    return "error" if level in ("ERROR", "CRITICAL") else "warning"


def _seconds(text: str) -> float:
    try:
        moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S.%f")
        return time.mktime(moment.timetuple()) + moment.microsecond / 1e6
    except (ValueError, OverflowError):
        return 0.0
