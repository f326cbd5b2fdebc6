"""One line of the report: what was tried, what was found, and the verdict; and running a command.

Owns both. A command runs in a session of its own, and all of it is killed at its limit; what a
report leaves running that was killed itself, the next one kills (end_leftovers).
"""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PASS, MISS, OPEN = "PASS", "MISS", "not tried"
WITHIN_NOISE = "within noise"
TIMED_OUT = 124
MARK = "GPU_REPORT_OF"
"""In the environment of all that a report starts: whose it is."""

_END_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report."""

    what: str
    found: str
    verdict: str = ""
    """PASS, MISS, not tried, within noise; empty for a figure without a bar."""

    details: str = ""
    """The end of the output of what failed."""


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended, or was killed at its limit (status TIMED_OUT)."""

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
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if find_spec("safetensors") is None:
        places.append(str(ROOT / "benchmarks" / "gpu" / "without"))
    path = os.pathsep.join(places)
    try:
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
    except OSError as error:
        return Done(127, f"{words[0]}: {error.strerror}")
    try:
        output, _ = process.communicate(timeout=limit_s)
        return Done(process.returncode, output)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    try:
        output, _ = process.communicate(timeout=_END_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        # A child in a session of its own still holds the pipe.
        output = error.stdout.decode(errors="replace") if error.stdout else ""
    return Done(TIMED_OUT, f"{output}\nkilled after {limit_s:.0f} s")


def end_leftovers(mark: str) -> int:
    """Kill what another report with this mark has started and left; return how many they were."""
    num_killed, wanted = 0, f"{MARK}={mark}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            is_left = wanted in (place / "environ").read_bytes().split(b"\0")
            if is_left and int(place.name) != os.getpid():
                os.kill(int(place.name), signal.SIGKILL)
                num_killed += 1
        except OSError:  # it has ended, or is another user's
            continue
    return num_killed


def guarded(what: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Give the lines of rows; if it raises, the line that says so. The others are still tried."""
    try:
        yield from rows()
    except Exception:  # WHY broad: whatever it is, it is what the report is about
        yield Row(what, "the report itself failed", MISS, end_of(traceback.format_exc()))


def end_of(output: str, *, num_lines: int = 15) -> str:
    """Return the last lines of an output."""
    return "\n".join(output.rstrip().splitlines()[-num_lines:])
