"""The wall time of a run by phase, over all its attempts.

Rank 0 writes a line of attempts.jsonl every few seconds; the last one of each attempt counts. The
time from there to the next attempt's start is down time, unless the run had ended as it should;
steps that an attempt did and a later one repeated are lost time. Goodput is the share of the wall
time that went into steps that count, without waiting for data and evaluation.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.reporting.run_json import Json, is_number, read_lines
from hardened_ddp.reporting.sinks import write_text
from hardened_ddp.settings.wording import counted

log = logging.getLogger(__name__)

NAME = "attempts.jsonl"
WRITE_EVERY_S = 5.0
# What the tracker's phases count as. Waits are not listed: they count for the phase they interrupt.
_COUNTED = {
    "start_up": (Phase.START_UP,),
    "data_wait": (Phase.DATA,),
    "training": (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.REPORT),
    "evaluation": (Phase.EVALUATION,),
    "checkpoint": (Phase.CHECKPOINT,),
}
PHASES = tuple(_COUNTED)


class Goodput:
    """Sums the wall time of this attempt by phase. Only rank 0 writes."""

    def __init__(self, folder: Path, tracker: Tracker, launch: Launch, *, step: int) -> None:
        """step: where this attempt continues, as far as it is known."""
        self._path = folder / NAME
        self._tracker = tracker
        self._launch = launch
        self._earlier = read_attempts(folder) if launch.is_main else []
        self._began_at = launch.started_at
        self._ended = ""
        self._first_step = self._step = step
        self._start_up_s = max(0.0, time.time() - launch.started_at)
        self._before_s = tracker.wall_s()
        self._written_at = time.perf_counter()

    def __enter__(self) -> "Goodput":
        """Write a first line: an attempt that dies in its start-up is counted, too."""
        self.note(self._step, is_last=True)
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:  # an attempt that failed counts up to here
            self.note(self._step, is_last=True)

    def note(self, step: int, *, is_last: bool = False, ended: str = "") -> None:
        """Note the step; write a line if the last one is WRITE_EVERY_S old.

        ended: finished or stopped, if the run ended as it should.
        """
        self._step, self._ended = step, ended
        now = time.perf_counter()
        if not self._launch.is_main or (now - self._written_at < WRITE_EVERY_S and not is_last):
            return
        self._written_at = now
        try:
            write_text(self._path, json.dumps(self._line()) + "\n", mode="a")
        except OSError as error:
            log.debug("%s can't be written: %s", self._path, error)

    def begin(self, step: int) -> None:
        self._first_step = self._step = step

    def go_back(self, left_at: int, step: int) -> None:
        """Begin a new attempt at an earlier step, within this process; the later steps are lost."""
        self.note(left_at, is_last=True)
        self._earlier.append(self._line())
        self._began_at = time.time()
        self._first_step = self._step = step
        self._start_up_s, self._before_s = 0.0, self._tracker.wall_s()

    def account(self) -> dict[str, float]:
        return account_of([*self._earlier, self._line()])

    def describe(self) -> str:
        account = self.account()
        shares = ", ".join(
            f"{name.replace('_', ' ')} {account[name] / account['wall']:.0%}"
            for name in (*PHASES, "lost", "down")
            if account[name] / account["wall"] >= 0.005
        )
        attempts = counted(len(self._earlier) + 1, "attempt")
        return f"{account['wall']:.1f} s in {attempts}: {shares}"

    def _line(self) -> Json:
        spent = [
            now - then for now, then in zip(self._tracker.wall_s(), self._before_s, strict=True)
        ]
        seconds = {name: sum(spent[phase] for phase in of) for name, of in _COUNTED.items()}
        seconds["start_up"] += self._start_up_s
        return {
            "began_at": round(self._began_at, 3),
            "now": round(time.time(), 3),
            "first_step": self._first_step,
            "step": self._step,
            "world_size": self._launch.world_size,
            "restart": self._launch.attempt,
            "ended": self._ended,
            **{name: round(value, 3) for name, value in seconds.items()},
        }


def read_attempts(folder: Path, problems: list[str] | None = None) -> list[Json]:
    """Read the last line of each attempt, oldest first; what is left out goes to problems."""
    problems = [] if problems is None else problems
    lines = read_lines(folder / NAME, problems)
    names = ("began_at", "now", "first_step", "step", *PHASES)  # the account is computed from these
    whole = [entry for entry in lines if all(is_number(entry.get(name)) for name in names)]
    if num_lost := len(lines) - len(whole):
        problems.append(f"{NAME}: {counted(num_lost, 'line')} without all numbers")
    newest = {entry["began_at"]: entry for entry in whole}
    return [newest[began_at] for began_at in sorted(newest)]


def num_without_progress(attempts: Sequence[Mapping[str, Any]]) -> int:
    """Count the newest attempts in a row that got no further than those before them.

    An attempt also got further if the next one began later: it had saved something.
    """
    count, last = 0, 0
    for attempt, after in zip_longest(attempts, attempts[1:]):
        has_saved = after is not None and after["first_step"] > attempt["first_step"]
        count = 0 if has_saved or attempt["step"] > last else count + 1
        last = max(last, attempt["step"])
    return count


def account_of(attempts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sum attempts: seconds of each phase, of lost steps, of down time and in total; goodput."""
    total: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    lost = down = 0.0
    for index, attempt in enumerate(attempts):
        for phase in PHASES:
            total[phase] += attempt[phase]
        later = [other["first_step"] for other in attempts[index + 1 :]]
        num_steps = attempt["step"] - attempt["first_step"]
        num_kept = min([attempt["step"], *later]) - attempt["first_step"]
        if num_steps > 0:
            lost += attempt["training"] * (1 - max(0, num_kept) / num_steps)
        before = attempts[index - 1]
        # Nothing was meant to run meanwhile: it ended as it should, and a person started this one.
        is_pause = before.get("ended") in ("finished", "stopped") and not attempt.get("restart")
        if index and not is_pause:
            down += max(0.0, attempt["began_at"] - attempts[index - 1]["now"])
    total["training"] -= lost
    wall = max(1e-9, sum(total.values()) + lost + down)
    goodput = total["training"] / wall
    return {**total, "lost": lost, "down": down, "wall": wall, "goodput": goodput}
