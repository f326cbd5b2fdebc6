"""Lines to events: everything that a log says about a failure, once.

Owns the order in which a line is asked: launcher's block, tracebacks of its stream, collectives,
phrases of the catalogue; and that memory stays bounded: of each message and rank the first is kept,
the others are counted.
"""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from ddp_doctor.explain.catalogue import BY_CODE
from ddp_doctor.explain.catalogue.python import cause_of_type
from ddp_doctor.explain.collectives import Collectives, read_dump
from ddp_doctor.explain.endings import Ending
from ddp_doctor.explain.events import Blame, Event, Line, Raised, Tier
from ddp_doctor.explain.exits import ExitReader
from ddp_doctor.explain.lines import Habits, lines_of, parse_line, with_lead
from ddp_doctor.explain.matching import Match, Matcher
from ddp_doctor.explain.run_folder import LastStatus, RankStack
from ddp_doctor.explain.sources import Source
from ddp_doctor.explain.tracebacks import DUMPED_FRAME, Assembler, Found

LOOSE = re.compile(
    r"(?:E +)?(?P<type>(?:\w+\.)*(?:[A-Z]\w*(?:Error|Interrupt|Timeout)|\w*Exception|gaierror)"
    r"):(?: (?P<message>.*)|$)"
)
_ERROR_LINE = re.compile(
    r"^(?:\S+: )?(?:fatal|FATAL|[Ee]rror|ERROR|CRITICAL|E:|Fatal error)\b[ :\]]"
    r"|^[\w.]+ (?:ERROR|CRITICAL|FATAL)\b"
    r"|^(?:srun|slurmstepd|sbatch|mpirun|docker|\w+\.py): (?:fatal|error)"
    r"|\bKilling subprocess \d|\bExecuteUserScriptError:|Reporting training FAILURE"
    r"|Failed - Training job failed|UnexpectedAdmissionError|FailedMount|exceptions\.RayTaskError"
    r"|with a non-zero status|= +BAD TERMINATION|^(?:.{,40}: )?[EF] \S+\.cc:\d+\]|Check failed: "
    r"|\b(?:condition \[ ?\w+ ?\]|OP_REQUIRES|Non-OK-status:?) failed|^Exception in device="
    r"|failed with \w+ error|, runtime result = \d{5,}|No PMIx server was|fabric is not"
    r"|^E[A-Z]\d{4}: |Trials did not complete"
)
_NOTABLE = (
    *("error", "fail", "fatal", "abort", "cannot", "can't", "could not", "unable", "unknown"),
    *("denied", "invalid", "refused", "not found", "no such", "unsupported", "exceeded", "expired"),
    *("mismatch", "not supported", "not available", "not allowed", "not exist", "not set", ".so"),
    *("please use", "nccl warn", ".cpp:", "store based barrier"),
    *("training complete", "training finish", "finished train"),
)
"""What no entry knows, and may yet say more than what one knows: an answer that is not certain
quotes the nearest of them."""

_DULL = re.compile(
    r"deprecat|futurewarning|\b(?:no|0) errors?\b|error\w*['\"]?[=: ]+[\d.]+(?:[, ]|$)|^pc: @"
    r"|traceback \(|distributed.elastic|handle_error|writefailure|^ *file \"|^\S+ failed$"
    r"|return \w+[(.]|(?:currently |\(|=)unknown|socket\.cpp|omp_num_threads|nccl info .*plugin"
    r"|some nccl operations|error executing job|errors might be asynch|find_unused_parameters="
    r"|^last error:$|/lib(?:c|pthread|python|stdc|torch)[\w.+-]*\.so"
)
_MAX_NOTABLE = 500
_NO_ERROR = re.compile(r"distributed\.elastic| W tensorflow/")
_RETRIED = re.compile(
    r"\b(?:[Rr]etry(?:ing)?\b(?! count)|step skipped)|Couldn't connect to the Hub"
    r"|^(?!.* (?:death signal|subset of|Stop training|closing signal \S*HUP)).{,200}\bWARNING\b"
)
"""What a program says when it goes on; far behind, torch's advice has this word, too."""

WARNS = re.compile(r"\[W\d{0,4} [^\]]*\.cpp:\d+\]")
_WARNING = re.compile(r"\.py:\d+: \w*Warning: ")
"""Of Python's warnings: what only may have a cause is none there."""

_SPAWNED = re.compile(r"-- Process (?P<rank>\d+) terminated with the following error")
_BOX = ("\u2502", "\u2503", "\u256d", "\u2570")
_OF_LAUNCHER = re.compile(r"(?:ChildFailed|CalledProcess)Error$|Process(?:Raised|Exited)Exception$")
_OF_WEIGHTS = {
    *("from_pretrained", "load_state_dict", "state_dict", "_apply", "full_tensor", "torch_load"),
    *("load", "load_checkpoint", "save_model", "save_checkpoint", "save_pretrained"),
    *("_configure_optimizer", "_ddp_init_helper"),
}
_LAUNCHES = re.compile(r"launch|torchrun|torch\.distributed|deepspeed|mpirun|srun")
_MAX_EVENTS = 4000
_MAX_STREAMS = 4096
_MAX_IDLE_LINES = 4096
"""Lines of others within which an open traceback goes on; more ranks than that do not alternate."""

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

    rank_of_file: dict[str, int] = field(default_factory=dict)
    """Of each file whose name says its rank."""

    starts: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Of each log of our own runs the lines where a process begins, with the local time there."""

    waits: bool = False
    """Whether a rank waited in vain for others."""

    before_wait: str | None = None
    """The text before the first line that says so."""

    labels_are_ranks: bool = True
    statuses: list[LastStatus] = field(default_factory=list)
    stacks: list[RankStack] = field(default_factory=list)
    error_line: Line | None = None
    """The last line that a program calls an error, and that no entry of the catalogue knows."""

    notable: dict[str, Line] = field(default_factory=dict)
    """Lines of trouble that no entry knows: of each form the last one before a failure."""

    failure: Line | None = None
    """The last line in which a launcher says that it failed, or a rank's exception alone."""

    next_step: str = ""
    """What our own run said to type next."""

    num_lines: int = 0

    @property
    def ends_well(self) -> bool:
        """Whether a file ends with words of success: no training and no error comes after them."""
        errors = dict.fromkeys(self.endings, 0)
        for line in filter(None, (self.error_line, self.failure)):
            errors[line.file] = max(errors.get(line.file, 0), line.number)
        return any(e.is_good(errors[name]) for name, e in self.endings.items())

    @property
    def ends_with_error(self) -> bool:
        """Whether the last line that a program calls an error is near the end of the log."""
        last = self.error_line
        if last is None or self._goes_on_after(last):
            return False
        return self.num_lines - last.number <= 4

    def _goes_on_after(self, line: Line) -> bool:
        ending = self.endings.get(line.file)
        return ending is not None and ending.goes_on_after(line.number)

    def goes_well(self, line: Line) -> bool:
        """Whether training went on after a line, or a file ends with words of success."""
        return self.ends_well or self._goes_on_after(line)

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
        self.has_elastic |= any(word in line.raw for word in _ELASTIC)
        for pattern in _WORLD:
            match = pattern.search(text)
            if match and 1 < int(match["size"]) < 1_000_000:
                self.world_sizes[int(match["size"])] += 1
        if nodes := _NODES.search(text):
            self.num_nodes = max(self.num_nodes, min(int(nodes["nodes"]), 100_000))
        if started := _START.match(line.raw):
            with suppress(ValueError, OverflowError):  # a damaged log
                began = datetime.fromisoformat(started[1]).timestamp()
                self.starts.setdefault(line.file, []).append((line.number, began))
        if text.startswith("  next: "):
            self.next_step = text.removeprefix("  next: ")
        return started is not None


class Collector:
    """Takes lines and makes events of them."""

    def __init__(self, matcher: Matcher) -> None:
        self.evidence = Evidence()
        self._matcher = matcher
        self._source = Source(name="", path=None)
        self._habits = Habits()
        self._streams: dict[tuple[object, ...], Assembler] = {}
        self._open: set[tuple[object, ...]] = set()
        self._seen: dict[tuple[object, ...], Event] = {}
        self._order = 0
        self._spawned: int | None = None
        self._header: Line | None = None
        """The newest header of a traceback that something stands before."""

        self._crash: Event | None = None
        """A crash whose stack may follow: of faulthandler, the innermost frame first."""

        self._tail = 0
        self._idle_lines = 0
        self.before_traceback = (0, b"")
        """The line before the file's newest traceback, and the text that ends with it."""

    @property
    def wants_more(self) -> bool:
        """A traceback or a block is open, or a message may go on in the next lines."""
        if self._tail > 0:
            return True
        # WHY a limit: nothing closes the last traceback of a rank that writes no more, and without
        # it each line of the others' training output would be read until the end of the log
        is_open = bool(self._open) or self.evidence.exits.is_open
        return is_open and self._idle_lines < _MAX_IDLE_LINES

    def start_file(self, source: Source, habits: Habits) -> None:
        """Begin with another file."""
        self._source, self._habits = source, habits
        self._spawned, self._header, self._crash, self._tail = None, None, None, 0
        self.before_traceback = (0, b"")
        if source.rank is not None:
            self.evidence.rank_of_file[source.name] = source.rank
        own = (source.rank, source.local, source.task, *habits.ranks)
        self.evidence.collectives.ranks_heard |= {rank for rank in own if rank is not None}

    def end_file(self) -> None:
        """Give up what is still open: the log was cut off there."""
        for stream in list(self._open):
            found = self._streams[stream].cut_off()
            if found and (found.raised.frames or not self.evidence.events):
                self._add_exception(found, self._matcher.find(found.raised.message))
        self._open.clear()
        self._streams.clear()
        self.evidence.exits.end()

    def take(self, raw: str, number: int) -> None:
        """Take one line of the file."""
        of: Source | Line = self._source
        for part in lines_of(raw):
            of = self._parse(part, number, of)
            if habits := with_lead(self._habits, self._header, of.text):
                self._learn(habits)
                of = self._parse(part, number, self._source)
            self._take_line(of)
            self._header = of if of.before else self._header

    def _parse(self, raw: str, number: int, of: Source | Line) -> Line:
        """Read a line of a file, or one that was a part of another line."""
        line = parse_line(raw, file=self._source.name, number=number, habits=self._habits)
        line.rank = of.rank if line.rank is None else line.rank
        line.local = of.local if line.local is None else line.local
        line.task = of.task if line.task is None else line.task
        line.host = line.host or of.host
        return line

    def _learn(self, habits: Habits) -> None:
        """Read the newest traceback's header again, with a prefix that was not known there."""
        assert self._header is not None
        self._streams.pop(self._header.stream, None)
        self._open.discard(self._header.stream)
        self._habits = habits
        self._take_line(self._parse(self._header.raw, self._header.number, self._source))
        self._header = None

    def _take_line(self, line: Line) -> None:
        self._order += 1
        self._tail -= self._tail > 0
        self._idle_lines += 1
        line.order = self._order
        text = line.text
        if not text or text.lstrip().startswith("frame #"):
            if line.stream in self._open:
                self._streams[line.stream].take(line)
                self._note_open(line.stream)
            return
        evidence = self.evidence
        if evidence.exits.take(line):
            self._idle_lines = 0
            return
        if evidence.exits.rank is not None:
            line.rank = evidence.exits.rank
        self._note_facts(line)
        evidence.collectives.take(line)
        self._take_text(line)

    def _take_text(self, line: Line) -> None:
        text, stream = line.text, line.stream
        if stream not in self._streams and len(self._streams) > _MAX_STREAMS:
            self._streams.clear()
            self._open.clear()
        assembler = self._streams.setdefault(stream, Assembler())
        was_message = assembler.in_message
        found = assembler.take(line)
        self._note_open(stream)
        if found:
            self._add_exception(found, self._matcher.find(found.raised.whole))
            return
        if (crash := self._crash) is not None and crash.line.stream == stream:
            if text.startswith("Current thread"):
                crash.detail = None  # the stacks before it are other threads'
            elif DUMPED_FRAME.match(text):
                crash.detail = crash.detail or line
        is_source = assembler.num_open and text[:1].isspace() and "what(): " not in text
        if line.raw.startswith(_BOX) or is_source:
            return
        matches = self._matcher.find(text)
        if matches and was_message is not None and assembler.in_message is was_message:
            self._add_to_exception(was_message, matches, line)
        elif matches:
            self._add_message(matches[0], line)
        elif not assembler.is_open:
            self._take_loose(line)

    def _note_open(self, stream: tuple[object, ...]) -> None:
        if self._streams[stream].is_open:
            self._open.add(stream)
            self._idle_lines = 0
        else:
            self._open.discard(stream)

    def _note_facts(self, line: Line) -> None:
        if self.evidence.note(line):
            self._seen.clear()  # WHY: what a new attempt says is not a repetition
        if spawned := _SPAWNED.search(line.text):
            self._spawned = int(spawned["rank"])
        if "Traceback" in line.text or "Exception" in line.text:
            self._tail = 4

    def _add_exception(self, found: Found, matches: list[Match]) -> None:
        raised, line = found.raised, found.line
        if line.rank is None and self._spawned is not None:
            line.rank, self._spawned = self._spawned, None
        if not matches and raised.before is not None and raised.link != "handling":
            matches = self._matcher.find(raised.before.whole)
        match = matches[0] if matches else None
        tier = match.cause.tier if match else Tier.EXCEPTION
        cause = match.cause if match else cause_of_type(raised)
        last = raised.frames[-1].file if raised.frames else ""
        files = [f for f in raised.frames if "/_inductor/" not in f.file]  # which loads kernels
        functions = {f.function for f in files if f.is_library or f.function == "forward"}
        is_forward = "forward" in functions
        if cause is BY_CODE["graph-shapes"] and not is_forward:
            steps = any("/optim/" in frame.file for frame in raised.frames)
            cause = BY_CODE["checkpoint-optimizer"] if steps else cause
        if cause is BY_CODE["memory-gpu"] and not is_forward and functions & _OF_WEIGHTS:
            cause = BY_CODE["memory-gpu-weights"]
        if tier == Tier.LOST and any("elastic/rendezvous" in f.file for f in raised.frames):
            cause, tier = BY_CODE["launch-rendezvous"], Tier.TIMEOUT  # the store, and no rank
        if cause is BY_CODE["data-missing-file"] and last.endswith("subprocess.py"):
            cause = BY_CODE["launch-command"]
        if cause is not None and re.search(r"[/\\]multiprocessing[/\\]", last):
            # WHY: its locks are files in /dev/shm, and it sends pickles to its processes
            others = {"checkpoint-disk-full": "memory-shm", "checkpoint-corrupt": "data-pickle"}
            if last.endswith("connection.py") and any("torch" in f.file for f in raised.frames):
                others["data-missing-file"] = "data-worker-exited"  # where it listened
            cause = BY_CODE[others.get(cause.code, cause.code)]
            is_echo = cause.code == "data-pickle" and last.endswith("spawn.py")
            tier = Tier.LOST if is_echo else tier  # its parent failed while it sent the arguments
        if last.endswith(("distributed_c10d.py", "c10d_logger.py")):
            # what a collective of objects brought was no pickle; NCCL has files in /dev/shm
            cause = None if cause is BY_CODE["checkpoint-corrupt"] else cause
            cause = BY_CODE["nccl-shm"] if cause is BY_CODE["checkpoint-disk-full"] else cause
        if any(frame.function == "_exit_barrier" for frame in raised.frames):
            tier = Tier.TEARDOWN  # torchrun goes on: this node was done, or had failed
        # CalledProcessError is all that some launchers say of a process that a signal ended
        is_killed = raised.name == "CalledProcessError" and match is not None
        if _is_of_launcher(raised) and not is_killed:
            tier, cause = Tier.LAUNCHER, None
            self.evidence.failure = line
        newest = reversed(self.evidence.events[-8:])
        before = next((e for e in newest if raised.before and e.raised is raised.before), None)
        if before is not None and raised.link == "inner" and before.tier == Tier.EXCEPTION:
            before.is_weak = True  # a quoted traceback says more than the exception that quotes it
        event = Event(
            kind="exception",
            tier=tier,
            line=line,
            cause=cause,
            rank=line.rank,
            ranks=_named(match),
            host=line.host,
            fields=match.fields if match else {},
            raised=raised,
            is_weak=found.is_weak or (match is None and raised.is_of_launcher),
            chained=before,
        )
        found.event = self._keep(event, (raised.type, raised.shape))

    def _add_to_exception(self, found: Found, matches: list[Match], line: Line) -> None:
        """The message of an exception goes on, and this line of it is known."""
        event = found.event
        if event is None or event.tier == Tier.LAUNCHER:
            return
        match = matches[0]
        if match.cause.tier in (Tier.TEARDOWN, Tier.ADVICE) or WARNS.search(line.raw):
            return
        known = event.cause
        is_guess = known is None or known.is_of_type
        if is_guess or (known is not None and known.is_generic and not match.cause.is_generic):
            event.cause, event.tier, event.detail = match.cause, match.cause.tier, line
        if event.cause is match.cause:
            event.fields = {**match.fields, **event.fields}
            event.ranks = event.ranks or _named(match)

    def _add_message(self, match: Match, line: Line) -> None:
        cause = match.cause
        is_note = " NCCL INFO " in line.raw  # what NCCL found out, or chose
        may_be = cause.is_generic or cause.code == "launch-import"
        if is_note or (may_be and _WARNING.search(line.raw)):
            return
        # a store or a peer is gone: at the end of a good run, too
        is_end = cause.tier == Tier.LOST and WARNS.search(line.raw) is not None
        is_goodbye = cause.code == "lost-finished-rank"  # a cause only if others lose this rank
        event = Event(
            kind="message",
            tier=Tier.ADVICE if is_goodbye else cause.tier,
            line=line,
            cause=cause,
            rank=line.rank,
            ranks=_named(match),
            host=line.host,
            fields=match.fields,
            is_weak=is_end or _RETRIED.search(line.raw) is not None,
        )
        event = self._keep(event, (_named(match), event.is_weak))
        self._crash = event if line.text.startswith("Fatal Python error") else self._crash

    def _take_loose(self, line: Line) -> None:
        """An exception's last line alone, or a line that a program calls an error."""
        loose = LOOSE.match(line.text)
        if loose and not line.text.endswith("Warning"):
            raised = Raised(type=loose["type"], message=(loose["message"] or "").strip())
            self._add_exception(Found(raised, line, is_weak=True), [])
            if line.rank is not None:
                self.evidence.failure = line
        elif _ERROR_LINE.search(line.text) and not _NO_ERROR.search(line.raw):
            self.evidence.error_line = line
        notable, text = self.evidence.notable, line.raw[:1000].lower()
        if any(word in text for word in _NOTABLE) and not _DULL.search(text):
            form = re.sub(r"\d+", "0", line.text[:1000])
            if not self.evidence.events:
                notable.pop(form, None)  # the nearest one before the failure
            notable.setdefault(form, replace(line, text=line.text[:1000], raw=line.raw[:1000]))
            if len(notable) > _MAX_NOTABLE:
                del notable[next(iter(notable))]

    def _keep(self, event: Event, what: tuple[object, ...]) -> Event:
        """Keep an event, or count it if its like is there."""
        line = event.line
        self.evidence.waits |= event.tier == Tier.TIMEOUT
        place = (event.rank, line.local, line.task)
        file = line.file if place == (None, None, None) else ""
        key = (event.kind, event.code, *place, line.host, file, *what)
        before = self._seen.get(key)
        if before is not None:
            before.count += 1
            if line.file == before.line.file:
                before.again = line.number
            if event.kind == "exception" and before.is_weak and not event.is_weak:
                before.is_weak, before.raised, before.line = False, event.raised, line
            return before
        if len(self.evidence.events) < _MAX_EVENTS:
            self._seen[key] = event
            self.evidence.events.append(event)
        return event

    def take_dump(self, data: bytes) -> bool:
        """Read a flight recorder dump; False if it is not one."""
        dump = read_dump(data)
        if dump is None:
            return False
        line = self.evidence.collectives.take_dump(dump, self._source.name)
        if line is not None:
            cause = BY_CODE["nccl-timeout"]
            self._keep(Event(kind="collective", tier=cause.tier, line=line, cause=cause), ())
        return True


def _is_of_launcher(raised: Raised) -> bool:
    """Whether a launcher says with it how a process ended; mp.spawn of old had no type for it."""
    if not raised.type:  # cut off
        return raised.is_of_launcher or raised.is_of_parent
    is_of_spawn = raised.message.startswith("process ") and " terminated with " in raised.message
    is_of_spawn |= raised.type == "Exception" and raised.is_of_parent  # of torch 1.0 to 1.5
    if raised.name == "CalledProcessError" and raised.frames:  # the program may start others, too
        started = [raised.headline, *(frame.file for frame in raised.frames)]
        return any(_LAUNCHES.search(text) for text in started)
    return _OF_LAUNCHER.match(raised.name) is not None or is_of_spawn


def _named(match: Match | None) -> tuple[int, ...]:
    """Give the ranks that the message accuses."""
    if match is None or match.cause.accuses == Blame.NOBODY or "ranks" not in match.fields:
        return ()
    return tuple(int(number) for number in re.findall(r"\d{1,7}", match.fields["ranks"]))
