"""What an audit finds: a code, how bad it is, a sentence, the user's line, evidence, the fix.

Owns the form of a verdict, and both ways to print it: text for people, JSON for programs.
"""

import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from ddp_doctor.audit.catalogue import CATALOGUE, Severity

WIDTH = 100
_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that is wrong, or could be faster."""

    code: str
    """A key of CATALOGUE."""

    sentence: str
    place: str = ""
    """FILE:LINE of the user's; empty if no line is to blame."""

    _: KW_ONLY
    seen_at: str = ""
    """FILE:LINE where the damage shows, if that is another one."""

    evidence: tuple[str, ...] = ()
    softened: bool = False
    """It is true, but may be meant so, or follows from another verdict: advice only."""

    @property
    def severity(self) -> Severity:
        return "advice" if self.softened else CATALOGUE[self.code].severity

    @property
    def is_mistake(self) -> bool:
        return self.severity != "advice"

    @property
    def file(self) -> str:
        return self.place.rpartition(":")[0]

    @property
    def line(self) -> int:
        line = self.place.rpartition(":")[2]
        return int(line) if line.isdigit() else 0


def shown_path(path: str) -> str:
    """Give a path as a reader would type it here: relative, unless that leads upwards."""
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return path if relative.startswith("..") else relative


def in_order(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Sort: errors first, then by place."""
    order = ("error", "warning", "advice")
    return sorted(verdicts, key=lambda v: (order.index(v.severity), v.file, v.line, v.code))


def as_json(verdicts: Sequence[Verdict], *, error: str = "", num_ranks: int = 0) -> str:
    """Write the verdicts for programs. What could not be observed is never healthy.

    num_ranks: how many ranks were compared; 0 for a source.
    """
    names = ("code", "severity", "sentence", "file", "line", "seen_at", "evidence")
    rows = [{name: getattr(v, name) for name in names} for v in in_order(verdicts)]
    is_healthy = not error and not any(verdict.is_mistake for verdict in verdicts)
    report = {"verdicts": rows, "healthy": is_healthy}
    more = {name: value for name, value in (("ranks", num_ranks), ("error", error)) if value}
    return json.dumps(report | more, indent=2)


def as_text(verdicts: Sequence[Verdict]) -> list[str]:
    """Write the verdicts for people: the worst first, each with what to do."""
    lines: list[str] = []
    for verdict in in_order(verdicts):
        head = f"{verdict.severity} {verdict.code}"
        lines.append(f"{shown_path(verdict.place)}: {head}" if verdict.place else head)
        lines += _wrapped(verdict.sentence)
        shows = f"it shows at {shown_path(verdict.seen_at)}"
        for fact in (*verdict.evidence, *([shows] if verdict.seen_at else [])):
            lines += _wrapped(f"seen: {fact}")
        lines += [*_wrapped(f"fix: {CATALOGUE[verdict.code].fix}"), ""]
    return lines


def _wrapped(text: str) -> list[str]:
    first, *others = text.splitlines() or [""]
    lines = textwrap.wrap(
        first, WIDTH - len(_INDENT), break_long_words=False, break_on_hyphens=False
    )
    return [_INDENT + line for line in (*lines, *others)]
