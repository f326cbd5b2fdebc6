"""How processes ended, as launchers and schedulers tell it: rank, status, host, pid.

Owns torchrun's last block, and single lines of torchrun, spawn, srun and mpirun.
"""

import math
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from ddp_doctor.explain.events import Line

_FIELD = re.compile(r"\s*(?P<name>time|host|rank|exitcode|error_file|traceback) *: ?(?P<value>.*)$")
_ENTRY = re.compile(r"\s*\[\d+\]:\s*$")
_RULE = re.compile(r"\s*[-=]{10,}\s*$")
_RANK = re.compile(r"(?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_STATUS = re.compile(r"(?P<status>-?\d+) \(pid: (?P<pid>\d+)\)")
_SINGLE = tuple(
    re.compile(phrase)
    for phrase in (
        r"failed \(exitcode: (?P<status>-?\d+)\)(?:.{,200}\blocal_rank: (?P<local>\d+))?"
        r"(?:.{,9}\((?:pid|process ID): (?P<pid>\d+)\))?",
        r"process (?P<rank>\d+) terminated with (?:exit code (?P<status>\d+)|signal "
        r"(?P<signal>SIG\w+))",
        r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<host>\S+) exited "
        r"on signal (?P<number>\d+)",
        r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,-]+): "
        r"(?:Exited with exit code (?P<status>\d+)|(?P<words>.+))",
        r"Child process (?P<pid>\d+) \(local_rank (?P<local>\d+)\) FAILED "
        r"\(exitcode (?P<status>-?\d+)\)",
        r"\b(?:Rank(?= \d+ crash)|Process(?= \d+ exit w)) (?P<rank>\d+) .*code (?P<status>-?\d+)",
        r"Global rank (?P<rank>\d+) \(PID (?P<pid>\d+)\) exited with code (?P<status>-?\d+)",
        r"Error pod (?P<host>[\w.-]+) container \S+ exitCode: (?P<status>\d+)",
        r"\bPod: (?P<host>[\w.-]+) exited with code (?P<status>\d+)",
        r"(?:exits with return code =|Process finished with exit code) (?P<status>-?\d+)",
        r"MPI_ABORT was invoked on rank (?P<rank>\d+)|non-zero (?:exit code\. Per|status, thus)",
        r"Container rank (?P<rank>\d+) status failed .*\] code (?P<status>-?\d+) log",
        r"Child process with PID (?P<pid>\d+) terminated with code (?P<status>-?\d+)",
    )
)
_CLOSED = re.compile(
    r"(?:Sending process (?P<pid>\d+) closing signal|Unable to shutdown process (?P<deaf>\d+) via)"
)
_WINDOWS = {3221225477: -11, 3221225725: -11, 3221226505: -6, 3221225786: -2}
_SRUN = {
    "Killed": -9, "Segmentation fault": -11, "Aborted": -6, "Bus error": -7, "Terminated": -15,
    "Out Of Memory": -9, "Illegal instruction": -4, "Floating point exception": -8,
}  # fmt: skip
_SECTION = re.compile(
    r"-----(?:Begin global rank (?P<rank>\d+)|End global rank \d+) STD(?:OUT|ERR)-----"
)


@dataclass(slots=True)
class Exit:
    """The end of one process."""

    status: int
    """As Python counts: -9 is signal 9."""

    line: Line
    rank: int | None = None
    local: int | None = None
    task: int | None = None
    """Number of the Slurm task: the rank, unless each task is a launcher."""

    host: str | None = None
    pid: int | None = None
    is_root: bool = False
    """torchrun calls it the first."""

    from_block: bool = False
    at: float = math.nan
    """When, in seconds of the host's clock, as torchrun's table says."""


@dataclass(slots=True)
class ExitReader:
    """Reads the lines about ended processes."""

    exits: list[Exit] = field(default_factory=list)
    rank: int | None = None
    """The rank whose output is quoted at the moment."""

    closed: set[int] = field(default_factory=set)
    """The processes that torchrun ended, because another one had failed."""

    is_open: bool = False
    """Whether torchrun's block has begun, and has not ended."""

    _values: dict[str, str] = field(default_factory=dict)
    _line: Line | None = None
    _is_root: bool = False

    def take(self, line: Line) -> bool:
        """Take a line; True if it is nothing but a part of torchrun's block."""
        text = line.text
        if "Root Cause (first observed failure)" in text or text.strip() == "Failures:":
            self._flush()
            self.is_open, self._is_root = True, "Root" in text
            return True
        if self.is_open:
            return self._take_block(line)
        if section := _SECTION.search(text):  # Composer's launcher quotes what a rank wrote
            self.rank = int(section["rank"]) if section["rank"] else None
            return True
        if closed := _CLOSED.search(text):
            self.closed.add(int(closed["pid"] or closed["deaf"]))
        for pattern in _SINGLE:
            if match := pattern.search(text):
                self._add(match, line)
                break
        return False

    def end(self) -> None:
        """The file ends here."""
        self._flush()
        self.is_open = False

    def _take_block(self, line: Line) -> bool:
        text = line.text
        if _ENTRY.match(text):
            self._flush()
            return True
        if _RULE.match(text):
            self._flush()
            self.is_open = not text.strip().startswith("=") and not self._is_root
            return True
        if self.rank is not None:  # within the traceback of this rank
            line.text = text.removeprefix("  ")
            return False
        match = _FIELD.match(text)
        if not match:
            return not text.strip() or "NO_OTHER_FAILURES" in text
        self._values[match["name"]] = match["value"].strip()
        self._line = line if match["name"] == "rank" else self._line
        if match["name"] != "traceback":
            return True
        rank = _RANK.match(self._values.get("rank", ""))
        self._flush()
        if not match["value"].startswith("Traceback"):
            return True
        self.rank = int(rank["rank"]) if rank else None
        line.text = match["value"]
        return False

    def _flush(self) -> None:
        """End the entry that is being read."""
        values, self._values, self.rank = self._values, {}, None
        rank = _RANK.match(values.get("rank", ""))
        status = _STATUS.match(values.get("exitcode", ""))
        if rank and status and self._line is not None:
            found = {**rank.groupdict(), **status.groupdict(), "host": values.get("host")}
            ended = _exit_of(found, self._line, status=int(status["status"]))
            ended.is_root, ended.from_block = self._is_root, True
            with suppress(ValueError):
                at = datetime.fromisoformat(values.get("time", "").replace("_", " "))
                ended.at = at.timestamp()
            self.exits.append(ended)

    def _add(self, match: re.Match[str], line: Line) -> None:
        found = match.groupdict()
        status = int(found.get("status") or 1)
        if number := found.get("number"):
            status = -int(number)
        elif name := found.get("signal"):
            status = -getattr(signal, name, 0)
        elif words := found.get("words"):
            status = next((of for name, of in _SRUN.items() if words.startswith(name)), status)
        if 129 <= status <= 159:  # a shell adds 128 to a signal's number
            status = 128 - status
        ended = _exit_of(found, line, status=status)
        self.exits += [replace(ended, task=task) for task in _tasks(found.get("tasks"))]


def _exit_of(found: Mapping[str, str | None], line: Line, *, status: int) -> Exit:
    status = _WINDOWS.get(status, status)
    values = (found.get(name) for name in ("rank", "local", "pid"))
    rank, local, pid = (int(value) if value else None for value in values)
    return Exit(status, line, rank=rank, local=local, host=found.get("host"), pid=pid)


def _tasks(text: str | None) -> list[int | None]:
    """Read Slurm's list of tasks: 0-2,5; without one it is one process of no task."""
    if text is None:
        return [None]
    tasks: list[int | None] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        end = int(last or first)
        tasks += range(int(first), min(end, int(first) + 100_000) + 1)
    return tasks
