"""One contender through one fault: its commands, a hard limit, and nothing left running.

Owns starting and killing. All that a command starts carries a mark in its environment, by which it
is found in /proc, whatever session or parent it has.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from .account import Start, read_starts
from .cases import CHECKPOINTS, TOTAL_STEPS, Fault, command

ROOT = Path(__file__).resolve().parents[2]
_START_GRACE_S = 60.0  # besides, to the first step of a command
_LEAVE_LIMIT_S = {"agent": 20.0}
_POLL_S = 0.1
_MARK = "FAULT_MARK"
_ERROR = re.compile(r"\[?DDP-[A-Z]\d\d\b|\b\w+(?:Error|Exception)(?::|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One command."""

    status: int | None
    """None: it hung, and was killed."""

    wall_s: float
    num_orphans: int
    """Processes that still lived a while after the command had ended."""

    error: str
    """The first line of its log that names one."""


@dataclass(slots=True)
class Observed:
    """What was seen of a contender in a fault."""

    contender: str
    fault: Fault
    attempts: list[Attempt] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    fault_time: float | None = None
    """None: the fault did not happen, so nothing was measured."""

    cut_file: str = ""

    @property
    def is_finished(self) -> bool:
        """The last command came to the end of the last epoch."""
        if not self.starts or self.attempts[-1].status != 0:
            return False
        # WHY less one: a window that is left out is no optimizer step.
        return self.starts[-1].last >= TOTAL_STEPS - 1


def observe(contender: str, fault: Fault, *, home: Path, folder: Path) -> Observed:
    """Run the command, and after the fault the same again unless it came to the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = Observed(contender, fault)
    for number in (0, 1):
        words = command(contender, fault, is_again=number == 1, home=home, output=folder / "output")
        found.attempts.append(_run(words, number, fault, folder))
        found.starts = read_starts(folder)
        note = folder / "fault.json"
        found.fault_time = json.loads(note.read_text())["time"] if note.exists() else None
        if found.is_finished or fault.only_once or found.fault_time is None:
            break
        if number == 0 and fault.cuts_checkpoint:
            found.cut_file = _cut_newest_checkpoint(contender, folder / "output")
    return found


def _run(words: list[str], number: int, fault: Fault, folder: Path) -> Attempt:
    """Run one command to its end or its limit, and kill whatever it leaves."""
    mark, started_at = uuid.uuid4().hex, time.monotonic()
    log_path = folder / f"log-{number}"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=_environment(folder, number, fault, mark),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = _wait(process, folder, started_at, limit_s=fault.limit_s)
            wall_s = time.monotonic() - started_at
            orphans = _await_leaving(mark, _LEAVE_LIMIT_S.get(fault.kind, 5.0))
        finally:
            _kill_marked(mark)
            process.wait()
    num_orphans = 0 if status is None else len(orphans)
    error = _find_error(log_path.read_text(encoding="utf-8", errors="replace"))
    return Attempt(status=status, wall_s=wall_s, num_orphans=num_orphans, error=error)


def _wait(
    process: subprocess.Popen[bytes], folder: Path, started_at: float, *, limit_s: float
) -> int | None:
    """Wait for the end; None if neither a step nor the end comes within limit_s."""
    while (status := process.poll()) is None:
        # WHY steps too: on a busy machine a restart alone can take half the limit.
        signs = [*folder.glob("steps-*.jsonl"), *folder.glob("fault.json")]
        ages = [time.time() - path.stat().st_mtime for path in signs]
        since_start_s = time.monotonic() - started_at - _START_GRACE_S
        if min([since_start_s, *ages]) > limit_s:
            return None
        time.sleep(_POLL_S)
    return status


def _environment(folder: Path, number: int, fault: Fault, mark: str) -> dict[str, str]:
    return {
        **os.environ,
        _MARK: mark,
        "FAULT_FOLDER": str(folder),
        "FAULT_DATA": str(folder.parent / "digits.npz"),
        "FAULT_KIND": fault.kind,
        "FAULT_RUN": str(number),
        "TMPDIR": str(folder),  # torchrun leaves folders of logs behind
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def _await_leaving(mark: str, limit_s: float) -> list[int]:
    """Wait until no marked process lives; give those that still do at the limit."""
    end = time.monotonic() + limit_s
    while (pids := _find_marked(mark)) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return pids


def _find_marked(mark: str) -> list[int]:
    wanted, found = f"{_MARK}={mark}".encode(), []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            state = (
                Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            )
        except OSError:  # it ended while we looked, or belongs to somebody else
            continue
        if wanted in environ and state not in "ZX":
            found.append(pid)
    return found


def _kill_marked(mark: str) -> None:
    end = time.monotonic() + 10
    while (pids := _find_marked(mark)) and time.monotonic() < end:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _cut_newest_checkpoint(contender: str, output: Path) -> str:
    """Cut the largest file of the checkpoint that will be loaded in half; say which."""
    paths = list(output.glob(CHECKPOINTS[contender]))
    if not paths:
        return ""
    # WHY the name too: Lightning writes last.ckpt right after its twin, and loads last.ckpt.
    newest = max(paths, key=lambda path: (path.name == "last.ckpt", path.stat().st_mtime_ns))
    files = [path for path in newest.rglob("*") if path.is_file()] if newest.is_dir() else [newest]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return str(largest.relative_to(output))


def _find_error(log: str) -> str:
    """Give the first error that a log names, without torchrun's own summary."""
    for line in log.splitlines():
        match = _ERROR.search(line)
        if match is not None and "ChildFailed" not in line:
            return line[match.start() :].strip()[:200]
    return ""
