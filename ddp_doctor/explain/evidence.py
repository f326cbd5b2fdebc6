"""All that was found in all files, as the verdict reads it.

Owns what lines say about the job as a whole: its size, nodes, hosts, launcher, and how it ended.
Does not own: filling it in (collector.py).
"""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from ddp_doctor.explain.collectives import Collectives
from ddp_doctor.explain.endings import Ending
from ddp_doctor.explain.events import Event, Line, Raised
from ddp_doctor.explain.exits import ExitReader
from ddp_doctor.explain.run_folder import RankStack, RankStatus

_WORLD = (
    re.compile(r"world[_ ]size[\"']?[ =:]+(?P<size>\d+)", re.IGNORECASE),
    re.compile(r"MEMBER: \d+/(?P<size>\d+)"),
    re.compile(r"nranks (?P<size>\d+)"),
    re.compile(r"Starting with (?P<size>\d+) processes"),
)
_NODES = re.compile(r"(?:nnodes|num_nodes|group_world_size)\b[ =:]+(?:\d+:)?(?P<nodes>\d+)")
_START = re.compile(r"([\d-]{10} [\d:]{8}\.\d{3}) \w+ \S+\.tracker: start: starting")
_ELASTIC = ("distributed.elastic", "distributed/elastic", "torchrun", "ChildFailedError")


@dataclass(slots=True)
class Evidence:
    """All that was found in all files."""

    events: list[Event] = field(default_factory=list)
    collectives: Collectives = field(default_factory=Collectives)
    exits: ExitReader = field(default_factory=ExitReader)
    world_sizes: Counter[int] = field(default_factory=Counter)
    num_nodes: int = 1
    hosts: set[str] = field(default_factory=set)
    has_elastic: bool = False
    endings: dict[str, Ending] = field(default_factory=dict)
    """How each file ends, by its name."""

    starts: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Of each log of our own runs the lines where a process begins, with the local time there."""

    labels_are_ranks: bool = True
    statuses: list[RankStatus] = field(default_factory=list)
    stacks: list[RankStack] = field(default_factory=list)
    error_line: Line | None = None
    """The last line that a program calls an error, and that no entry of the catalogue knows."""

    next_step: str = ""
    """What our own run said to type next."""

    num_lines: int = 0

    @property
    def ends_well(self) -> bool:
        """Whether a file ends with words of success."""
        return any(ending.success for ending in self.endings.values())

    @property
    def ends_with_error(self) -> bool:
        """Whether the last line that a program calls an error is near the end of the log."""
        last = self.error_line
        if last is None:
            return False
        ending = self.endings.get(last.file)
        if ending is not None and ending.goes_on_after(last.number):
            return False
        return self.num_lines - last.number <= 3

    def goes_well(self, line: Line) -> bool:
        """Whether training went on after a line, or a file ends with words of success."""
        ending = self.endings.get(line.file)
        return self.ends_well or (ending is not None and ending.goes_on_after(line.number))

    def event_of(self, raised: Raised | None) -> Event | None:
        """Find the event of an exception that came shortly before."""
        newest = reversed(self.events[-8:])
        return next((event for event in newest if raised and event.raised is raised), None)

    @property
    def world_size(self) -> int | None:
        """The number of ranks, if the log says one."""
        return max(self.world_sizes) if self.world_sizes else None

    def note(self, line: Line) -> bool:
        """Note what a line says about the job; True if a process of a run of ours begins there."""
        text = line.text
        if line.host:
            self.hosts.add(line.host)
        if line.task is not None and line.rank is not None and line.task != line.rank:
            self.labels_are_ranks = False
        if any(word in line.raw for word in _ELASTIC):
            self.has_elastic = True
        for pattern in _WORLD:
            match = pattern.search(text)
            if match and 1 < int(match["size"]) < 1_000_000:
                self.world_sizes[int(match["size"])] += 1
        nodes = _NODES.search(text)
        if nodes:
            self.num_nodes = max(self.num_nodes, min(int(nodes["nodes"]), 100_000))
        if started := _START.match(line.raw):
            with suppress(ValueError, OverflowError):  # a damaged log
                began = datetime.fromisoformat(started[1]).timestamp()
                self.starts.setdefault(line.file, []).append((line.number, began))
        if text.startswith("  next: "):
            self.next_step = text.removeprefix("  next: ")
        return started is not None
