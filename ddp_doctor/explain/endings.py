"""How each file ends, and which failures the program got over: a retry, a restart, a logged error.

Owns the words of success, the signs that training went on or is all NaN, and making events weak.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddp_doctor.explain.catalogue import BY_CODE
from ddp_doctor.explain.events import Event, Line, Tier
from ddp_doctor.explain.exits import Exit

_SUCCESS = re.compile(
    r"(?i)\b(?:training (?:is |has )?(?:complete|finished(?! iter)|done|successful)|exit code 0"
    r"|(?:prediction|inference) (?:completed|finished)|completed training(?! (?:step|epoch|iter))"
    r"|max_(?:epochs|steps)=\d+` reached|train_runtime|all done|job (?:\S+: )?succeeded"
    r"|successfully finished|worker group finished(?! \(FAILED)|reporting training success"
    r"|model weights saved in (?!\S*(?:checkpoint|step|epoch))|completed successfully"
    r"|saved successfully\. ?You can now|finished: \d+ steps|\d+ epochs completed in|job completed"
    r"|exits successfully|exiting gracefully(?! after(?! \d+ (?:step|epoch|iter)))"
    r"|state(?:=|: )COMPLETED|finished training)"
    r"|finish\.\.\. \(success\)|训练(?:完成|结束)|学習(?:完了|終了)|학습 ?완료"
)
_DONE = re.compile(r"(?i)\W*(?:done|finished|completed?|success)\W*$")
_SAVED = re.compile(
    r"(?i)\b(?:checkpoint|state|model|weights)\b.{0,40}\b(?:saved|written)\b"
    r"|\bsaved (?:the |a )?(?:checkpoint|state|model)|\bgraceful(?:ly)?\b|\brequeue"
)
"""What a program says that was told to stop, and saved before it did."""

_REQUEUED = {"stop-time-limit", "stop-preempted"}
_STOPS = {"stop-sigterm", "stop-interrupt", "stop-sighup"}
_COUNTER = re.compile(
    r"(?i)\b(?:step|epoch|iter(?:ation)?|batch)s?['\"]?[ =:#\[]{0,3}(?P<name>\d+(?:\.\d+)?)"
    r"|(?:[eé]po(?:ch|que|ca|che)|paso|schritt|[eé]tape|эпоха|шаг)[ =:#]{0,3}(?P<word>\d+)"
    r"|第 ?(?P<ordinal>\d+) ?[轮步次]"
    r"|(?P<bar>\d+)/\d+ \["
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_LOSS = re.compile(
    r"(?i)\b(?:loss|grad[_ ]?norm)\b['\"]?[ =:]{1,3}(?:tensor\()?['\"]?"
    r"(?:(?P<nan>nan\b)|[-+.]*(?:\d|inf))"
)
_IS_SEVERE = re.compile(r"\[[EF]\d{0,4} ")
"""The level of glog that c10d's watchdog uses for what ends the process."""

_WARNS = re.compile(r"\[W|\bWARNING\b")
_OTHER_PROGRAM = re.compile(
    r"(?:/\S*/)?(?:cp|mv|rm|ln|mkdir|touch|tee|tar|unzip|rsync|wget|curl|pip|git[\w-]*): "
)
"""What a job's script calls beside the training, and goes on after it."""

_UNCAUGHT = re.compile(r"\[rank\d+\]: ")
"""torch's except hook: it runs for what nobody caught."""

_SIZE = r"\d+(?:\.\d+)? (?:[GMK]iB|bytes)"
_GPU_SIZES = (
    rf"capacity of (?P<all>{_SIZE}) of which (?P<free>{_SIZE}) is .*process has (?P<own>{_SIZE})",
    rf"capacity of (?P<all>{_SIZE}) of which (?P<free>{_SIZE}) is .*Of the .*?(?P<own>{_SIZE})",
    rf"(?P<all>{_SIZE}) total capacity;.* (?P<free>{_SIZE}) free; (?P<own>{_SIZE}) reserved",
)
"""What the GPU has, what is free, and what this process uses, as new and old versions print it."""

_KEYS = re.compile(r"(?:Missing|Unexpected) key\(s\) in state_dict: (.*)")
_WRAPPER = re.compile(r"(?<=\")(?:(?:module|_orig_mod)\.)+")

_ENOUGH_NAN = 3

_LAST_LINES = 3
_IS_OVER = re.compile(r"(?i)\bwarn|100%|\b(?:done|took|completed|successfully)\b|ed in \d")
"""What was done before the wait, and not during it."""

_OF_TRACEBACK = re.compile(r"(?:\[[^\]]+\]: ?)?(?:  File \"|    |Traceback \()")

FINISHED = "has finished its batches"
_ACTIVITIES = {
    "prepares its data": r"\b(?:Map|Filter|Grouping texts|Generating \w+ split)\b.*:.*\d+[ %]"
    r"|[Tt]okeni[sz]ing|[Pp]re-?processing",
    "saves": r"[Ss]aving\b|save_pretrained|[Ww]riting (?:the )?(?:checkpoint|model|state)",
    "evaluates": r"(?:[Ee]valuating|[Vv]alidating|[Rr]unning (?:evaluation|validation))\b"
    r"|(?:Eval(?:uation)?|Valid(?:ation)?|Test(?:ing)?)\b[^|]*:? +\d+%",
    "compiles": r"AUTOTUNE|[Cc]ompiling\b|torch\._(?:inductor|dynamo)|max_autotune",
    "downloads or loads": r"Loading (?:checkpoint shards|weights|the? ?model)|Fetching \d+ files"
    r"|[Dd]ownloading\b",
    FINISHED: r"finished after \d+|max_(?:epochs|steps)=\d+. reached"
    r"|[Ee]poch \d+\S* (?:is )?(?:done|finished|complete)",
}
"""What a rank does alone while others wait, and how programs say so."""


@dataclass(slots=True)
class Ending:
    """What the last lines of a file say. Numbers are those of lines; 0 if there is none."""

    success: int = 0
    saved: int = 0
    first_of_progress: dict[int, int] = field(default_factory=dict)
    """For a line whose counter is higher than in the line of the same shape before: that line."""

    steps: list[int] = field(default_factory=list)
    """The same lines, where a step or an epoch has a number, and not only a bar."""

    nan: int = 0
    """The last line, if the loss is NaN in all of the last ones."""

    nan_since: int = 0
    """The first line of them."""

    nan_text: str = ""
    last: int = 0
    last_text: str = ""

    def goes_on_after(self, number: int, times: int = 1) -> bool:
        """Whether training made progress after this line."""
        return sum(first > number for first in self.first_of_progress.values()) >= times

    def is_good(self, error: int) -> bool:
        """Whether words of success come after the line of an error, and no steps after them."""
        return self.success > error and not any(step > self.success for step in self.steps)

    def add_progress(self, earlier: "Ending") -> None:
        """Take the progress that another part of the same file shows."""
        self.first_of_progress = {**earlier.first_of_progress, **self.first_of_progress}


def ending_of(tail: str, num_lines: int) -> Ending:
    """Read the last lines of a file that has num_lines in all."""
    lines = tail.rstrip("\n").split("\n")
    ending = Ending(last=num_lines, last_text=lines[-1].rpartition("\r")[2].strip())
    newest: dict[str, tuple[float, int]] = {}
    nans: list[tuple[int, int]] = []
    for number, line in enumerate(lines, start=num_lines - len(lines) + 1):
        if _SUCCESS.search(line) or (newest and _DONE.match(line)):  # not: a file is read
            ending.success = number
        if _SAVED.search(line):
            ending.saved = number
        for part in line.split("\r"):
            _note_progress(part, number, newest, ending)
            if losses := list(_LOSS.finditer(part)):
                nans.append((number, sum(loss["nan"] is not None for loss in losses)))
                ending.nan, ending.nan_text = number, part.strip()
    last = nans[-_ENOUGH_NAN:]
    is_only = len(nans) == 1 and nans[0][1] > 1  # loss and norm, say
    if not (is_only or (len(last) == _ENOUGH_NAN and all(count for _, count in last))):
        ending.nan, ending.nan_text = 0, ""
    else:
        ending.nan_since = last[0][0]
    return ending


def activity_before(text: str) -> tuple[str, str]:
    """Say what the program did before its ranks waited in vain, and quote its line; or nothing."""
    own = [line for line in text.splitlines() if line.strip() and not _OF_TRACEBACK.match(line)]
    lines = [line.rpartition("\r")[2].strip() for line in own]
    for line in reversed(lines[-_LAST_LINES:]):
        for what, phrase in _ACTIVITIES.items():
            if re.search(phrase, line) and (what == FINISHED or not _IS_OVER.search(line)):
                return what, line
    return "", ""


def _note_progress(
    text: str, number: int, newest: dict[str, tuple[float, int]], ending: Ending
) -> None:
    found = [*_COUNTER.finditer(text)]
    if not found or re.search(r"\b[Ss]aved? .*checkpoint", text):
        return
    shape = _NUMBER.sub("#", text.strip())
    total = sum(float(counter[counter.lastgroup or 0]) for counter in found)
    before = newest.get(shape)
    if before is not None and total > before[0]:
        ending.first_of_progress[number] = before[1]
        ending.steps += [before[1]] if any(counter["bar"] is None for counter in found) else []
    newest[shape] = (total, number)


def nan_event(endings: Mapping[str, Ending]) -> Event | None:
    """A run that ends as it should, with a loss that is NaN."""
    for name, ending in endings.items():
        if ending.nan:
            text = ending.nan_text
            line = Line(file=name, number=ending.nan, text=text, raw=text)
            return Event(kind="message", tier=Tier.EXCEPTION, line=line, cause=BY_CODE["amp-nan"])
    return None


def without_restarted(exits: Sequence[Exit], endings: dict[str, Ending]) -> list[Exit]:
    """Leave out the processes of an attempt after which another one of torchrun's succeeded."""
    return [
        ended
        for ended in exits
        if ended.from_block
        or "failed (exitcode" not in ended.line.text
        or ended.line.file not in endings
        or ended.line.number >= endings[ended.line.file].success
    ]


def weaken_survived(
    events: Sequence[Event],
    endings: dict[str, Ending],
    *,
    restarted: Sequence[Exit],
    failed: Sequence[Exit],
) -> None:
    """Mark the events that the process went on after as weak."""
    files = {ended.line.file for ended in restarted}
    for event in events:
        if event.raised is not None and event.tier == Tier.EXCEPTION and event.rank is None:
            event.is_weak |= _was_logged(event, events, endings.get(event.line.file), failed)
    chained = {id(event.chained) for event in events if event.chained is not None}
    for event in events:
        ending = endings.get(event.line.file)
        if event.code in _REQUEUED and ending is not None:
            event.is_weak |= ending.success > event.line.number  # by a later job
        if event.raised is not None and event.tier == Tier.TEARDOWN and ending is not None:
            event.is_weak |= ending.success > 0  # the work was done
        if event.tier in (Tier.HARDWARE, Tier.KILLED, Tier.ADVICE) or event.kind == "collective":
            continue
        if ending is not None and _went_on(event, ending, event.line.file in files):
            event.is_weak = True
    outermost: dict[tuple[object, ...], int] = {}
    for event in reversed(sorted(events, key=lambda event: event.line.order)):
        if event.raised is None or event.tier >= Tier.LAUNCHER or event.is_weak:
            continue
        stream = event.line.stream
        catcher = event.raised.catcher if event.chained is None else 0
        # WHY: a library that logs an exception and goes on is no cause of what comes later
        event.is_weak = catcher > outermost.get(stream, 3) and id(event) not in chained
        outermost[stream] = min(outermost.get(stream, 3), catcher)


def _was_logged(
    event: Event, events: Sequence[Event], ending: Ending | None, failed: Sequence[Exit]
) -> bool:
    """Whether training went on after an exception, until another one, or as long as the log goes.

    WHY steps: ranks whose lines have no prefix may do one more before they wait for a dead one.
    """
    if ending is None or not ending.goes_on_after(event.again or event.line.number, times=2):
        return False
    later = [e for e in events if e.line.order > event.line.order and e.tier <= Tier.LOST]
    own = [e for e in later if e.chained is not event]
    return all(e.tier <= Tier.EXCEPTION for e in own) and bool(own or not failed)


def _went_on(event: Event, ending: Ending, has_restarted: bool) -> bool:
    number = event.again or event.line.number
    if ending.success > number:
        return has_restarted or not _UNCAUGHT.search(event.line.raw)
    if event.kind != "message":
        return False
    if _OTHER_PROGRAM.match(event.line.text):
        return ending.last - number > _LAST_LINES
    if event.code in _STOPS:
        return ending.saved > number
    is_sure = event.tier in (Tier.TIMEOUT, Tier.MISMATCH) and not _WARNS.search(event.line.raw)
    is_sure |= _IS_SEVERE.search(event.line.raw) is not None
    return ending.goes_on_after(number) and not is_sure


def read_numbers(event: Event) -> None:
    """Tell by a message's numbers that others fill the GPU, or that too many ranks joined."""
    sizes = [found for form in _GPU_SIZES if (found := re.search(form, event.line.text))]
    if event.code in ("memory-gpu", "memory-gpu-weights") and sizes:
        total, free, own = (_gib(sizes[0][name]) for name in ("all", "free", "own"))
        if (others := total - free - own) > own:
            event.cause = BY_CODE["memory-gpu-others"]
            event.fields = {"others": f"{others:.1f}", "own": f"{own:.1f}"}
    said = event.raised.message if event.raised is not None else event.line.text
    asked = re.search(rf"(?s)Tried to allocate ({_SIZE}).{{,200}}?({_SIZE}) (?:is )?free", said)
    is_refused = asked and _gib(asked[2]) > max(1.0, 4 * _gib(asked[1])) and " allowed" not in said
    if event.cause is BY_CODE["memory-gpu"] and is_refused:
        event.cause = BY_CODE["memory-gpu-driver"]
    keys = [_WRAPPER.sub("", names).split('"')[1::2] for names in _KEYS.findall(said)]
    is_same = len(keys) == 2 and not set(keys[0]).isdisjoint(keys[1])
    if event.code == "checkpoint-module-prefix" and keys and not is_same:
        event.cause = BY_CODE["checkpoint-keys"]  # without it the names differ, too
    if int(event.fields.get("here", 0)) > int(event.fields.get("all", 0)):
        event.cause = BY_CODE["launch-ranks-too-many"]


def _gib(size: str) -> float:
    number, unit = size.split()
    return float(number) / {"GiB": 1, "MiB": 2**10, "KiB": 2**20, "bytes": 2**30}[unit]


def is_closing(event: Event) -> bool:
    """Whether a launcher ended this process, because another one had failed."""
    is_stop = event.code in ("stop-sigterm", "killed-sigkill") and event.tier == Tier.TEARDOWN
    return is_stop and (event.kind == "exit" or "losing " in event.line.text)
