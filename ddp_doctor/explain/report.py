"""What explain prints: one sentence, its evidence, the fix, how to confirm it; or the same as JSON.

Owns the words around the catalogue's, and how commands of the trainer are typed.
"""

import json
import re
import shlex
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddp_doctor.explain.catalogue.own import GUIDE, STEPS
from ddp_doctor.explain.collector import Evidence
from ddp_doctor.explain.events import Cause, Event, Line, Raised, Tier
from ddp_doctor.explain.run_story import ENDED_WELL, Story, lines_of
from ddp_doctor.explain.verdict import CERTAIN, LIKELY, UNKNOWN, Verdict

_WIDTH = 100
_MAX_TEXT, _MAX_REMEDY = 240, 1000
_MAX_HEADLINE = 140
_MOST_RANKS = 8  # named in the first line
_STEP = re.compile(r"\bstep \d+\b")
_LAST_ERROR = re.compile(r"Last error:\n(.+)")
# How the catalogue writes a command of ours: at the end of its text.
_COMMAND = "python ddp_training.py "
_NAMES = {
    "fix": "plain torch",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "trainer": "Trainer",
}
_SUITE = "this suite"
_COLLECT = (
    "one log per rank: torchrun --log-dir logs --redirects 3 --tee 3 ... ; srun --label",
    "tracebacks in torchrun's last block: @record of "
    "torch.distributed.elastic.multiprocessing.errors above main()",
    "the collectives at a hang: TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL (on nccl; INFO on gloo); give the dumps to explain, too",
    "crashes in native code: PYTHONFAULTHANDLER=1; of the machine: dmesg -T, sacct, kubectl "
    "describe pod",
)
_OF_EXCEPTION = (
    "what the line that is named works on: print types, dtypes, shapes and names just before it",
    "does one process raise it, too? torchrun --nproc_per_node=1 with the same arguments and input",
    "a library raised it: does its version fit the code? python -m pip list, on each node",
)
_OF_THE_END = (
    "does it still run, and do its last lines change? py-spy dump --pid PID shows where it is",
    "its exit status: echo $? behind the launcher; sacct -j JOB --format=State,ExitCode,MaxRSS",
    "who ended it: dmesg -T | grep -iE 'oom|killed|xid'; kubectl describe pod POD",
)


def _own(*arguments: str | Path) -> str:
    return shlex.join(["python", "ddp_training.py", *map(str, arguments)])


def _resume(run: Path, num_ranks: int) -> str:
    start = ["torchrun", "--standalone", f"--nproc_per_node={num_ranks}"]
    words = start if num_ranks > 1 else ["python"]
    return shlex.join([*words, "ddp_training.py", "--resume", str(run)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """The defaults are for a shell in the trainer's folder."""

    own: Callable[..., str] = _own
    """Types a command of the trainer, from its arguments."""

    resume: Callable[[Path, int], str] = _resume
    """Types the command that continues the run in a folder, on so many ranks."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What explain says of one job."""

    names: tuple[str, ...]
    """What to give to explain for this job alone."""

    verdict: Verdict
    evidence: Evidence
    story: Story | None = None
    """Of a run folder of ours: its attempts."""

    problem: str = ""
    """Why nothing can be said."""

    commands: Commands = field(default_factory=Commands)

    @property
    def has_failed(self) -> bool:
        """Whether the job failed, and did not go on since."""
        is_over = self.story is not None and self.story.state in (*ENDED_WELL, "stopped")
        return self.verdict.kind not in ("healthy", "open") and not is_over

    @property
    def is_of_suite(self) -> bool:
        """Whether it is a run of this suite, for which its settings and codes are of use."""
        found, cause = self.evidence, self.verdict.cause
        is_known = self.story is not None or bool(found.starts) or bool(found.next_step)
        return is_known or (cause is not None and cause.code.startswith("DDP-"))

    @property
    def typed(self) -> str:
        """The names as a shell takes them."""
        return " ".join(map(shlex.quote, self.names))


def headline_of(verdict: Verdict) -> str:
    """Say who failed and how, in plain words: the first line of an answer."""
    root = verdict.root
    if root is None or root.cause is None or root.cause.is_of_type:
        return _unknown_headline(verdict)
    step = _STEP.search(root.raised.headline) if root.raised is not None else None
    text = f"{_subject(verdict)}{f', {step[0]}' if step else ''}: {root.cause.title}"
    places = f" ({verdict.finding.text})" if verdict.finding is not None else ""
    if verdict.activity[0]:
        places = f": one rank {verdict.activity[0]} while the others wait"
    return f"{text}{places if len(text + places) < _MAX_HEADLINE else ''}."


def details_of(verdict: Verdict) -> list[str]:
    """Say why, and what was raised where, in a paragraph each."""
    root, finding = verdict.root, verdict.finding
    found: list[str] = []
    if root is None:
        return found
    if root.cause is not None:
        why = _as_sentence(root.cause.why, defaultdict(lambda: "?", root.fields))
        if finding is not None:
            if finding.text not in headline_of(verdict):
                found.append(f"{finding.text[:1].upper()}{finding.text[1:]}.")
            why = finding.why if _is_wait(root) else why
        if verdict.activity[0]:
            why = f"The last that the program said before the wait: {verdict.activity[1]}"
        if {"here", "all"} <= root.fields.keys():
            why = f"{root.fields['here']} of {root.fields['all']} joined. {why}"
        if said := _LAST_ERROR.search(root.raised.message) if root.raised is not None else None:
            why = f"NCCL says: {said[1]}. {why}"
        found += [why] if why != "." else []
    if root.raised is not None and root.tier == Tier.EXCEPTION:
        # WHY: of what no entry knows the message itself may say what to do
        is_known = root.cause is not None and not root.cause.is_of_type
        found.append(f"Raised: {_raised(root.raised, _MAX_TEXT if is_known else _MAX_REMEDY)}")
    return found


def _told(event: Event) -> str:
    """Say in a line which failure another one is, where it stands, and what to do."""
    assert event.cause is not None
    who = f"rank {event.rank}: " if event.rank is not None else ""
    place = f"{event.line.file}:{event.line.number}"
    return f"{who}{event.cause.title} ({place}). {event.cause.fix}"


def _is_wait(root: Event) -> bool:
    """Whether a collective timed out: then what each rank was at says more than the message."""
    return root.code in ("nccl-timeout", "gloo-timeout")


def _as_sentence(why: str, fields: Mapping[str, str]) -> str:
    """Fill in a cause's own words; the mapping has a default."""
    text = why.format_map(fields).strip().removesuffix(".")
    return f"{text[:1].upper()}{text[1:]}."


def _subject(verdict: Verdict) -> str:
    guilty = verdict.guilty
    if guilty is not None and guilty.rank is not None:
        host = guilty.host if guilty.host != "localhost" else None
        return f"Rank {guilty.rank}" + (f" on {host}" if host else "")
    if guilty is not None and guilty.host:
        return f"Host {guilty.host}"
    if verdict.ranks_alike:
        more = len(verdict.ranks_alike) - _MOST_RANKS
        names = ", ".join(map(str, verdict.ranks_alike[:_MOST_RANKS]))
        return f"Ranks {names}" + (f" and {more} more" if more > 0 else "")
    return "The job"


def _raised(raised: Raised, most: int = _MAX_TEXT) -> str:
    text = raised.name or "an exception"
    is_short = most == _MAX_TEXT or raised.stated
    said = raised.headline if is_short else " ".join(raised.message.split())
    text = f"{text}: {said}" if said else text
    frame = raised.own_frame
    place = f" at {raised.where}" if raised.where else ""
    inside = f" in {frame.function}" if frame and frame.function else ""
    last = raised.frames[-1] if raised.frames else frame
    below = f", raised in {last.file}:{last.line}" if frame and last and last != frame else ""
    return _shortened(text, most) + place + inside + below


def _shortened(text: str, most: int = _MAX_TEXT) -> str:
    return text if len(text) <= most else text[:most] + " ..."


def _unknown_headline(verdict: Verdict) -> str:
    root, ended = verdict.root, verdict.root_exit
    if root is not None and (raised := root.raised) is not None:
        said = f" at {raised.where}" if raised.where else ""
        said = f": {raised.headline}" if raised.headline else said
        text = f"{_subject(verdict)}: {raised.name or 'an exception that is cut off'}{said}"
        return text if len(text) <= _MAX_HEADLINE else f"{text[: _MAX_HEADLINE - 4]} ..."
    if ended is not None:
        how = f"signal {-ended.status}" if ended.status < 0 else f"exit status {ended.status}"
        who = f"rank {ended.rank}" if ended.rank is not None else ended.host
        how = f"{who}, {how}" if who else how
        before = [e.text.strip() for e in verdict.evidence if e.order < ended.line.order]
        if not before and verdict.near:
            return f"A process failed ({how}); this log has no traceback of it."
        if not before or before[0].endswith("Container failed !!!") or "Killing sub" in before[0]:
            return f"A process failed ({how}); this log does not say why: its output is not in it."
        return f"A process failed ({how}). {_shortened(before[0], 90)}"
    lines = verdict.evidence[:1] or verdict.near[-1:]
    told = lines[0].text if lines else "This log does not say what."
    return f"Something failed. {_shortened(told.strip(), 120)}"


def confidence_of(verdict: Verdict) -> tuple[str, str]:
    """Say how sure the cause is, and why."""
    root = verdict.root
    if root is None or root.cause is None:
        return UNKNOWN, "no entry of the catalogue fits"
    if root.kind == "status":
        return LIKELY, "it is inferred from the last sign of life of each rank"
    if root.tier in (Tier.TEARDOWN, Tier.LOST):
        return UNKNOWN, "the log has only what follows from a failure"
    if root.is_weak:
        return UNKNOWN, "the log is cut off, or the process went on after this exception"
    if root.kind == "exit":
        return UNKNOWN, "the log has only the end of the process"
    if root.cause.is_of_type:
        return UNKNOWN, "the message is the program's own, and has many causes"
    if root.cause.is_generic and root.cause.code.startswith(("killed-", "stop-")):
        return UNKNOWN, "a signal has many causes"
    if verdict.activity[0]:
        return LIKELY, "it is the last that the program said before the wait"
    if verdict.finding is not None and _is_wait(root) and not verdict.finding.is_sure:
        return UNKNOWN, "the log does not show what the rank that is waited for was doing"
    if root.tier == Tier.TIMEOUT:
        return LIKELY, "it is inferred from what the waiting ranks print"
    if root.cause.most == UNKNOWN:
        return UNKNOWN, "this message has many causes, and does not tell which"
    if root.cause.or_else or root.cause.is_generic or root.cause.most == LIKELY:
        return LIKELY, "this message has several causes"
    return CERTAIN, "the message has this cause only"


def as_json(answer: Answer) -> str:
    """Write an answer for programs."""
    return json.dumps(_entry(answer), indent=2)


def _entry(answer: Answer) -> dict[str, Any]:  # Any: JSON
    verdict, story = answer.verdict, answer.story
    cause, guilty = verdict.cause, verdict.guilty
    return {
        "verdict": verdict.kind,
        "cause": {
            "code": cause.code,
            "title": cause.title,
            "headline": headline_of(verdict),
            "sentence": " ".join([headline_of(verdict), *details_of(verdict)]),
        }
        if cause is not None and verdict.kind == "explained"
        else None,
        "guilty": [{"rank": guilty.rank, "host": guilty.host, "confidence": guilty.confidence}]
        if guilty is not None
        else [{"rank": rank, "host": None, "confidence": LIKELY} for rank in verdict.ranks_alike],
        "evidence": [
            {"file": line.file, "line": line.number, "text": line.raw[:1000]}
            for line in verdict.evidence
        ],
        "fixes": [
            *({"for": _NAMES[name], "text": text} for name, text in _fixes(cause)),
            *({"for": _SUITE, "text": " ".join(step).strip()} for step in _steps(answer)),
        ],
        "near": [{"file": o.file, "line": o.number, "text": o.raw[:1000]} for o in _near(verdict)],
        "later": [
            {"code": e.code, "rank": e.rank, "line": e.line.number, "text": _told(e)}
            for e in verdict.later
        ],
        "echoes": verdict.num_echoes,
        "confidence": confidence_of(verdict)[0] if verdict.kind == "explained" else None,
        "exceptions": [
            {"rank": e.rank, "type": raised.type, "message": raised.message, "at": raised.where}
            for e in verdict.first_exceptions
            if (raised := e.raised) is not None
        ],
        "run": asdict(story) if story is not None else None,
    }


def list_of(answers: Sequence[Answer], *, as_json: bool) -> str:
    """Write a line for each of several jobs, and what to type for one of them."""
    if as_json:
        jobs = [{"names": answer.names, **_entry(answer)} for answer in answers]
        return json.dumps({"verdict": "several jobs", "jobs": jobs}, indent=2) + "\n"
    bad = [answer for answer in answers if answer.has_failed]
    width = min(48, max(len(answer.typed) for answer in answers))
    lines = [f"{len(answers)} jobs, {len(bad) or 'none'} with a failure. All about one of them:"]
    lines += [f"  {answers[0].commands.own('explain', *(bad or answers)[0].names)}", ""]
    lines += [f"{answer.typed:<{width}}  {_short(answer)}" for answer in answers]
    return "\n".join(lines) + "\n"


def _short(answer: Answer) -> str:
    """Say the verdict in half a sentence."""
    verdict, cause = answer.verdict, answer.verdict.cause
    if answer.problem:
        return answer.problem
    if verdict.kind == "explained" and cause and not cause.is_of_type:
        text = f"{_subject(verdict)}: {cause.title} ({cause.code})"
    else:
        known = {"healthy": "no failure", "open": "no failure seen, and no end"}
        text = known.get(verdict.kind) or _unknown_headline(verdict)
    if answer.story is None:
        return text
    return f"{lines_of(answer.story)[0].removeprefix(answer.story.folder).strip()} {text}"


def as_text(answer: Answer) -> str:
    """Write an answer for people."""
    verdict, story = answer.verdict, answer.story
    lines = []
    if story is not None:
        head, *attempts = lines_of(story)
        lines = [head, *(part for line in attempts for part in _wrap(line, "  ")), ""]
    noise = f" ({verdict.num_echoes} warnings and notes)" if verdict.num_echoes else ""
    where = "its logs" if story is not None else "this log"
    if verdict.kind == "healthy":
        return "\n".join([*lines, f"Healthy: no failure in {where}{noise}.\n"])
    if verdict.kind == "open":
        seen = "known failure" if verdict.near else "failure seen"
        lines += [f"No {seen} in {where}{noise}; the log does not say how the job ended.", ""]
        lines += ["Lines that speak of trouble", *_quoted(verdict.near)] if verdict.near else []
        lines += ["What would decide", *(f"  - {text}" for text in _OF_THE_END)]
        return "\n".join([*lines, ""])
    if story is not None and story.failed:
        lines.append(f"The failure of attempt {story.failed[-1]}, the newest one")
    lines += [headline_of(verdict), ""]
    for text in details_of(verdict):
        lines += [*_wrap(text, ""), ""]
    if verdict.kind == "explained":
        level, reason = confidence_of(verdict)
        lines += _wrap(f"Confidence: {level}: {reason}.", "")
        if verdict.guilty is not None and verdict.guilty.rank is not None:
            guilty = verdict.guilty
            how = "a guess" if guilty.confidence == UNKNOWN else guilty.confidence
            lines += _wrap(f"The rank is {how}: {guilty.reason}.", "")
        lines.append("")
    if verdict.evidence:
        lines += ["Evidence", *_quoted(verdict.evidence)]
    if near := _near(verdict):
        lines += ["What else may say why", *_quoted(near)]
    if verdict.kind == "explained" and verdict.cause is not None:
        lines += _fix_lines(verdict.cause, answer)
    else:
        lines += _collect_lines(verdict)
    for event in verdict.later:
        lines += [*_wrap(f"A failure of its own: {_told(event)}", ""), ""]
    if verdict.num_echoes:
        text = "line is an echo" if verdict.num_echoes == 1 else "lines are echoes"
        lines.append(f"{verdict.num_echoes} {text}: consequences, repeats, advice.")
    return "\n".join(lines) + "\n"


def _near(verdict: Verdict) -> list[Line]:
    """Give what stands near the cause, unless that is certain."""
    return verdict.near if verdict.cause is None or confidence_of(verdict)[0] != CERTAIN else []


def _quoted(lines: Sequence[Line]) -> list[str]:
    return [*(f"  {line.file}:{line.number}: {_shortened(line.raw)}" for line in lines), ""]


def describe(cause: Cause) -> str:
    """Write all that the catalogue has of one cause, without a log."""
    why = _as_sentence(cause.why, defaultdict(lambda: "...")) if cause.why else ""
    # WHY: of some causes the log alone says why
    lines = [*_wrap(f"{cause.code}: {cause.title}. {why}".removesuffix(" ..."), ""), ""]
    if cause.phrases:
        lines += ["In the log, as regular expressions"]
        lines += [f"  {phrase}" for phrase in cause.phrases] + [""]
    lines += ["Fix"]
    for name, text in _fixes(cause):
        lines += _wrap(f"{_NAMES[name]}: {text}", "  ")
    for text, _ in STEPS.get(cause.code, ()):
        lines += _wrap(text.removesuffix(":") + ".", "  ")  # its command needs a run
    return "\n".join([*lines, *_confirm_lines(cause), ""])


def _fix_lines(cause: Cause, answer: Answer) -> list[str]:
    lines = ["Fix"]
    for name, text in _fixes(cause):
        lines += _wrap(f"{_NAMES[name]}: {text}", "  ")
    for text, command in _steps(answer):
        lines += _wrap(text, "  ") + [f"    {command}"] * bool(command)
    lines += _confirm_lines(cause)[: None if answer.is_of_suite else -1]
    if answer.verdict.next_step:
        # WHY whole: a command is pasted
        lines.insert(-1, f"The run itself says: {answer.verdict.next_step}")
    return [*lines, ""]


def _confirm_lines(cause: Cause) -> list[str]:
    """Say how to be sure, and where the message comes from."""
    lines = []
    if cause.code.startswith("DDP-"):
        lines.append(f"  More: {GUIDE.format(code=cause.code)}")
    lines += [""]
    for name, text in (("Confirm", cause.confirm), ("Or else", cause.or_else)):
        lines += _wrap(f"{name}: {text}", "") if text else []
    return [*lines, f"Code: {cause.code}"]


def _steps(answer: Answer) -> list[tuple[str, str]]:
    """Give what to do about an error of this suite, each with its command.

    A command that needs more than is known here is left out; so is a resume that is not needed.
    """
    cause, story, known = answer.verdict.cause, answer.story, dict[str, str]()
    if story is not None:
        run, guilty = Path(story.folder), answer.verdict.guilty
        rank = guilty.rank if guilty is not None else None
        logs = sorted(run.glob("logs/rank-*.log"))[:8]
        logs = [run / "logs" / f"rank-{rank}.log"] if rank is not None else logs
        known = {
            "run": shlex.quote(str(run)),
            "log": " ".join(shlex.quote(str(log)) for log in logs),
            "again": answer.commands.resume(run, story.attempts[-1].num_ranks),
        }
        if stacks := answer.evidence.stacks:
            named = [s for s in stacks if s.rank == rank and not s.worker] or stacks
            known["stack"] = shlex.quote(named[0].line.file)
    is_over = story is not None and story.state in ENDED_WELL
    found = []
    for text, command in STEPS.get(cause.code, ()) if cause is not None else ():
        if is_over and "{again}" in command:
            continue
        try:
            _, is_own, arguments = command.partition(_COMMAND)
            command = answer.commands.own(*arguments.split()) if is_own else command
            found.append((text, command.format_map(known)))
        except KeyError:
            found.append((text.removesuffix(":") + ".", ""))
    return found


def _collect_lines(verdict: Verdict) -> list[str]:
    lines = []
    if verdict.first_exceptions:
        lines.append("First exception of each rank")
        for event in verdict.first_exceptions:
            name = f"rank {event.rank}" if event.rank is not None else "a rank"
            assert event.raised is not None
            lines += _wrap(f"{name}: {_raised(event.raised)}", "  ")
        lines.append("")
    raised = verdict.root.raised if verdict.root is not None else None
    is_told = raised is not None and raised.message
    lines.append("What would decide" if is_told else "To know more, collect")
    for text in _OF_EXCEPTION if is_told else _COLLECT:
        lines += _wrap(f"- {text}", "  ")
    return [*lines, ""]


def _fixes(cause: Cause | None) -> list[tuple[str, str]]:
    """Give the fix for each way of running DDP; of our own errors _steps do."""
    if cause is None or cause.code in STEPS:
        return []
    return [(name, text) for name in _NAMES if (text := getattr(cause, name))]


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  " * bool(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
