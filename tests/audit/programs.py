"""Programs that audit is tested on: those of the benchmark that its rules were tuned on, and more.

programs.txt has edits of the benchmark's style "plain", or "in" another, for what it does not have:
`=== healthy: name` or `=== mistake in style: name: code`, and for each edit `@@`, the lines that
go, after -, and those that come, after +. A line that ends with \\ is a part of one. `# here` is on
the line that the audit must name; what follows `# here: ` or `# says: ` is in the report.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.audit_cases import first, third
from benchmarks.audit_cases.case import Case

WRAP = "    model = DDP(net)\n"
LOOP = "        for x, y in loader:\n"
NO_MISTAKE = ("joined", "contrastive", "accelerate", "fabric", "lightning", "trainer")
"""As it is written, any other style has a mistake below beside which nothing else may be told."""

OF_THE_FIRST = ("same-file", "scaled-by-world-size")
"""What the first lot shows in other styles, by the same records."""


def side_of(edit: str, sign: str) -> str:
    return "".join(t[1:] for t in edit.splitlines(True) if t[0] == sign).replace("\\\n", "")


def read_cases(wanted: str) -> Iterator[Case]:
    """Read the programs of a kind: healthy or mistake."""
    text = Path(__file__).with_name("programs.txt").read_text(encoding="utf-8")
    for part in re.split(r"^=== ", text, flags=re.M)[1:]:
        title, *edits = re.split(r"^@@\n", part, flags=re.M)
        kind, name, *codes = title.rstrip("\n").split(": ")
        kind, style = f"{kind} in plain".split(" in ")[:2]
        pairs = [tuple(side_of(edit, sign) for sign in "-+") for edit in edits]
        if kind == wanted:
            yield Case(name, style, pairs, codes)


HEALTHY = (*(c for c in first.HEALTHY if c.edits or c.style in NO_MISTAKE), *read_cases("healthy"))
MISTAKES = (
    *(c for c in first.MISTAKES if not c.real),
    *(c for c in third.MISTAKES if c.codes[0] not in OF_THE_FIRST),
    *read_cases("mistake"),
)
