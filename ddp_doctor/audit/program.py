"""Runs the observed program: with the observer in it, for a number of steps, and never for ever.

Owns its start, its end and its processes. It ends when all ranks did enough steps, by itself, or
because it hangs: all ranks make no progress, and one of them waits for others.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ddp_doctor.audit.records import Follower
from ddp_doctor.terminal import UsageError

FOLDER_VARIABLE = "HARDENED_DDP_AUDIT_FOLDER"
PATIENCE_VARIABLE = "HARDENED_DDP_AUDIT_PATIENCE"
INJECTED = Path(__file__).with_name("injected")
POLL_S = 0.2
MORE_S = 10.0
"""After the steps asked for: so long the program may go on, if it did not begin a second epoch."""

LEAVE_S = 3.0
"""A process gets so long after SIGTERM."""

IDLE_STALLS, BUSY_STALLS = 2, 8
"""So many times the patience at one line, and a rank that does not wait counts as stuck, too."""

SURE_AFTER = 2.5
"""Times the patience: then a rank that computes or sleeps counts as stuck, too."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the program ended."""

    status: int | None
    """None: the audit ended it, because it had seen enough or because it hung."""

    hung: bool = False


def run_program(
    program: Sequence[str],
    folder: Path,
    *,
    num_steps: int,
    patience_s: float,
    env: Mapping[str, str],
    stdout: IO[str] | None = None,
) -> Ending:
    """Run a command under observation until it ends, did its steps, or hangs.

    folder gets one file of records per process. Raises UsageError if the command can't be started.
    """
    paths = [str(INJECTED), env.get("PYTHONPATH", "")]
    env = dict(env) | {
        FOLDER_VARIABLE: str(folder),
        PATIENCE_VARIABLE: str(patience_s),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    try:
        process = subprocess.Popen(program, env=env, stdout=stdout, start_new_session=True)
    except OSError as error:
        told = f"audit: {program[0]} can't be started: {error.strerror}"
        raise UsageError(told, fix="after -- give a command that runs without the audit") from error
    try:
        return _watch(process, folder, num_steps, patience_s)
    except KeyboardInterrupt:  # who waits has seen enough: what was seen is judged
        return Ending(None)
    finally:
        _end(process, folder)


def _watch(
    process: "subprocess.Popen[bytes]", folder: Path, num_steps: int, patience_s: float
) -> Ending:
    followers: dict[Path, Follower] = {}
    enough_at: float | None = None
    while (status := process.poll()) is None:
        time.sleep(POLL_S)
        now = time.monotonic()
        for path in folder.glob("p*.jsonl"):
            followers.setdefault(path, Follower(path)).follow(now)
        ranks = [f for f in followers.values() if f.is_rank and not f.has_ended]
        if ranks and all(rank.num_steps >= num_steps for rank in ranks):
            enough_at = enough_at or now
            has_seen_two = all(f.num_passes >= 2 and f.num_steps > num_steps for f in ranks)
            if now - enough_at > (POLL_S if has_seen_two else MORE_S):
                return Ending(None)
        num_known = sum(follower.is_rank for follower in followers.values())
        if hangs(ranks, now, patience_s, num_known=num_known):
            return Ending(None, hung=True)
    return Ending(status)


def hangs(ranks: Sequence[Follower], now: float, patience_s: float, *, num_known: int) -> bool:
    """Whether nobody makes progress any more. A rank that computes may still come.

    num_known: ranks that were seen so far, also those that have ended.
    """
    stuck = [rank for rank in ranks if rank.stalls]
    mute = [r for r in ranks if not r.stalls and now - r.heard_at > SURE_AFTER * patience_s]
    if len(stuck) + len(mute) < len(ranks):
        return False
    if not stuck:  # the watch for stalls is mute, too: native code keeps Python from running
        long_s = 3 * BUSY_STALLS * patience_s  # WHY: a call in C, such as json.loads, may do so
        return bool(mute) and all(r.is_watched and now - r.heard_at > long_s for r in mute)
    newest = [rank.stalls[-1] for rank in stuck]
    if num_known < max(rank.local_world_size for rank in stuck):
        # The others may still import; after a long time they count as lost.
        return all(len(rank.stalls) >= BUSY_STALLS for rank in stuck)
    if all(record["waits"] for record in newest) and not mute:
        return True
    # WHY again and again: one rank may import, compile or evaluate while the others wait for it
    is_still = all(_is_still(rank) for rank in stuck)
    is_one_line = len({record["line"] for record in newest}) == 1
    return is_still and (is_one_line or any(record["waits"] for record in newest))


def _is_still(rank: Follower) -> bool:
    """Whether a rank stands at one line for long: longer, if it uses the CPU there."""
    number = IDLE_STALLS if rank.stalls[-1]["is_idle"] else BUSY_STALLS
    newest = rank.stalls[-number:]
    return len(newest) == number and len({stall["line"] for stall in newest}) == 1


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """End what is left of the program, quietly.

    WHY the launcher first: torchrun would report ranks that are ended on purpose as failures.
    """
    if process.poll() is None:
        process.kill()
        process.wait()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _living(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + LEAVE_S
        while _living(folder) and time.monotonic() < end:
            time.sleep(POLL_S / 4)


def _living(folder: Path) -> list[int]:
    """List the living processes of the program: those with our folder in their environment."""
    mark, found = f"{FOLDER_VARIABLE}={folder}".encode(), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it ended, or is somebody else's
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    for path in folder.glob("p*.jsonl") if sys.platform != "linux" else ():
        with suppress(OSError):  # it ended
            os.kill(pid := int(path.stem.removeprefix("p")), 0)
            found.append(pid)
    return found
