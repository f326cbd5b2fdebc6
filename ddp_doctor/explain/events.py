"""What a log says, as data: lines, exceptions, and events with the tier that they belong to.

Owns the types that the reader fills in and the verdict reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

_ENTRIES = {"<module>", "_wrap", "_bootstrap", "_worker_loop", "_run_module_as_main", ""}
_OF_TORCHRUN = ("distributed/launcher/api.py", "torch/distributed/run.py", "distributed/launch.py")
_OF_PARENTS = ("torch/multiprocessing/spawn.py", "deepspeed/launcher/launch.py")
_ENTRY_FILES = ("elastic/multiprocessing/errors/__init__.py", "multiprocessing/process.py")


class Tier(IntEnum):
    """How close to the root of a failure a message is; the lowest tier that is found wins."""

    HARDWARE = 0
    KILLED = 1
    """By the kernel, the scheduler or the container runtime."""

    EXCEPTION = 2
    """Raised by one process on its own."""

    MISMATCH = 3
    """Ranks do different things."""

    TIMEOUT = 4
    LOST = 5
    """A connection to another rank is gone."""

    TEARDOWN = 6
    LAUNCHER = 7
    """The launcher says that a process failed; it does not know why."""

    ADVICE = 8
    """A warning, advice or known noise: never a cause."""


class Blame(IntEnum):
    """Which rank a message accuses."""

    SPEAKER = 0
    """The rank that prints it."""

    NAMED = 1
    """The ranks in the pattern's group `ranks`."""

    NOBODY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One entry of the catalogue."""

    code: str
    title: str
    phrases: tuple[str, ...] = ()
    """Regular expressions, made from format strings. A named group is a field of the sentence."""

    why: str
    """The cause in one or two sentences; {name} stands for a field of the phrase."""

    fix: str
    """What to do in plain torch."""

    confirm: str = ""
    """How to make sure that this is the cause; empty if the fix shows it."""

    tier: Tier = Tier.EXCEPTION
    blame: Blame | None = None
    """None: nobody, if the tier says that processes were ended, wait, or lost each other."""

    is_generic: bool = False
    """The message has many causes, so a specific one of the same tier comes first."""

    most: str = "certain"
    """As sure as its answer can be: likely or unknown, if other causes give this message, too."""

    or_else: str = ""
    """A second cause that gives the same message, and what tells the two apart."""

    cases: tuple[tuple[str, str, str], ...] = ()
    """What the log says, too, as regular expressions; and why and fix, if it does."""

    lightning: str = ""
    accelerate: str = ""
    trainer: str = ""
    """What to do there instead; empty: as in plain torch."""

    @property
    def is_of_type(self) -> bool:
        """Whether only the type of an exception was known, so its own message says more."""
        return self.code.startswith("python-")

    @property
    def accuses(self) -> Blame:
        """Which rank its message accuses."""
        if self.blame is not None:
            return self.blame
        return Blame.SPEAKER if self.tier in (Tier.HARDWARE, Tier.EXCEPTION) else Blame.NOBODY


@dataclass(slots=True, kw_only=True)
class Line:
    """One line of a log, without its prefixes."""

    file: str
    number: int
    text: str
    raw: str = ""
    rank: int | None = None
    """Global rank, if the line says it."""

    local: int | None = None
    """Rank on its node."""

    task: int | None = None
    """Number of the Slurm task: the rank, unless each task is a launcher."""

    host: str | None = None
    time: str = ""
    """As far as it can be compared: year to microsecond or hour to microsecond."""

    order: int = 0
    """Position in all that was read."""

    lead: str = ""
    """A prefix that only this file has, without the time in it."""

    before: str = ""
    """What stands in the line before a traceback's header: a message, or such a prefix."""

    @property
    def stream(self) -> tuple[object, ...]:
        """What tells apart the outputs that were merged into one file."""
        host = self.host if self.rank is None else None
        return (self.file, self.rank, self.local, self.task, host, self.lead)


@dataclass(frozen=True, slots=True)
class Frame:
    """One entry of a Python traceback."""

    file: str
    line: int
    function: str

    @property
    def is_entry(self) -> bool:
        """Whether a process begins there: the program, or what runs a function in a process."""
        path = self.file.replace("\\", "/")
        return self.function in _ENTRIES or path.endswith(_ENTRY_FILES) or "runpy" in path

    @property
    def is_library(self) -> bool:
        path = self.file.replace("\\", "/")
        marks = ("site-packages/", "dist-packages/", "/lib/python", "<frozen", "<string>", "<__")
        is_script = re.search(r"(?:env\w*|conda\d?|usr)/(?:[\w.-]+/)?bin/[\w-]+$", path) is not None
        return is_script or any(mark in path for mark in marks) or path.startswith("torch/")


@dataclass(slots=True, kw_only=True)
class Raised:
    """A Python exception as its traceback shows it."""

    type: str
    message: str
    frames: list[Frame] = field(default_factory=list)
    before: Raised | None = None
    """The exception that it followed from, or was raised in the handling of."""

    link: str = ""
    """direct, handling, or inner: a traceback quoted in another one's message."""

    has_raise: bool = True
    """The program's own line raises it; as far as the log shows that line."""

    is_whole: bool = False
    """The header of its traceback is in the log, so that the first frame is the first one."""

    stated: str = ""
    """The program's line, if it is an assertion."""

    @property
    def catcher(self) -> int:
        """Who caught it, as its traceback begins there: 0 nobody, 1 the program, 2 a library."""
        if not self.is_whole or not self.frames or self.frames[0].is_entry:
            return 0
        return 1 + self.frames[0].is_library

    @property
    def name(self) -> str:
        """The class without its module."""
        return self.type.rpartition(".")[2]

    @property
    def headline(self) -> str:
        """The first line of its message, with the second if that says what was raised."""
        first, _, rest = self.message.lstrip("" if self.stated else None).partition("\n")
        first = f"{first} {rest}".partition("\n")[0] if first.endswith(" raised:") else first
        return first or self.stated

    @property
    def whole(self) -> str:
        """What the traceback's last line says."""
        of_library = self.stated if self.frames and self.frames[-1].is_library else ""
        return f"{self.type}: {self.message or of_library}"

    @property
    def shape(self) -> str:
        """The message without what differs between ranks."""
        return re.sub(r"0x[0-9a-f]+|\d+", "#", self.message[:300])

    @property
    def is_of_launcher(self) -> bool:
        """Whether torchrun itself raised it: the ranks may have failed before, for a cause."""
        return any(frame.file.endswith(_OF_TORCHRUN) for frame in self.frames)

    @property
    def is_of_parent(self) -> bool:
        """Whether a process raised it that started others, and only waits for them."""
        last = self.frames[-1] if self.frames else None
        return last is not None and last.file.endswith(_OF_PARENTS) and last.function != "_wrap"

    @property
    def own_frame(self) -> Frame | None:
        """The innermost frame of the program itself, not of a library."""
        own = [frame for frame in self.frames if not frame.is_library]
        return own[-1] if own else None

    @property
    def where(self) -> str:
        frame = self.own_frame or (self.frames[-1] if self.frames else None)
        return f"{frame.file}:{frame.line}" if frame else ""


@dataclass(slots=True, kw_only=True)
class Event:
    """Something that a log says about a failure."""

    kind: str
    """exception, message, collective, exit, or signal."""

    tier: Tier
    line: Line
    cause: Cause | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    """The ranks that the message itself accuses."""

    host: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    raised: Raised | None = None
    is_weak: bool = False
    """A thread's or a handled exception: the process went on."""

    count: int = 1
    """How often this message was found on this rank."""

    again: int = 0
    """The line of the file where it was found last, if it was found again."""

    detail: Line | None = None
    """The line of a longer message that names the cause."""

    chained: Event | None = None
    """The exception during whose handling this one was raised: one failure, told twice."""

    @property
    def code(self) -> str:
        """The code of its cause; empty if that is not known."""
        return self.cause.code if self.cause is not None else ""

    @property
    def began(self) -> Line:
        """The line with which this failure begins: that of the first exception of its chain."""
        return self.line if self.chained is None else self.chained.began
