"""One line of the report: what was tried, what was found, and the verdict; and running a command.

Owns both. A command runs in a session of its own, and all of it is killed at its limit.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PASS, MISS, OPEN = "PASS", "MISS", "not tried"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report."""

    what: str
    found: str
    verdict: str = ""
    """PASS, MISS, not tried; empty for a figure without a bar."""

    details: str = ""
    """The end of the output of what failed."""


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended, or was killed at its limit (status 124)."""

    status: int
    output: str


def run(
    command: Sequence[str | Path],
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Done:
    """Run a command; "python" is this interpreter. The checkout is importable in it."""
    words = [sys.executable if word == "python" else str(word) for word in command]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return Done(process.returncode, output)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Done(124, f"{output}\nkilled after {limit_s:.0f} s")


def end_of(output: str, *, num_lines: int = 15) -> str:
    """Return the last lines of an output."""
    return "\n".join(output.rstrip().splitlines()[-num_lines:])
