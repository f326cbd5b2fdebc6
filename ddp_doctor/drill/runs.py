"""Starts the program in folders of its own, acts on it from outside, and ends what it leaves.

This process is a subreaper: an orphan of the program becomes its child, whatever its session. A
case is one fault, or none, with all its starts; a start ends by itself, or at its limits.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ddp_doctor.audit.program import INJECTED
from ddp_doctor.audit.records import parsed
from ddp_doctor.drill import isolation
from ddp_doctor.terminal import UsageError

OTHER_RANKS = {"fewer-ranks": -1, "more-ranks": 1}
KILLS_ALL, SLOW = ("kill-all", "cut-checkpoint", *OTHER_RANKS), "too slow"
GRACE_S, ORPHAN_S, POLL_S = 30.0, 15.0, 0.1
"""After SIGTERM; after the command's end: a DataLoader worker looks every 5 s for its rank."""

IDLE_SHARE, BUSY_TIMES = 0.05, 5
"""CPU time of a program that waits; times the patience for one that computes."""

_OF_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
Facts = dict[str, Any]  # Any: values of JSON


@dataclass(slots=True)
class Plan:
    """What all cases share. folders: the program's own, then those of --also."""

    folders: list[str]
    work: Path
    env: Mapping[str, str]
    hang_after_s: float
    rank: int
    step: int
    repeats: int = 1
    has_overlay: bool = True
    limit_s: float = 1800.0
    saver: int = 0
    point: str = "forward"


@dataclass(slots=True)
class Process:
    """What one process of the program told."""

    start: int
    pid: int
    records: list[Facts]
    rank: int | None = None
    world: int = 1

    def __post_init__(self) -> None:
        for group in self.all("group")[:1]:
            self.rank, self.world = group["rank"], group["world"]
        if self.rank is None and self.all("update"):
            self.rank = 0  # alone, without a process group

    def all(self, kind: str) -> list[Facts]:
        return [record for record in self.records if record["k"] == kind]


@dataclass(slots=True)
class Case:
    """One fault: its folders, its records, and how its starts ended."""

    plan: Plan
    name: str
    fault: str = ""
    starts: list[Facts] = field(default_factory=list)
    made_at: float = field(default_factory=time.time)
    torn: str = ""
    """The file that the drill has cut."""

    def __post_init__(self) -> None:
        for name in ("tmp", *(f"upper{number}" for number in range(len(self.plan.folders)))):
            (self.home / name).mkdir(parents=True)
        if not self.plan.has_overlay:
            skipped = shutil.ignore_patterns(".git", "__pycache__")
            old, new = self.plan.folders[0], self.folders[0]
            try:
                shutil.copytree(old, new, symlinks=True, ignore=skipped, dirs_exist_ok=True)
            except OSError as error:
                told = f"{old} can't be copied, and overlay mounts are not used: {error}"
                raise UsageError(told, fix="drill it in a smaller folder") from error

    @property
    def home(self) -> Path:
        return self.plan.work / self.name

    @property
    def folders(self) -> list[str]:
        """The folders as the program sees them."""
        return self.plan.folders if self.plan.has_overlay else [f"{self.home}/upper0"]

    def log(self, number: int) -> str:
        return (self.home / f"log{number}").read_text(encoding="utf-8", errors="replace")

    def start(self, command: Sequence[str]) -> Facts:
        """Run the command until it ends, hangs, or is too slow; end what is left of it."""
        (self.home / f"records{len(self.starts)}").mkdir()
        words = [sys.executable, "-I", isolation.__file__, str(self.home), *self.folders, "--"]
        words += command
        if not self.plan.has_overlay:
            old, new = f"{self.plan.folders[0]}/", f"{self.folders[0]}/"
            words = [word.replace(old, new) for word in command]
        # WHY a pipe: a fault limits the size of files, and the log must not be one of them
        process = subprocess.Popen(
            words,
            cwd=self.folders[0],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with (self.home / f"log{len(self.starts)}").open("wb", 0) as log:
            try:
                facts = self._watch(process, log)
                end = time.time() + (0 if facts["why"] else ORPHAN_S)
                while living() and time.time() < end:
                    _copy_output(process, log, POLL_S)
                facts["orphans"] = [] if facts["why"] else [_command_of(pid) for pid in living()]
            finally:
                kill_all()
                process.wait()
            _copy_output(process, log, 0.0)
        self.starts.append(facts)
        return facts

    def _watch(self, process: "subprocess.Popen[bytes]", log: IO[bytes]) -> Facts:
        """Wait for the end or a limit; act when the fault comes."""
        began, mark, had_fired = time.time(), self.home / "fired", (self.home / "fired").exists()
        fired_at, heard_at, gone_s, used, why, silent_s = 0.0, 0.0, None, 0, "", 0.0
        ranks: set[int] = set()
        while process.poll() is None and not why:
            _copy_output(process, log, POLL_S)
            now, alive = time.time(), living()
            if not had_fired and not fired_at and mark.exists():
                fired_at = mark.stat().st_mtime
                ranks = {q.pid for q in self.processes() if q.rank is not None}
                if self.fault == "term":
                    process.terminate()
                elif self.fault in KILLS_ALL:
                    kill_all()
            if fired_at and gone_s is None and not ranks & alive.keys():
                gone_s = round(now - fired_at, 1)
            ticks = sum(of_one for of_one, _ in alive.values())
            states = {state for _, state in alive.values()}
            told = [path.stat().st_mtime for path in self.home.glob("records*/*")]
            if (newest := max([began, *told])) != heard_at:
                heard_at, used = newest, ticks
            silent_s = max(silent_s, now - heard_at)
            used_s = (ticks - used) / os.sysconf("SC_CLK_TCK")
            # WHY the states: on a busy machine it waits for a processor (R) or for the disk (D)
            is_idle = used_s < IDLE_SHARE * (now - heard_at) and not states & {"R", "D"}
            if now - heard_at > self.plan.hang_after_s * (1 if is_idle else BUSY_TIMES):
                why = "hung"
            elif now - began > self.plan.limit_s:  # a machine that has become slow is no hang
                why = SLOW
            elif self.fault == "term" and fired_at and now - fired_at > GRACE_S:
                why = "grace"
        wall_s = time.time() - began
        if fired_at and gone_s is None and not why:
            end = time.time() + ORPHAN_S
            while ranks & living().keys() and time.time() < end:  # without their launcher
                _copy_output(process, log, POLL_S)
            gone_s = round(time.time() - fired_at, 1)
        facts: Facts = {"status": None if why else process.returncode, "why": why}
        return facts | {"wall_s": wall_s, "gone_s": gone_s, "silent_s": silent_s}

    def _environment(self) -> dict[str, str]:
        plan, env = self.plan, self.plan.env
        rank = plan.saver if self.fault in ("full-disk", "kill-in-save") else plan.rank
        order = {"fault": self.fault, "rank": rank, "step": plan.step, "point": plan.point}
        order |= {"records": f"{self.home}/records{len(self.starts)}", "mark": f"{self.home}/fired"}
        order |= {"folders": [*self.folders, str(self.home)], "torn": self.torn}
        return {k: v for k, v in env.items() if not k.startswith(_OF_LAUNCHERS)} | {
            "HARDENED_DDP_DRILL": json.dumps(order),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(INJECTED), env.get("PYTHONPATH")])),
            **dict.fromkeys(("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"), "1"),
            "TMPDIR": f"{self.home}/tmp",
            "WANDB_MODE": "offline",
        }

    def processes(self) -> list[Process]:
        """Read what all processes told, in the order of their beginnings."""
        found = []
        for path in self.home.glob("records*/p*.jsonl"):
            start, pid = int(path.parent.name.removeprefix("records")), int(path.stem[1:])
            if records := list(parsed(path.read_bytes())):
                found.append(Process(start, pid, records))
        trained = {(process.start, process.rank) for process in found if process.all("update")}
        for process in found:  # a check before the training, or an evaluation after it, is no life
            if (process.start, process.rank) in trained and not process.all("update"):
                process.rank = None
        return sorted(found, key=lambda process: (process.start, process.records[0]["t"]))


def _copy_output(process: "subprocess.Popen[bytes]", log: IO[bytes], wait_s: float) -> None:
    """Copy what the program has printed; wait up to wait_s for it."""
    pipe = process.stdout
    if pipe is None or pipe.closed:
        time.sleep(wait_s)
        return
    while select.select([pipe], [], [], wait_s)[0]:
        if not (data := os.read(pipe.fileno(), 65536)):
            pipe.close()
            return
        log.write(data)
        wait_s = 0.0


def living() -> dict[int, tuple[int, str]]:
    """Find the processes below this one: the CPU time of each in ticks, and its state."""
    children: dict[int, list[tuple[int, list[str]]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has just ended
            text = Path(f"/proc/{name}/stat").read_text(errors="replace")
            parts = text.rpartition(")")[2].split()
            children.setdefault(int(parts[1]), []).append((int(name), parts))
    found, todo = {}, [os.getpid()]
    while todo:
        for pid, parts in children.get(todo.pop(), ()):
            todo.append(pid)
            if parts[0] not in "ZX":
                found[pid] = int(parts[11]) + int(parts[12]), parts[0]
    return found


def kill_all() -> None:
    """Kill all processes below this one, until none is left: one may just have been forked."""
    for _ in range(200):
        for pid in (found := living()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(POLL_S)


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")[:80]
    return f"process {pid}"
