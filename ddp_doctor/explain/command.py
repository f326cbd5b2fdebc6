"""The command explain: read logs, judge, print.

Owns the order of the work.
"""

import re
import shlex
import zlib
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TextIO

from ddp_doctor.explain.catalogue import BY_CODE, CAUSES
from ddp_doctor.explain.collectives import MAX_BYTES, PICKLE
from ddp_doctor.explain.collector import Collector, Evidence
from ddp_doctor.explain.endings import ending_of
from ddp_doctor.explain.events import Tier
from ddp_doctor.explain.lines import habits_of, stack_of_error_file
from ddp_doctor.explain.matching import Matcher
from ddp_doctor.explain.reader import SAMPLE_BYTES, Search, decoder_of, read_lines
from ddp_doctor.explain.report import Answer, Commands, as_json, as_text, describe, list_of
from ddp_doctor.explain.run_folder import read_stack, read_status
from ddp_doctor.explain.run_story import ENDED_WELL, tell
from ddp_doctor.explain.sources import Source, are_alike, find_sources, is_run_folder, jobs_of
from ddp_doctor.explain.verdict import Verdict, judge
from ddp_doctor.terminal import UnreadableLogError, UsageError

# Words of lines that match no phrase: the job's size, how processes ended, what watchdogs say.
_FACTS = (
    *(b"orld_size", b"WORLD_SIZE", b"MEMBER: ", b"nnodes", b"nranks", b"nqueued"),
    *(b"exits with return code", b"terminated with code", b"FATAL", b"CRITICAL", b"Killing s"),
    *(b"BAD TERMINATION", b"exited with code", b" global rank ", b"MPI_ABORT", b"Starting with "),
    *(b"start: starting", b"Container rank "),
)
_MOST_STACK_BYTES = 4 * 1024 * 1024
_LETTER = re.compile(rb"[A-Za-z0-9]")


def run_explain(
    names: Sequence[str], *, wants_json: bool, output: TextIO, commands: Commands | None = None
) -> int:
    """Explain the logs; return 0 explained or healthy, 1 unknown. Raises UnreadableLogError."""
    if not names:
        raise UsageError(
            "no log was given, so there is nothing to explain",
            fix="name a log, or - for standard input, or the code of a cause with --cause",
        )
    jobs, commands = jobs_of(names), commands or Commands()
    if len(jobs) > 1:
        answers = [_answer_of_one(words, commands) for words in jobs]
    else:
        answers = _answers_of_files(jobs[0], commands) or [_answer(jobs[0], commands)]
    write = as_json if wants_json else as_text
    output.write(write(answers[0]) if len(answers) == 1 else list_of(answers, as_json=wants_json))
    return int(any(answer.verdict.kind == "unknown" for answer in answers))


def run_cause(code: str, *, output: TextIO, commands: Commands | None = None) -> int:
    """Print what the catalogue has of one cause, by its code. Raises UsageError."""
    if code not in BY_CODE:
        own = (commands or Commands()).own
        near = get_close_matches(code, BY_CODE, n=1)
        raise UsageError(
            f"--cause: found {code!r}, which is no code of the catalogue",
            fix=own("explain", "--cause", near[0]) if near else "docs/CAUSES.md lists the codes",
        )
    output.write(describe(BY_CODE[code]))
    return 0


def _answer(names: Sequence[str], commands: Commands) -> Answer:
    """Explain one job. Raises UnreadableLogError."""
    evidence = collect(find_sources(names), commands)
    is_run = len(names) == 1 and is_run_folder(Path(names[0]))
    story = tell(Path(names[0]), evidence) if is_run else None
    may_go_on = story is None or story.state not in ENDED_WELL
    if evidence.statuses and not evidence.next_step and may_go_on:
        status = evidence.statuses[0]
        run, num_ranks = Path(status.line.file).parent.parent, status.entry.get("world_size")
        typed = commands.resume(run, num_ranks if isinstance(num_ranks, int) else 1)
        evidence.next_step = f"to continue: {typed}"
    return Answer(tuple(names), judge(evidence), evidence, story, commands=commands)


def _answer_of_one(names: Sequence[str], commands: Commands) -> Answer:
    """Explain one job of several; what can't be read is no reason to say nothing of the others."""
    try:
        return _answer(names, commands)
    except UnreadableLogError as error:
        nothing = Verdict(kind="unknown")
        return Answer(tuple(names), nothing, Evidence(), problem=error.message, commands=commands)


def _answers_of_files(names: Sequence[str], commands: Commands) -> list[Answer]:
    """Explain each file of a folder, if each tells of a whole job; else give nothing.

    WHY so careful: files of one job say more together.
    """
    if len(names) != 1 or not Path(names[0]).is_dir() or is_run_folder(Path(names[0])):
        return []
    files = [str(source.path) for source in find_sources(names)]
    if len(files) < 2 or not are_alike(files):
        return []
    answers = [_answer_of_one([file], commands) for file in files]
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


def collect(sources: Sequence[Source], commands: Commands) -> Evidence:
    """Read all sources. Raises UnreadableLogError."""
    matcher, words = _catalogue()
    collector, search = Collector(matcher), Search(words)
    has_text = False
    for source in sources:
        try:
            has_text |= _read(source, collector, search)
        except (OSError, EOFError, zlib.error) as error:
            raise UnreadableLogError(
                f"{source.name} can't be read to its end: {error}",
                fix="unpack or copy it first; of a cut .gz what is whole can be read by: "
                f"{shlex.join(['zcat', source.name])} | {commands.own('explain', '-')}",
            ) from error
    if not has_text:
        names = ", ".join(source.name for source in sources[:3]) + " ..." * (len(sources) > 3)
        raise UnreadableLogError(
            f"{names}: no text in it, so it can't be said how the job ended",
            fix="give the log of the launcher or of the scheduler",
        )
    return collector.evidence


@cache
def _catalogue() -> tuple[Matcher, tuple[bytes, ...]]:
    """Give the index of the catalogue, and the words of the lines that are looked at."""
    matcher = Matcher(CAUSES)
    return matcher, (*matcher.words(), *_FACTS)


def _read(source: Source, collector: Collector, search: Search) -> bool:
    """Read one source; return whether there is text in it."""
    evidence = collector.evidence
    with source.open() as file:
        sample = file.read(SAMPLE_BYTES)
        has_text = _LETTER.search(sample) is not None
        text = sample.decode(decoder_of(sample), "replace")
        collector.start_file(source, habits_of(text))
        if sample[:1] == PICKLE and collector.take_dump(sample + file.read(MAX_BYTES)):
            return True
        if source.kind == "status":
            status = read_status(text, source.name)
            evidence.statuses += [status] if status is not None else []
        elif source.kind == "stack" and source.rank is not None:
            text += file.read(_MOST_STACK_BYTES).decode("utf-8", "replace")
            evidence.stacks.append(read_stack(text, source.name, source.rank, source.worker))
        elif source.kind == "verdict":
            collector.take(f"[DDP-G05] {text.strip()}", 1)
        elif source.name.endswith("error.json") and (stack_text := stack_of_error_file(text)):
            for number, line in enumerate(stack_text.splitlines(), start=1):
                collector.take(line, number)
        else:
            evidence.num_lines, end = read_lines(file, collector, search, first=sample)
            ending = ending_of(end, evidence.num_lines)
            number, before = collector.before_traceback
            ending.add_progress(ending_of(before.decode("utf-8", "replace"), number))
            evidence.endings[source.name] = ending
        collector.end_file()
        return has_text
