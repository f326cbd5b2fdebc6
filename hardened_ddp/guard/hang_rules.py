"""The rules of the hang watch: when a phase takes too long, and which ranks hang, and where.

A rank that works hangs if its phase takes longer than the limit. A rank that waits for others is
held up by one of them; it does not hang itself. Only if every rank waits, they wait for each other,
and so forever. Of several ranks that hang, those at the earliest step hold up the rest (a rank with
a GPU may queue work of later steps before it has to wait).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from hardened_ddp.ranks.phase import FIRST_WAIT, NUM_PHASES, Phase
from hardened_ddp.settings.wording import listed

# Limit of a phase as a multiple of its longest time: as in NVIDIA's resiliency extension.
LEARNED_FACTOR = 5
# Factor on the limit of phases without a usual time: start-up, first steps, evaluation.
LONG_FACTOR = 30
_SHARE_OF_TIMEOUT = 0.9
_HEAD_START_S = 3.0

_LONG = {Phase.START_UP, Phase.CHECKPOINT, Phase.EVALUATION}
_SHOWN = 8

STOPPED, UNINTERRUPTIBLE, HELD, SILENT = "T", "D", "held", "silent"
_UNREACHABLE = "its host, its network or its process is stopped"
_STATES = {
    STOPPED: "the process is stopped (SIGSTOP)",
    UNINTERRUPTIBLE: "the process is in an uninterruptible system call: a disk or a driver "
    "does not answer",
    HELD: "native code holds the GIL",
    SILENT: f"no heartbeat for some time: {_UNREACHABLE}",
}


@dataclass(frozen=True, slots=True)
class Report:
    """Where one rank is, as far as known."""

    rank: int
    step: int
    phase: int
    age_s: float  # how long it has been in this phase
    limit_s: float  # of this phase
    samples: tuple[int, ...] = ()
    state: str = ""  # why it does not answer; empty: it does

    @property
    def is_waiting(self) -> bool:
        return self.phase >= FIRST_WAIT and not self.state

    @property
    def is_late(self) -> bool:
        return self.age_s > self.limit_s


@dataclass(frozen=True, slots=True)
class Hang:
    """The sentence that says which ranks hang, and these ranks."""

    text: str
    ranks: tuple[int, ...]


def limits_ns(
    *, hang_after_s: float, longest_s: Sequence[float], is_warm: bool, least_s: Mapping[int, float]
) -> list[int]:
    """Return the limit of each phase, in ns.

    longest_s: the longest time of each so far. is_warm: these times are typical. least_s: phases
    with a limit above hang_after_s.
    """
    found = []
    for phase in range(NUM_PHASES):
        factor = LONG_FACTOR if phase in _LONG or not is_warm else 1
        floor_s = max(factor * hang_after_s, least_s.get(phase, 0.0))
        found.append(int(1e9 * max(floor_s, LEARNED_FACTOR * longest_s[phase])))
    return found


def longest_wait_s(timeout_s: float) -> float:
    """Return how long a rank may wait for another one, so that we decide before torch's timeout."""
    most_s = min(_SHARE_OF_TIMEOUT * timeout_s, timeout_s - _HEAD_START_S)
    return max(most_s, timeout_s / 2)


def decide(
    reports: Sequence[Report], *, wait_limit_s: float, missing: Sequence[int] = ()
) -> Hang | None:
    """Return which ranks hang; None: no rank does.

    wait_limit_s: if a rank has waited for longer, torch's timeout will soon end the wait. Then the
    ranks that work hang, although none of them is over the limit of its phase. missing: ranks of
    which nothing is known.
    """
    waiting = [report for report in reports if report.is_waiting]
    working = [report for report in reports if not report.is_waiting]
    late = [report for report in working if report.is_late or report.state]
    is_urgent = any(report.age_s > wait_limit_s for report in waiting)
    if is_urgent and not late:
        late = working
    parts, hung = [], tuple(missing)
    if late:
        first = min(report.step for report in late)
        late = [report for report in late if report.step == first]
        parts = [_describe(report) for report in late[:_SHOWN]]
        if len(late) > _SHOWN:
            parts.append(f"and {len(late) - _SHOWN} more ranks like these")
        hung = tuple(report.rank for report in late)
    if missing and (late or is_urgent):
        parts.append(f"{_ranks(missing)} can't be reached: {_UNREACHABLE}")
    if parts:
        others = [report for report in reports if report.rank not in hung]
        parts += [_places(others)] if others else []
        return Hang("; ".join(parts), hung)
    if waiting and not missing and all(r.is_late or r.age_s > wait_limit_s for r in reports):
        longest_s = max(report.age_s for report in waiting)
        text = f"all ranks wait for each other: {_places(waiting)}, {longest_s:.0f} s"
        return Hang(text, tuple(report.rank for report in waiting))
    return None


def _describe(report: Report) -> str:
    """Format where one rank is: rank 1, step 412, data, sample 9912, 63 s."""
    parts = [f"rank {report.rank}", f"step {report.step}", Phase(report.phase).label]
    if len(report.samples) == 1:
        parts.append(f"sample {report.samples[0]}")
    elif report.samples:
        parts.append(f"samples [{listed(report.samples, _SHOWN)}]")
    parts.append(f"{report.age_s:.0f} s")
    if report.state:
        parts.append(_STATES.get(report.state, report.state))
    return ", ".join(parts)


def _places(reports: Sequence[Report]) -> str:
    """Format where the others are: ranks 0, 2 wait in all-reduce of step 412."""

    def place(report: Report) -> tuple[int, int, bool]:
        return report.step, report.phase, report.is_waiting

    parts = []
    for (step, phase, is_waiting), group in groupby(sorted(reports, key=place), key=place):
        ranks = sorted(report.rank for report in group)
        one = len(ranks) == 1
        verb = ("waits" if one else "wait") if is_waiting else ("is" if one else "are")
        parts.append(f"{_ranks(ranks)} {verb} in {Phase(phase).label} of step {step}")
    return ", ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, _SHOWN)}"
