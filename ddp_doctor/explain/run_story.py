"""What happened to a run of ours, in its order: of each attempt how far it came and how it ended.

Owns reading attempts.jsonl, failures.jsonl and summary.json, and keeping the newest failure apart
from what earlier and later attempts left in the same files.
What goes wrong here: clocks. Logs have the local time of their host, attempts.jsonl has UTC.
"""

import json
import math
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ddp_doctor.explain.collector import Evidence
from ddp_doctor.explain.events import Line, Tier

_HANG = re.compile(r"(?P<clock>\d{8}-\d{6})-step-(?P<step>\d+)$")
_OF_ALL_ATTEMPTS = ("failures.jsonl", "attempts.jsonl", "metrics.jsonl", "summary.json")
_ZONE_STEP_S, _START_TAKES_S, _EARLY_S = 900.0, 120.0, 1.0
_MOST_BYTES, _MOST_TEXT = 64 * 1024 * 1024, 400
_ENDINGS = ("finished", "stopped")
ENDED_WELL = ("finished", "running")
_NO_WORD = "no word of an end: all its ranks were killed at once, or the machine stopped"
_Json = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the ranks, or what followed a rollback."""

    began: float
    seen: float
    first_step: int
    step: int
    num_ranks: int
    how: str
    """How it ended."""

    has_failed: bool
    is_rollback: bool
    """It began in the same processes as the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The attempts of one run."""

    folder: str
    state: str
    """finished, stopped, running, failed, dead or unknown."""

    attempts: tuple[Attempt, ...]

    @property
    def failed(self) -> list[int]:
        """The numbers of the attempts that failed, from 1."""
        return [n for n, attempt in enumerate(self.attempts, start=1) if attempt.has_failed]


def tell(folder: Path, evidence: Evidence) -> Story | None:
    """Tell a run folder's attempts, and leave in evidence only what the newest failure left."""
    lines = _read(folder / "attempts.jsonl")
    newest = {entry["began_at"]: entry for entry in lines if _is_whole(entry)}
    entries = [newest[began] for began in sorted(newest)]
    if not entries:
        return None
    state = _state(folder, evidence)
    shift = _zone_shift_s(entries[-1]["began_at"], evidence)
    failures = [f for f in _read(folder / "failures.jsonl") if isinstance(f.get("step"), int)]
    attempts: list[Attempt] = []
    for entry, later in zip(entries, [*entries[1:], {}], strict=True):
        how = str(entry.get("ended") or ("" if later else state))
        is_over = how in _ENDINGS or (not later and state in ("running", *_ENDINGS))
        # WHY: only after a rollback an attempt has no start-up of its own
        is_back = later.get("start_up") == 0
        if is_back:
            is_over, how = True, f"rolled back to step {later['first_step']}"
        if not is_over:
            span = (entry["began_at"] + shift, later.get("began_at", math.inf) + shift)
            how = _failure(folder, failures, entry, later) or _said(evidence, span) or _NO_WORD
        attempts.append(
            Attempt(
                began=entry["began_at"],
                seen=entry["now"],
                first_step=entry["first_step"],
                step=max(entry["step"], 0 if is_back else later.get("first_step", 0)),
                num_ranks=size if type(size := entry.get("world_size")) is int else 0,
                how=how,
                has_failed=not is_over,
                is_rollback=bool(attempts) and entry.get("start_up") == 0,
            )
        )
    story = Story(folder=str(folder), state=state, attempts=tuple(attempts))
    _keep_newest(story, evidence, shift)
    return story


def _read(path: Path) -> list[_Json]:
    """Read JSON lines; what is cut off or something else is left out."""
    found = []
    with suppress(OSError):
        for line in path.read_bytes()[-_MOST_BYTES:].decode("utf-8", "replace").splitlines():
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return [entry for entry in found if isinstance(entry, dict)]


def _is_whole(entry: _Json) -> bool:
    numbers = [entry.get(name) for name in ("began_at", "now", "first_step", "step")]
    return all(isinstance(n, int | float) and 0 <= n < 1e12 for n in numbers)


def _state(folder: Path, evidence: Evidence) -> str:
    """Say how the run stands now."""
    if running := [status for status in evidence.statuses if status.is_running]:
        return "dead" if all(status.is_dead() for status in running) else "running"
    states = {str(status.entry.get("state")) for status in evidence.statuses}
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # none, or damaged
        summary = json.loads((folder / "summary.json").read_bytes()[:_MOST_BYTES])
        states.add(str(summary["status"]))
    return next((name for name in ("failed", "stopped", "finished") if name in states), "unknown")


def _failure(folder: Path, failures: list[_Json], entry: _Json, later: _Json) -> str:
    """Take the failure that a survivor noted for this attempt; empty if there is none."""
    last = max(later.get("first_step", math.inf), entry["step"])
    while failures and failures[0]["step"] < entry["first_step"]:
        failures.pop(0)
    if not failures or failures[0]["step"] > last:
        return ""
    failure = failures.pop(0)
    has_hung = any(folder.glob(f"hangs/*-step-{failure['step']}"))
    text = str(failure.get("error", ""))[:_MOST_TEXT]
    return f"{'hung' if has_hung else 'failed'}: {text}"


def _said(evidence: Evidence, span: tuple[float, float]) -> str:
    """Give what the logs say of an attempt that failed; empty if they say nothing."""
    found = [e for e in evidence.events if _is_within(e.line, span, evidence)]
    grave = [e for e in found if e.tier < Tier.LAUNCHER and e.line.file in evidence.starts]
    first = min(grave, key=lambda event: (event.is_weak, event.tier), default=None)
    if first is None:
        return ""
    text = first.raised.whole if first.raised is not None else first.line.text
    return f"failed: {text[:_MOST_TEXT]}"


def _zone_shift_s(began: float, evidence: Evidence) -> float:
    """Give what to add to a time of attempts.jsonl to get the logs' local time."""
    offs = [start - began for starts in evidence.starts.values() for _, start in starts]
    shifts = [_ZONE_STEP_S * round(off / _ZONE_STEP_S) for off in offs]
    near = [s for s, off in zip(shifts, offs, strict=True) if abs(off - s) < _START_TAKES_S]
    return min(near, key=abs, default=0.0)


def _is_within(line: Line, span: tuple[float, float], evidence: Evidence) -> bool:
    """Whether a line was written between two moments of the logs' local time."""
    if hang := _HANG.search(line.file.rpartition("/")[0]):
        with suppress(ValueError, OverflowError):
            moment = datetime.strptime(hang["clock"], "%Y%m%d-%H%M%S").timestamp()
            return span[0] - _EARLY_S <= moment < span[1]
        return True
    if line.file not in evidence.starts:
        return not line.file.endswith(_OF_ALL_ATTEMPTS)
    starts = evidence.starts[line.file]
    first, last = (
        min((number for number, at in starts if at >= moment - _EARLY_S), default=math.inf)
        for moment in span
    )
    return first <= line.number < last


def _keep_newest(story: Story, evidence: Evidence, shift: float) -> None:
    """Drop what attempts before and after the newest failed one left."""
    if not story.failed:
        return
    failed = story.attempts[story.failed[-1] - 1].began
    begins = [attempt.began for attempt in story.attempts if not attempt.is_rollback]
    began = max(b for b in begins if b <= failed)  # the first attempt is no rollback
    until = min((b for b in begins if b > failed), default=math.inf)
    span = (began + shift, until + shift)
    evidence.events = [e for e in evidence.events if _is_within(e.line, span, evidence)]
    evidence.stacks = [s for s in evidence.stacks if _is_within(s.line, span, evidence)]
    if until < math.inf:  # WHY: how the logs end now says nothing of that failure
        evidence.endings = {n: e for n, e in evidence.endings.items() if n not in evidence.starts}
        evidence.next_step = ""


def lines_of(story: Story) -> list[str]:
    """Write the story for people."""
    last, failed = story.attempts[-1], story.failed
    states = {
        "finished": f"finished at step {last.step}",
        "stopped": f"was stopped at step {last.step}, as it was told to",
        "running": f"runs, and is at step {last.step}",
    }
    now = states.get(story.state, f"ended at step {last.step}")
    since = " since" if failed and story.state in states else ""
    count = f"{len(story.attempts)} attempt{'s' * (len(story.attempts) > 1)}"
    lines = [f"{story.folder} {now}{since}: {count}, {len(failed) or 'none'} failed."]
    for number, attempt in enumerate(story.attempts, start=1):
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.began))
        size = f", {attempt.num_ranks} rank{'s' * (attempt.num_ranks != 1)}"
        steps = f"steps {attempt.first_step} to {attempt.step}"
        lines.append(f"{number}. {clock}, {steps}{size}: {attempt.how}")
    return lines
