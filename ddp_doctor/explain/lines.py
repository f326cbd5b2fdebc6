"""One line of a log: its text, who wrote it, when, and on which rank.

Owns the prefixes of launchers, schedulers, containers and log libraries, and lines that are JSON.
A prefix that may be something else (`3: ` of srun --label) counts only if most of the file has it.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ddp_doctor.explain.events import Line

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\ufeff]")
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_DATED = re.compile(
    rf"\[?(?P<date>\d{{4}}[-/]\d\d[-/]\d\d|\d\d/\d\d/\d{{4}})[T _](?P<clock>{_CLOCK})"
    r"(?:Z| ?[+-]\d\d:?\d\d)?\]?"
    r"(?: std(?:err|out) [FP])?(?: ?[-|,:]+ ?|[ \t]|$|(?=\[))"
)
_PREFIXES = (
    # ranks
    re.compile(r"\[rank ?:? ?(?P<rank>\d+)\]:? ?"),
    re.compile(r"\[(?:RANK|Rank|GLOBAL_RANK)[ =:]*(?P<rank>\d+)\](?::|(?= [A-Z][a-z]+:)) ?"),
    re.compile(r"(?:RANK|rank|Rank)[ _=]?(?P<rank>\d+)(?:\[\d+\])?(?:\[\w+\])?[:|]+ ?"),
    re.compile(r"\[(?:\d+,(?:mpirank:)?)?(?P<rank>\d+)(?:,[\w-]+)?\]<std(?:err|out|diag)>: ?"),
    re.compile(r"(?:[0-9a-f]{8} )?\[rank=(?P<rank>\d+)\] \|\| ?"),
    # ranks on their node
    re.compile(r"\[(?:default|trainer|worker)(?P<local>\d+)\]: ?"),
    re.compile(r"\[(?P<local>\d{1,3})\]:(?=\[rank|Traceback|  File| ?\w+Error)"),
    # times: of most logs, of syslog, dmesg, glog; without a date
    _DATED,
    re.compile(
        rf"(?:<\d+>)?[A-Z][a-z]{{2}} +\d+ (?P<clock>{_CLOCK}) (?P<host>[\w.-]+) "
        r"(?=kernel:|\w[\w./@-]*(?:\[\d+\])?:)"
    ),
    re.compile(rf"\[[A-Z][a-z]{{2}} [A-Z][a-z]{{2}} +\d+ (?P<clock>{_CLOCK}) \d{{4}}\] ?"),
    re.compile(
        rf"\[?[DIWEFV](?:\d{{3,4}})? ?(?P<clock>{_CLOCK})? *(?:\d+ )?"
        r"[\w./\\-]+\.(?:cpp|hpp|py|cc|h):\d+\] ?"
    ),
    re.compile(rf"\[?(?P<clock>{_CLOCK})\]?(?: ?[-|:]+ ?| )(?=.*\S)"),
    # seconds since the start, and levels
    re.compile(r"(?:kernel: )?\[ *\d+\.\d{3,}\] ?"),
    re.compile(r"\[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\](?::|(?=\s*\S)) ?"),
    re.compile(rf"[A-Z]{{4,8}} \d\d-\d\d {_CLOCK} \[\S+:\d+\] ?(?=Traceback|  |[\w.]+Error:)"),
    # hosts: of NCCL, Kubernetes, Ray, docker compose
    re.compile(r"(?P<host>[\w.-]+):\d+:\d+ \[-?\d+\] (?=\S+ ?\S* NCCL |NCCL |[\w/]+\.\w+:\d+)"),
    re.compile(r"\[pod/(?P<host>[\w.-]+)/[\w.-]+\] ?"),
    re.compile(
        r"\([\w.-]+(?:\[rank=(?P<rank>\d+)\])?(?:,? rank=(?P<task>\d+))?,? pid=\d+"
        r"(?:, ip=(?P<host>[\w.:]+))?\) ?"
    ),
    re.compile(r"(?P<host>[a-z][\w.]*[-_]\d+) +\| "),
)
_LABEL = re.compile(r" *(?P<task>\d{1,5}):(?!\d\d:\d\d-) ?")  # a date of oneCCL is no rank
_NAMED_HOST = re.compile(r"(?P<host>[a-zA-Z][\w-]*\d[\w.-]*): ?")
_WORDS_BEHIND = re.compile(r"Traceback \(most|  File \"|\[rank|\[E|[\w.]+(?:Error|Exception): ")
_LATE_RANK = re.compile(r"[^'\"]*?(\[rank\d+\]:.*)")
_TIMES = re.compile(r"\d+(?:[:.,]\d+)+")
_FRAME_BEHIND = re.compile(r"(.{1,80}?) {2}File \"")
_FLAT = re.compile(
    r"Traceback \(most recent call last\):?\s*(?P<end>(?:\\+r)?\\+n|#012|\|)?\s*(?=File)"
)
"""A traceback whose lines a logger has put in one, and what stands for an end of line there."""

_GLUED = re.compile(
    r"((?:\w+\.)*\w*(?:Error|Exception): .+?)(Traceback \(most recent call last\):)$"
)
_FLAT_ENDS = re.compile(
    r"(?<!:) (?=File \"|(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit): )"
)
_BAR = re.compile(r"\d+%\||\d(?:\.\d+)?(?:it/s|s/it| task/s)")
_PANEL = re.compile(r"^[│┃|]\s(.*?)\s*[│┃|]$")
_MAX_PREFIXES = 8
_MAX_UNKNOWN_PREFIX = 80
_MAX_LEADS = 4000
_SPEAKER = re.compile(r"(?i)\[rank ?[:=]? ?(\d{1,6})\]")
_ENOUGH = 0.6
"""Share of a file's lines that must have a doubtful prefix."""

_MESSAGES = ("log", "message", "msg", "textPayload", "data", "text", "event")
_EXCEPTIONS = ("exc_info", "exception", "traceback", "stack_trace", "stacktrace", "exc_text")
_MEMBER = re.compile(r'\s*(?:"(?P<name>\w+)": )?(?P<text>"(?:[^"\\]|\\.)*"),?\s*$')
"""A line of a JSON file that is written over several lines: a notebook, an export of a cloud."""

_NESTED = ("jsonPayload", "record", "body")
_RANK_NAMES = ("rank", "global_rank")
_MAX_PREFIX = 120


@dataclass(frozen=True, slots=True)
class Habits:
    """The doubtful prefixes that this file has."""

    has_labels: bool = False
    """srun --label: the task before each line."""

    has_hosts: bool = False
    """pdsh and DeepSpeed: the host before each line."""

    lead: re.Pattern[str] | None = None
    """Prefixes that are not known, as they stood before tracebacks."""

    ranks: frozenset[int] = frozenset()
    """Those that wrote some of its lines."""

    indent: int = 0
    """Blanks before each line: it was pasted from somewhere."""


def habits_of(sample: str) -> Habits:
    """Look at a part of a file."""
    lines = [_DATED.sub("", line, count=1) for line in clean(sample).splitlines() if line.strip()]
    need = max(2, _ENOUGH * len(lines))
    num_labels, num_hosts = (sum(map(bool, map(p.match, lines))) for p in (_LABEL, _NAMED_HOST))
    ranks = frozenset(map(int, _SPEAKER.findall(sample)))
    indent = min((len(line) - len(line.lstrip(" ")) for line in lines), default=0)
    labels, hosts = num_labels >= need, num_hosts >= need
    return Habits(has_labels=labels, has_hosts=hosts, ranks=ranks, indent=indent)


def clean(text: str) -> str:
    """Take away colours and control characters."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return _CONTROL.sub("", text)


def parse_line(raw: str, *, file: str, number: int, habits: Habits) -> Line:
    """Take the prefixes off a line and keep what they say."""
    text = clean(raw).rstrip()
    text = text[habits.indent :] if text[: habits.indent].isspace() else text
    line = Line(file=file, number=number, text=text, raw=text.strip())
    for _ in range(_MAX_PREFIXES):
        rest = _peel(line, habits)
        if rest is None or rest == line.text:
            break
        line.text = rest
    _cut_bar(line)
    if panel := _PANEL.match(line.text):
        line.text = panel[1]
    return line


def _peel(line: Line, habits: Habits) -> str | None:
    """Take one prefix off, and note what it says; None if there is none."""
    for pattern in _PREFIXES:
        if match := pattern.match(line.text):
            _note(line, match)
            return line.text[match.end() :]
    return _peel_doubtful(line, habits)


def with_lead(habits: Habits, header: Line | None, text: str) -> Habits | None:
    """Learn a prefix, with other numbers, that a traceback's header and a line of it begin with."""
    frame = _FRAME_BEHIND.match(text) if header is not None else None
    known = habits.lead.pattern + "|" if habits.lead is not None else ""
    if header is None or frame is None or len(known) > _MAX_LEADS:
        return None
    lead = re.sub(r"\d+", r"\\d+", re.escape(frame[1]))
    return replace(habits, lead=re.compile(known + lead)) if re.match(lead, header.before) else None


def _peel_doubtful(line: Line, habits: Habits) -> str | None:
    text = line.text
    if habits.lead is not None and (lead := habits.lead.match(text)):
        line.lead = _TIMES.sub("", lead[0])
        return text[lead.end() :]
    for pattern, is_habit in ((_LABEL, habits.has_labels), (_NAMED_HOST, habits.has_hosts)):
        match = pattern.match(text)
        if match and (is_habit or _WORDS_BEHIND.match(text, match.end())):
            _note(line, match)
            return text[match.end() :]
    return None


def _note(line: Line, prefix: re.Match[str]) -> None:
    found = prefix.groupdict()
    if (rank := found.get("rank")) and (line.rank is None or "[rank" in prefix[0]):
        line.rank = int(rank)
    if local := found.get("local"):
        line.local = int(local)
    if (task := found.get("task")) and line.task is None:
        line.task = int(task)
    line.host = found.get("host") or line.host
    clock = (found.get("clock") or "").replace(",", ".")
    date = (found.get("date") or "").replace("/", "-")
    if clock and len(date + clock) >= len(line.time):
        line.time = f"{date} {clock}".strip()


def _cut_bar(line: Line) -> None:
    """A progress bar has no line end, so a message may stand behind it in the same line."""
    text = line.text
    if "Traceback (most" in text and not text.startswith(("Traceback", "Original", "  ", "\u256d")):
        cut = text.index("Traceback (most")
        line.before, line.text = text[:cut], text[cut:]
    elif text.endswith(("]Killed", "sKilled")):
        line.text = "Killed"
    elif "[rank" in text and line.rank is None:
        late = _LATE_RANK.match(text)
        if late and (_BAR.search(text) or len(text) - len(late[1]) < _MAX_UNKNOWN_PREFIX):
            line.text = late[1]
            rest = _peel(line, Habits())
            line.text = rest if rest is not None else line.text


def lines_of(raw: str) -> list[str]:
    """Give the lines of text in a line: of a JSON object, or of a traceback in one line."""
    return [line for text in _texts_of(raw) for line in _unfolded(text)]


def _unfolded(text: str) -> list[str]:
    if "Traceback (most" not in text:
        return [text]
    if glued := _GLUED.match(text):  # two ranks wrote at once
        return [glued[1], glued[2]]
    flat = _FLAT.search(text)
    if flat is None:
        return [text]
    if flat["end"]:
        text = text.replace(flat["end"], "\n").replace('\\"', '"')
    else:
        text = text[: flat.end()] + "\n" + _FLAT_ENDS.sub("\n", text[flat.end() :])
    return [line.strip() for line in text.splitlines()]


def _texts_of(raw: str) -> list[str]:
    member = _MEMBER.match(raw) if raw.lstrip()[:1] == '"' else None
    if member and member["name"] in (None, *_MESSAGES, *_EXCEPTIONS):
        with suppress(ValueError):  # quotes of something else
            return str(json.loads(member["text"], strict=False)).splitlines() or [raw]
    at = raw.find('{"', 0, _MAX_PREFIX)
    if at < 0 or not raw.rstrip().endswith("}"):
        return [raw]
    try:
        entry: Any = json.loads(raw[at:])  # Any: whatever the program logged
    except (ValueError, RecursionError):
        return [raw]
    nested = [entry[name] for name in _NESTED if isinstance(entry.get(name), dict)]
    text = next((found for part in (entry, *nested) if (found := _text_of(part))), "")
    lines = [line for line in text.splitlines() if line.strip()]
    found_ranks = (part.get(name) for part in (entry, *nested) for name in _RANK_NAMES)
    ranks = [rank for rank in found_ranks if type(rank) is int]  # no bool
    if ranks and "[rank" not in text:
        lines = [f"[rank{ranks[0]}]: {line}" for line in lines]
    return lines or [raw]


def _text_of(entry: dict[str, Any]) -> str:
    """Join the message and the exception of an entry."""
    message = next((entry[name] for name in _MESSAGES if isinstance(entry.get(name), str)), "")
    errors = [entry[name] for name in _EXCEPTIONS if isinstance(entry.get(name), str)]
    return "\n".join([message, *errors])


def stack_of_error_file(text: str) -> str:
    """Give the traceback in torch elastic's error.json; empty if it is another file."""
    try:
        entry: Any = json.loads(text)  # Any: whatever the file has
        return str(entry["message"]["extraInfo"]["py_callstack"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
