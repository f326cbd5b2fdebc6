"""Python tracebacks, put together from lines: one event for each exception and rank.

Owns plain tracebacks, those of rich in its boxes, quoted ones (of a DataLoader worker, of spawn),
and chains. Lines of other ranks may stand between: each stream has an assembler of its own; if
unlabelled tracebacks are mixed, each last line still gives one exception.
"""

import re
from dataclasses import dataclass, field

from ddp_doctor.explain.events import Event, Frame, Line, Raised

HEADER = re.compile(
    r"(?P<before>.*?)Traceback \((?:most recent call last|innermost last)\)(?P<box>.*)"
)
_FRAME = re.compile(
    r'\s*(?:\| )*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?'
)
_MARGIN = re.compile(r"(?: {2})+\| ")
"""Python's, beside the tracebacks of an exception group."""

_MEMBER = re.compile(r"\n\+[-+]+ \d+ -+$")
"""The line of a group's message behind which the traceback of one of its exceptions stands."""

DUMPED_FRAME = re.compile(r'\s*File "[^"]+", line \d+ in ')
"""Of faulthandler: its stacks belong to no exception."""

_RICH_FRAME = re.compile(
    r"(?P<file>(?:[A-Z]:\\|/|\./)?[\w./\\ -]+\.py):(?P<line>\d+) in (?P<function>\S+)"
)
_LAST = re.compile(
    r"(?P<type>[A-Za-z_]\w*(?:\.(?:<locals>|[A-Za-z_]\w*))*)(?:: ?(?P<message>.*)|)$"
)
_TYPE_END = re.compile(
    r"(?:Error|Exception|Exit|Interrupt|Iteration|Warning|Failure|Failed|Timeout|Abort|Aborted"
    r"|OutOfMemory|Empty|Full|Panic|Exhausted|Invalid|Mismatch|Group|NotFound|Unsupported)$"
)
_CAMEL = re.compile(r"_?[A-Z][a-z]+(?:[A-Z][A-Za-z]*)*$|_?[A-Z]{2,}[a-z]+\w*$")
_DIRECT = "The above exception was the direct cause of the following exception"
_HANDLING = "During handling of the above exception, another exception occurred"
_WEAK_MARKS = ("Exception ignored in", "Exception in thread", "_run_exitfuncs", "--- Logging error")
_MAX_LINES = 400
"""A traceback that has no end within so many lines of its stream was cut off."""

_OTHER_RECORD = re.compile(
    r"\[|=====|[WE]0|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[: ]"
    r"|torch\.distributed\.elastic\.|(?:\S+: )?\w*Warning: |WARNING|Set the environment"
    r"|trainable params|wandb: |Abort\(|Killed$|[Ss]egmentation fault\b|\S+: line \d+: +\d+ [A-Z]"
)
"""How a line of a logger, or of a shell, begins: no part of the message before it."""

_GLOG = re.compile(r"(?:\[rank\d+\]:)?\[?[WEIF]\d{3,4} \d\d:|\[(?:ERROR|WARNING|INFO)\] \d")
_BAR = re.compile(r"\S* +\d+%\|")
_MAX_MESSAGE_LINES = 12
_MAX_FRAMES = 120


@dataclass(slots=True)
class Found:
    """An exception, and the line that its message stands in."""

    raised: Raised
    line: Line
    is_weak: bool = False
    event: Event | None = None
    """What the collector made of it."""


@dataclass(slots=True)
class Assembler:
    """The tracebacks of one stream."""

    num_open: int = 0
    """Headers without a last line."""

    frames: list[Frame] = field(default_factory=list)
    is_weak: bool = False
    weak_lines: int = 0
    """A header within so many lines belongs to an exception that ends nothing."""

    link: str = ""
    before: Raised | None = None
    in_message: Found | None = None
    """The exception whose message may go on."""

    message_lines: int = 0
    after_blank: bool = False
    idle_lines: int = 0
    has_header: bool = False
    last_line: Line | None = None
    source: str = ""
    """The program's line at the newest frame."""

    @property
    def is_open(self) -> bool:
        return self.num_open > 0 or self.in_message is not None

    def take(self, line: Line) -> Found | None:
        """Take the stream's next line; return an exception when its last line is reached."""
        if self.num_open:
            line.text = _MARGIN.sub("", line.text, count=1)
        text = line.text
        self.weak_lines -= self.weak_lines > 0
        if any(mark in text for mark in _WEAK_MARKS):
            self.weak_lines = 4
        if _HANDLING in text or _DIRECT in text:
            self.link = "handling" if _HANDLING in text else "direct"
            self.in_message = None
            return None
        if header := HEADER.match(text):
            self._open(header)
            self.last_line = line
            return None
        if DUMPED_FRAME.match(text):
            return None
        frame = _FRAME.match(text)
        rich = _RICH_FRAME.match(text) if self.num_open and not frame else None
        if found := frame or rich:
            self._add_frame(found)
            self.last_line = line
            return None
        if self.num_open:
            return self._inside(line)
        if self.in_message is not None:
            self._continue_message(line)
        return None

    def cut_off(self) -> Found | None:
        """Give what there is of a traceback whose last line is missing."""
        of_rank = self.last_line is not None and self.last_line.rank is not None
        of_rank &= "_stack" not in self.source
        is_at_end = of_rank and self.idle_lines < 2 < len(self.frames)  # else printed on purpose
        if not (self.num_open and (self.has_header or is_at_end) and self.last_line):
            self._close()
            return None
        said = self.source if re.match(r"raise \w+\(.|assert ", self.source) else ""
        raised = Raised(type="", message=said, frames=list(self.frames))
        line = self.last_line
        self._close()
        # WHY weak: anything else in the log says more
        return Found(raised, line, is_weak=True)

    def _open(self, header: re.Match[str]) -> None:
        self.is_weak = self.weak_lines > 0
        is_quoted = header["before"].rstrip().endswith("Original")
        said = self.in_message.raised.message if self.in_message is not None else ""
        if self.in_message is not None and (is_quoted or _MEMBER.search(said)):
            self.before, self.link = self.in_message.raised, "inner"
        elif not self.link:
            self.before = None
        if self.num_open == 0:
            self.frames, self.has_header = [], True
        self.num_open = min(self.num_open + 1, 64)
        self.in_message, self.idle_lines = None, 0

    def _add_frame(self, match: re.Match[str]) -> None:
        if self.num_open == 0:
            if not match["function"]:
                return
            # the log was cut off before the header
            self.num_open, self.frames, self.has_header = 1, [], False
        if len(self.frames) < _MAX_FRAMES:
            frame = Frame(match["file"], int(match["line"]), match["function"] or "")
            self.frames.append(frame)
            self.source = ""
        self.idle_lines = 0
        self.in_message = None

    def _inside(self, line: Line) -> Found | None:
        """Look for the last line: the exception itself."""
        text = line.text
        is_mark = not text.strip("^~ ")  # Python's, below the source
        self.idle_lines += not is_mark
        if self.idle_lines == 1 and not is_mark and text[:4] == "    " and self.frames:
            self.source = text.strip()
        if self.idle_lines > _MAX_LINES:
            return self.cut_off()
        # WHY: torchrun's last block indents a quoted traceback by two blanks
        is_in_block = text.startswith("  ") and text[2:3].isalpha()
        match = _LAST.match(text.removeprefix("  ") if is_in_block else text)
        if not match or not self._is_type(match["type"], match["message"]):
            return None
        raised = Raised(
            type=match["type"],
            message=(match["message"] or "").strip(),
            frames=list(self.frames),
            before=self.before if self.link else None,
            link=self.link,
            has_raise=not self.source or self.source.startswith(("raise", "assert")),
            is_whole=self.has_header and self.num_open == 1,
            stated=self.source if match["type"] == "AssertionError" else "",
        )
        found = Found(raised, line, is_weak=self.is_weak)
        self.num_open -= 1
        self.before, self.link = raised, ""
        if not self.num_open:
            self._close()
        has_message = match["message"] is not None
        self.in_message = found if has_message or raised.stated else None
        self.message_lines, self.after_blank = 0, False
        return found

    def _is_type(self, name: str, message: str | None) -> bool:
        last = name.rpartition(".")[2]
        if re.match(r"nccl(?:Internal|System|Unhandled|Invalid|Remote)", last):  # in a message
            return False
        if _TYPE_END.search(last):
            return True
        if "." in name and _CAMEL.match(last):
            return True
        # WHY only right behind a frame: `Epoch: 3` of another rank may stand further down
        is_near = self.idle_lines <= 3 and bool(self.frames)
        return is_near and bool(_CAMEL.match(last)) and not (message or "")[:2].strip().isdigit()

    def _continue_message(self, line: Line) -> None:
        assert self.in_message is not None
        self.message_lines, text, raised = self.message_lines + 1, line.text, self.in_message.raised
        if not text.strip():
            self.after_blank = bool(raised.message)
        elif not _BAR.match(text):
            is_gloo = raised.message.endswith("rror:") and "/gloo/" in text[:80]
            is_other = bool(_OTHER_RECORD.match(text) or _GLOG.match(line.raw)) and not is_gloo
            is_other |= self.after_blank and not text[:1].isspace()
            if self.message_lines > _MAX_MESSAGE_LINES or is_other:
                self.in_message = None
                return
            self.after_blank = False
            raised.message = f"{raised.message}\n{text.strip()}"[:4000]

    def _close(self) -> None:
        self.num_open, self.frames, self.idle_lines = 0, [], 0
        self.is_weak = False
