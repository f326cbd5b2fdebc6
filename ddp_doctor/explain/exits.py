"""How processes ended, as launchers and schedulers tell it: rank, status, host, pid.

Owns torchrun's last block, and single lines of torchrun, spawn, srun and mpirun.
"""

import re
import signal
from dataclasses import dataclass, field

from ddp_doctor.explain.events import Line

_FIELD = re.compile(r"\s*(?P<name>time|host|rank|exitcode|error_file|traceback) *: ?(?P<value>.*)$")
_ENTRY = re.compile(r"\s*\[\d+\]:\s*$")
_RULE = re.compile(r"\s*[-=]{10,}\s*$")
_RANK = re.compile(r"(?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_STATUS = re.compile(r"(?P<status>-?\d+) \(pid: (?P<pid>\d+)\)")
_SINGLE = (
    re.compile(
        r"failed \(exitcode: (?P<status>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)"
    ),
    re.compile(
        r"process (?P<rank>\d+) terminated with (?:exit code (?P<status>\d+)|signal "
        r"(?P<signal>SIG\w+))"
    ),
    re.compile(
        r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<host>\S+) exited "
        r"on signal (?P<number>\d+)"
    ),
    re.compile(r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>[\d,-]+): (?P<words>.+)"),
    re.compile(
        r"Child process (?P<pid>\d+) \(local_rank (?P<local>\d+)\) FAILED "
        r"\(exitcode (?P<status>-?\d+)\)"
    ),
    re.compile(r"\bRank (?P<rank>\d+) crashed with exit code (?P<status>-?\d+)"),
    re.compile(
        r"Global rank (?P<rank>\d+) \(PID (?P<pid>\d+)\) exited with code (?P<status>-?\d+)"
    ),
    re.compile(r"Error pod (?P<host>[\w.-]+) container \S+ exitCode: (?P<status>\d+)"),
    re.compile(r"\bPod: (?P<host>[\w.-]+) exited with code (?P<status>\d+)"),
    re.compile(r"exits with return code = (?P<status>-?\d+)"),
    re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d+)"),
    re.compile(r"Child process with PID (?P<pid>\d+) terminated with code (?P<status>-?\d+)"),
)
_CLOSED = re.compile(
    r"(?:Sending process (?P<pid>\d+) closing signal|Unable to shutdown process (?P<deaf>\d+) via)"
)
_SRUN = {
    "Killed": -9, "Segmentation fault": -11, "Aborted": -6, "Bus error": -7, "Terminated": -15,
    "Out Of Memory": -9, "Illegal instruction": -4, "Floating point exception": -8,
}  # fmt: skip
_SECTION = re.compile(
    r"-----(?:Begin global rank (?P<rank>\d+)|End global rank \d+) STD(?:OUT|ERR)-----"
)
_EXITED = re.compile(r"Exited with exit code (?P<status>\d+)")


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
    time: str = ""
    is_root: bool = False
    """torchrun calls it the first."""

    from_block: bool = False


@dataclass(slots=True)
class ExitReader:
    """Reads the lines about ended processes."""

    exits: list[Exit] = field(default_factory=list)
    rank: int | None = None
    """The rank whose output is quoted at the moment."""

    closed: set[int] = field(default_factory=set)
    """The processes that torchrun ended, because another one had failed."""

    _values: dict[str, str] = field(default_factory=dict)
    _line: Line | None = None
    _is_root: bool = False
    _in_block: bool = False

    @property
    def is_open(self) -> bool:
        return self._in_block

    def take(self, line: Line) -> bool:
        """Take a line; True if it is nothing but a part of torchrun's block."""
        text = line.text
        if "Root Cause (first observed failure)" in text or text.strip() == "Failures:":
            self._flush()
            self._in_block, self._is_root = True, "Root" in text
            return True
        if self._in_block:
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
        self._in_block = False

    def _take_block(self, line: Line) -> bool:
        text = line.text
        if _ENTRY.match(text):
            self._flush()
            return True
        if _RULE.match(text):
            self._flush()
            self._in_block = not text.strip().startswith("=") and not self._is_root
            return True
        match = _FIELD.match(text)
        if match and self.rank is None:
            self._values[match["name"]] = match["value"].strip()
            self._line = line if match["name"] == "rank" else self._line
            if match["name"] == "traceback":
                rank = _RANK.match(self._values.get("rank", ""))
                self._flush()
                if match["value"].startswith("Traceback"):
                    self.rank = int(rank["rank"]) if rank else None
                    line.text = match["value"]
                    return False
            return True
        if self.rank is not None:
            line.text = text.removeprefix("  ")
            return False
        return not text.strip() or "NO_OTHER_FAILURES" in text

    def _flush(self) -> None:
        """End the entry that is being read."""
        values, self._values = self._values, {}
        rank, status = (
            _RANK.match(values.get("rank", "")),
            _STATUS.match(values.get("exitcode", "")),
        )
        self.rank = None
        if rank and status and self._line is not None:
            self.exits.append(
                Exit(
                    status=int(status["status"]),
                    line=self._line,
                    rank=int(rank["rank"]),
                    local=int(rank["local"]),
                    host=values.get("host"),
                    pid=int(status["pid"]),
                    time=values.get("time", "").replace("_", " "),
                    is_root=self._is_root,
                    from_block=True,
                )
            )

    def _add(self, match: re.Match[str], line: Line) -> None:
        found = match.groupdict()
        if found.get("tasks"):
            self._add_srun(found, line)
            return
        code = int(found.get("status") or 1)
        if number := found.get("number"):
            code = -int(number)
        elif name := found.get("signal"):
            code = -getattr(signal, name, 0)
        self.exits.append(
            Exit(
                status=_signal_of(code),
                line=line,
                rank=int(found["rank"]) if found.get("rank") else None,
                local=int(found["local"]) if found.get("local") else None,
                host=found.get("host"),
                pid=int(found["pid"]) if found.get("pid") else None,
            )
        )

    def _add_srun(self, found: dict[str, str | None], line: Line) -> None:
        words = found.get("words") or ""
        exited = _EXITED.search(words)
        status = int(exited["status"]) if exited else 1
        for name, value in _SRUN.items():
            if words.startswith(name):
                status = value
        for task in _tasks(found.get("tasks") or ""):
            self.exits.append(
                Exit(status=_signal_of(status), line=line, task=task, host=found.get("host"))
            )


def _signal_of(status: int) -> int:
    """Give 137 and its like as Python does: a shell adds 128 to the signal's number."""
    return 128 - status if 129 <= status <= 159 else status


def _tasks(text: str) -> list[int]:
    """Read Slurm's list of tasks: 0-2,5."""
    tasks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            end = int(last) if last.isdigit() else int(first)
            tasks += range(int(first), min(end, int(first) + 100_000) + 1)
    return tasks
