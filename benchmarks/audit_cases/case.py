"""A program of a style with edits, what audit must say of it, and on which line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.audit_cases.styles import STYLES

HERE = "  # here\n"
FINDS_UNUSED = ("find_unused_parameters=False", "find_unused_parameters=True")
UNEVEN_DATA = ("points(64, 1)", "points(61, 1)")
EACH_RANK_EVALUATES = ("    dist.all_reduce(counts)\n", "")


@dataclass(frozen=True, slots=True)
class Case:
    """The lines that may be named end with "# here"; without codes the program is healthy."""

    name: str
    style: str
    edits: Sequence[tuple[str, str]] = ()
    codes: Sequence[str] = ()
    kind: str = "healthy"
    real: bool = False
    """It hangs, or starts its ranks itself: so the real command runs it, not the fork server."""

    def source(self) -> str:
        """Give the program. Raises AssertionError if an edit does not fit."""
        text = STYLES[self.style]
        for old, new in self.edits:
            assert old in text, f"{self.style}, {self.name}: {old!r} is not in the program"
            text = text.replace(old, new)
        compile(text, self.name, "exec")
        return text

    def lines(self) -> set[int]:
        """Give the lines that are right."""
        return {i for i, t in enumerate(self.source().splitlines(), 1) if "# here" in t}

    def words(self) -> list[str]:
        """Give what the report must say, too: what follows "# here: " or "# says: "."""
        return re.findall(r"# (?:here|says): (.+)", self.source())
