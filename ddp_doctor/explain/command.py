"""The command explain: read logs, judge, print.

Owns the order of the work, and the progress line of long files.
Does not own: what it looks for (catalogue/), what it prints (report.py).
"""

import re
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TextIO

from ddp_doctor.errors import UnreadableLogError, UsageError
from ddp_doctor.explain.catalogue import BY_CODE, CAUSES
from ddp_doctor.explain.collectives import MAX_BYTES, PICKLE
from ddp_doctor.explain.collector import Collector
from ddp_doctor.explain.endings import Tail, ending_of
from ddp_doctor.explain.events import Tier
from ddp_doctor.explain.evidence import Evidence
from ddp_doctor.explain.lines import habits_of, stack_of_error_file
from ddp_doctor.explain.matching import Matcher
from ddp_doctor.explain.reader import Search, decoder_of, read_lines, read_sample
from ddp_doctor.explain.report import (
    Answer,
    Commands,
    as_json,
    as_text,
    describe,
    exit_status,
    list_of,
)
from ddp_doctor.explain.run_folder import read_stack, read_status
from ddp_doctor.explain.run_story import ENDED_WELL, Story, tell
from ddp_doctor.explain.sources import (
    Source,
    are_alike,
    find_sources,
    is_run_folder,
    jobs_of,
)
from ddp_doctor.explain.verdict import Verdict, judge

# Words of lines that match no phrase: the job's size, how processes ended, what watchdogs say.
_FACTS = (
    *(b"orld_size", b"WORLD_SIZE", b"MEMBER: ", b"nnodes", b"nranks", b"nqueued"),
    *(b"exits with return code", b"terminated with code", b"FATAL", b"CRITICAL"),
    *(b"exited with code", b" global rank ", b"Starting with ", b"start: starting"),
)
_MOST_STACK_BYTES = 4 * 1024 * 1024
_LARGE_BYTES = 64 * 1024 * 1024
_LETTER = re.compile(rb"[A-Za-z0-9]")


def run_explain(
    names: Sequence[str],
    *,
    wants_json: bool,
    output: TextIO,
    progress: TextIO,
    commands: Commands | None = None,
) -> int:
    """Explain the logs; return 0 explained or healthy, 1 unknown. Raises UnreadableLogError."""
    if not names:
        raise UsageError(
            "no log was given, so there is nothing to explain",
            fix="name a log, or - for standard input, or the code of a cause with --cause",
        )
    jobs, reading = jobs_of(names), Reading(progress, commands or Commands())
    if len(jobs) > 1:
        answers = [_answer_of_one(words, reading) for words in jobs]
    else:
        answers = _answers_of_files(jobs[0], reading) or [_answer(jobs[0], reading)]
    write = as_json if wants_json else as_text
    output.write(write(answers[0]) if len(answers) == 1 else list_of(answers, as_json=wants_json))
    return max(exit_status(answer.verdict) for answer in answers)


def run_cause(code: str, *, output: TextIO, commands: Commands | None = None) -> int:
    """Print what the catalogue has of one cause, by its code. Raises UsageError."""
    commands = commands or Commands()
    if code not in BY_CODE:
        own = commands.own
        near = get_close_matches(code, BY_CODE, n=1)
        raise UsageError(
            f"--cause: found {code!r}, which is no code of the catalogue",
            fix=own("explain", "--cause", near[0]) if near else "docs/CAUSES.md lists the codes",
        )
    output.write(describe(BY_CODE[code], commands))
    return 0


@dataclass(frozen=True, slots=True)
class Reading:
    """Where progress is shown, and how commands are typed."""

    progress: TextIO
    commands: Commands


def _answer(names: Sequence[str], reading: Reading) -> Answer:
    """Explain one job. Raises UnreadableLogError."""
    evidence = collect(find_sources(names), progress=reading.progress, commands=reading.commands)
    is_run = len(names) == 1 and is_run_folder(Path(names[0]))
    story = tell(Path(names[0]), evidence) if is_run else None
    if evidence.statuses and not evidence.next_step and _may_go_on(story):
        status = evidence.statuses[0]
        run, num_ranks = Path(status.line.file).parent.parent, status.entry.get("world_size")
        typed = reading.commands.resume(run, num_ranks if isinstance(num_ranks, int) else 1)
        evidence.next_step = f"to continue: {typed}"
    verdict = judge(evidence)
    return Answer(tuple(names), verdict, evidence, story, commands=reading.commands)


def _may_go_on(story: Story | None) -> bool:
    """Whether a run is to be continued, as far as that is known."""
    return story is None or story.state not in ENDED_WELL


def _answer_of_one(names: Sequence[str], reading: Reading) -> Answer:
    """Explain one job of several; what can't be read is no reason to say nothing of the others."""
    try:
        return _answer(names, reading)
    except UnreadableLogError as error:
        nothing = Verdict(kind="unknown")
        found = Answer(tuple(names), nothing, Evidence(), problem=error.message)
        return replace(found, commands=reading.commands)


def _answers_of_files(names: Sequence[str], reading: Reading) -> list[Answer]:
    """Explain each file of a folder, if each tells of a whole job; else give nothing.

    WHY so careful: files of one job say more together.
    """
    if len(names) != 1 or not Path(names[0]).is_dir() or is_run_folder(Path(names[0])):
        return []
    files = [str(source.path) for source in find_sources(names)]
    if len(files) < 2 or not are_alike(files):
        return []
    answers = [_answer_of_one([file], reading) for file in files]
    told = [answer for answer in answers if not answer.problem]
    speakers = [{e.rank for e in a.evidence.events} - {None} for a in told]
    is_split = sum(map(len, speakers)) == len(set().union(*speakers)) and any(speakers)
    return answers if told and not is_split and all(map(_is_of_whole_job, told)) else []


def _is_of_whole_job(answer: Answer) -> bool:
    """Whether a file says by itself how its job ended, and not only that others were lost."""
    root = answer.verdict.root
    if answer.verdict.kind == "explained" and root is not None:
        return root.tier <= Tier.EXCEPTION and not root.is_weak
    return answer.verdict.kind == "healthy" and answer.evidence.ends_well


def collect(
    sources: Sequence[Source],
    *,
    progress: TextIO = sys.stderr,
    commands: Commands | None = None,
) -> Evidence:
    """Read all sources. Raises UnreadableLogError."""
    matcher, words, rare_words = _catalogue()
    collector, search = Collector(matcher), Search(words, rare_words)
    commands = commands or Commands()
    meter = Meter(progress, sum(source.size_bytes for source in sources))
    has_text = False
    for source in sources:
        try:
            has_text |= _read(source, collector, search, meter.add)
        except (OSError, EOFError, zlib.error) as error:
            raise UnreadableLogError(
                f"{source.name} can't be read to its end: {error}",
                fix="unpack or copy it first; of a cut .gz what is whole can be read by: "
                f"{shlex.join(['zcat', source.name])} | {commands.own('explain', '-')}",
            ) from error
    meter.close()
    if not has_text:
        names = ", ".join(source.name for source in sources[:3]) + " ..." * (len(sources) > 3)
        raise UnreadableLogError(
            f"{names}: no text in it, so it can't be said how the job ended",
            fix="give the log of the launcher or of the scheduler",
        )
    return collector.evidence


@cache
def _catalogue() -> tuple[Matcher, tuple[bytes, ...], tuple[bytes, ...]]:
    """Give the index of the catalogue, and the words of its messages: common ones, and rare."""
    matcher = Matcher(CAUSES)
    rare_words = matcher.words(are_rare=True)
    return matcher, (*matcher.words(), *_FACTS), (*rare_words, *_FACTS)


def _read(
    source: Source, collector: Collector, search: Search, on_block: Callable[[int], None]
) -> bool:
    """Read one source; return whether there is text in it."""
    with source.open() as file:
        sample = read_sample(file)
        has_text = _LETTER.search(sample) is not None
        encoding = decoder_of(sample)
        collector.start_file(source, habits_of(sample.decode(encoding, "replace")))
        if sample[:1] == PICKLE and collector.take_dump(sample + file.read(MAX_BYTES)):
            return True
        if source.is_status:
            status = read_status(sample.decode("utf-8", "replace"), source.name)
            collector.evidence.statuses += [status] if status is not None else []
            return has_text
        if found := source.stack:
            text = (sample + file.read(_MOST_STACK_BYTES)).decode("utf-8", "replace")
            stack = read_stack(text, source.name, int(found["rank"]), found["worker"] or "")
            collector.evidence.stacks.append(stack)
            return has_text
        if source.is_hang_verdict:
            collector.take(f"[DDP-G05] {sample.decode('utf-8', 'replace').strip()}", 1)
            collector.end_file()
            return has_text
        is_error_file = source.name.endswith("error.json")
        if is_error_file and (stack_text := stack_of_error_file(sample.decode("utf-8", "replace"))):
            for number, line in enumerate(stack_text.splitlines(), start=1):
                collector.take(line, number)
            collector.end_file()
            return has_text
        tail = Tail()
        num_lines = read_lines(
            file, collector, search, first=sample, on_block=on_block, on_end=tail.take
        )
        collector.evidence.num_lines = num_lines
        collector.evidence.endings[source.name] = ending_of(tail.text, num_lines)
        collector.end_file()
        return has_text


class Meter:
    """A line on a terminal that says how much of large logs is read."""

    def __init__(self, output: TextIO, total: int) -> None:
        self._output, self._total, self._done = output, total, 0
        self._is_shown = total > _LARGE_BYTES and output.isatty()
        self._next = time.monotonic() + 0.5

    def add(self, size: int) -> None:
        """Count bytes that were read."""
        self._done += size
        if self._is_shown and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.5
            share = min(1.0, self._done / max(1, self._total))
            self._output.write(f"\rexplain: {share:.0%} of {self._total / 1e6:.0f} MB")
            self._output.flush()

    def close(self) -> None:
        """Take the line away."""
        if self._is_shown:
            self._output.write("\r" + " " * 40 + "\r")
