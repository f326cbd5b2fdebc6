"""A run folder as the commands watch and report see it, from any host, without torch.

Owns reading it, and the state of the run: running, finished, stopped, failed or dead.
The files may be written at this moment, come from an earlier version, be cut off or be no files at
all: what can't be read is left out, and named in problems.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from ddp_runs.run_events import FAULTS, Event, read_events
from hardened_ddp.ranks.launchers_env import LauncherName, command_words
from hardened_ddp.reporting.goodput import account_of, read_attempts
from hardened_ddp.reporting.rank_status import SILENT_AFTER_S, RankStatus
from hardened_ddp.reporting.run_json import (
    Json,
    files_in,
    is_number,
    number_of,
    read_json,
    read_lines,
    read_text,
)
from hardened_ddp.settings.earlier_run import (
    CHECKPOINTS_NAME,
    MIRROR_STATUS,
    SAVED_SETTINGS,
    STATUS_FOLDER,
    STEP_FOLDER,
    changed_at,
)
from hardened_ddp.settings.record import read_back
from hardened_ddp.settings.typed_command import StartCommand, shell_command, working_folder

MANIFEST_NAME = "manifest.json"  # WHY not from checkpoint/: that needs torch
_WRITE_TAKES_S = 0.05
_ENDS = ("failed", "stopped", "finished")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One line of metrics.jsonl."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """What a run folder says at one moment."""

    folder: Path
    now: float
    ranks: tuple[RankStatus, ...] = ()  # of the newest start, by rank
    # By step; of a step that was repeated, the last line of each kind counts.
    points: tuple[Point, ...] = ()
    attempts: tuple[Json, ...] = ()
    checkpoints: tuple[tuple[int, float], ...] = ()  # step and time of each one, oldest first
    best: Json = field(default_factory=dict)
    mirror: Json = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    summary: Json = field(default_factory=dict)
    failures: tuple[Json, ...] = ()
    left_out: tuple[Json, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()  # name, value as YAML, where it came from
    problems: tuple[str, ...] = ()  # files that can't be read or believed

    @property
    def main(self) -> RankStatus:
        """The status of the lowest rank that has one; a blank one if nobody has."""
        return self.ranks[0] if self.ranks else RankStatus(rank=0, state="unknown")

    @property
    def account(self) -> Mapping[str, float]:
        """Seconds of each part of the wall time, over all attempts; empty if nothing is known."""
        return account_of(self.attempts) if self.attempts else {}

    @property
    def newest_sign(self) -> float:
        """When a rank last gave a sign of life, in seconds since the epoch; 0: never."""
        signs = [rank.now for rank in self.ranks]
        return max([*signs, *(number_of(last, "now") for last in self.attempts[-1:])], default=0.0)

    @property
    def state(self) -> str:
        """running, finished, stopped, failed, dead, or unknown if nothing was written yet."""
        if running := [rank for rank in self.ranks if rank.state == "running"]:
            return "dead" if all(rank.is_silent(self.now) for rank in running) else "running"
        own = {rank.state for rank in self.ranks}
        told = self.summary.get("status")
        if told in _ENDS and (own == {"finished"} or not own & set(_ENDS)):
            return str(told)
        otherwise = "dead" if self.newest_sign else "unknown"
        return next((state for state in _ENDS if state in own), otherwise)

    @property
    def step(self) -> int:
        """The newest step that is known to be done."""
        if self.state == "running":
            return self.main.step
        steps = [number_of(entry, "step") for entry in (self.summary, *self.attempts[-1:])]
        if self.state == "dead":  # the last status of a rank may be older
            steps += [*(s for s, _ in self.checkpoints), *(p.step for p in self.points)]
        return int(max([self.main.step, *steps]))

    @property
    def tested(self) -> dict[str, tuple[list[int], list[float]]]:
        """The curves of the test set, by metric."""
        names = dict.fromkeys(n for p in self.points for n in p.values if n.endswith("/test"))
        return {name.removesuffix("/test"): self.curve(name) for name in names}

    @property
    def faults(self) -> list[str]:
        """How often each kind of fault happened, the gravest first."""
        kinds = [event.kind for event in self.events]
        return [f"{kinds.count(kind)} x {kind}" for kind in FAULTS if kind in kinds]

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of a metric, such as loss/train."""
        pairs = [(p.step, p.values[name]) for p in self.points if name in p.values]
        return [step for step, _ in pairs], [value for _, value in pairs]


def mirror_words(run: RunView) -> str:
    """Say what the newest start has sent to its mirror; empty if it has none."""
    if not (told := run.mirror):
        return ""
    sent, failed = (int(number_of(told, name)) for name in ("num_sent", "num_failed"))
    newest = f", the newest of step {number_of(told, 'sent_step'):.0f}" if sent else ""
    problems = f"; tries that failed: {failed}" if failed else ""
    return f"{sent} sent to {told.get('url', '?')}{newest}{problems}"


def resume_command(run: RunView) -> str:
    """Write the command that continues a run on as many ranks, as their status tells it."""
    told = run.main
    if told.command:
        return told.command
    is_known = told.launcher in get_args(LauncherName)  # WHY: anybody may have written it
    otherwise = "torchrun" if told.world_size > 1 else "none"
    launcher = cast(LauncherName, told.launcher if is_known else otherwise)
    if told.num_nodes > 1 and launcher != "slurm":
        where = shell_command(run.folder)
        return f"as before on all {told.num_nodes} nodes, with --resume {where}"
    num_ranks, num_nodes = max(1, told.world_size), max(1, told.num_nodes)
    words = command_words(launcher, num_ranks, num_nodes=num_nodes, env={})
    is_there = os.path.isdir(told.working_folder)
    start = StartCommand(words, told.working_folder if is_there else working_folder())
    return start.typed("--resume", run.folder)


def read_run(folder: Path) -> RunView:
    """Read a run folder. Never raises: what can't be read is named in problems."""
    problems: list[str] = []
    attempts = tuple(read_attempts(folder, problems))
    ranks = _read_ranks(folder, problems)
    now = time.time()
    problems += [
        f"rank-{rank.rank}.json: is {rank.now - now:.0f} s in the future: the clocks of its "
        "host and of this machine differ, so whether the rank is alive can't be told here"
        for rank in ranks
        if rank.now - now > SILENT_AFTER_S
    ]
    return RunView(
        folder=folder,
        now=now,
        ranks=ranks,
        points=_read_points(folder / "metrics.jsonl", problems),
        attempts=attempts,
        checkpoints=_read_checkpoints(folder / CHECKPOINTS_NAME, problems),
        best=read_json(folder / CHECKPOINTS_NAME / "best.json", problems),
        mirror=read_json(folder / MIRROR_STATUS, problems),
        events=read_events(folder, problems),
        summary=read_json(folder / "summary.json", problems),
        failures=tuple(read_lines(folder / "failures.jsonl", problems)),
        left_out=tuple(read_lines(folder / "skipped_samples.jsonl", problems)),
        settings=_read_settings(folder, problems),
        problems=tuple(problems),
    )


def _read_ranks(folder: Path, problems: list[str]) -> tuple[RankStatus, ...]:
    """Read the status of each rank, without those that are left of an earlier start."""
    found: list[RankStatus] = []
    for path in files_in(folder / STATUS_FOLDER, problems):
        if not path.name.startswith("rank-") or path.suffix != ".json":
            continue
        entry = read_json(path, [])
        if not entry:  # WHY again: it may have been half written
            time.sleep(_WRITE_TAKES_S)
            entry = read_json(path, problems)
        if (status := RankStatus.read(entry)) is not None:
            found.append(status)
    world_size = max(found, key=lambda status: status.now).world_size if found else 0
    of_this_start = (status for status in found if status.rank < world_size)
    return tuple(sorted(of_this_start, key=lambda status: status.rank))


def _read_points(path: Path, problems: list[str]) -> tuple[Point, ...]:
    """Read metrics.jsonl: training and evaluation of one step are different lines."""
    found: dict[tuple[int, str], Point] = {}
    for entry in read_lines(path, problems):
        step = entry.get("step")
        if type(step) is not int or not is_number(step):
            continue
        values = {
            name: float(value)
            for name, value in entry.items()
            if name not in ("step", "time") and (is_number(value) or isinstance(value, float))
        }
        # WHY: after a restart from an earlier step, the later steps of before never happened
        is_test = any(name.endswith("loss/test") for name in values)  # of all of it, or of a part
        kind = "test" if is_test else "train" if "loss/train" in values else "end"
        found[step, kind] = Point(step=step, values=values)
    return tuple(sorted(found.values(), key=lambda point: point.step))


def _read_checkpoints(folder: Path, problems: list[str]) -> tuple[tuple[int, float], ...]:
    found = []
    for path in files_in(folder, problems):
        # WHY not Path.is_dir: it raises where a folder may not be read
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        match = STEP_FOLDER.fullmatch(path.name) if is_folder else None
        why: list[str] = []
        if match and read_json(path / MANIFEST_NAME, why):
            found.append((int(match[1]), changed_at(path)))
        elif match and os.path.isdir(path):  # WHY again: a running run removes its oldest ones
            why.append(f"has no {MANIFEST_NAME}")
            problems.append(f"{path.name}: is not a whole checkpoint: {why[0]}")
    return tuple(sorted(found))


def _read_settings(folder: Path, problems: list[str]) -> tuple[tuple[str, str, str], ...]:
    text = read_text(folder / SAVED_SETTINGS, problems)
    found = read_back(text)
    problems += [f"{SAVED_SETTINGS}: has no setting"] if text and not found else []
    return found
