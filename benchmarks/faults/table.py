"""What was observed, as words and as a Markdown table. Takes values and returns values."""

from collections.abc import Mapping, Sequence
from typing import Any

from .account import (
    count_lost_steps,
    count_samples,
    first_poisoned_step,
    kept_lines,
    seconds_to_next_step,
)
from .cases import NUM_EPOCHS, NUM_SAMPLES, Fault
from .running import Attempt, Observed

Row = dict[str, Any]
_HEAD = "| contender | what happened | steps lost | samples surplus / missing | next step after |"


def figures_of(seen: Observed) -> Row:
    """Give all that was measured, for the JSON file and the table."""
    kept = kept_lines(seen.starts)
    row: Row = {
        "fault": seen.fault.name,
        "contender": seen.contender,
        "happened": describe(seen),
        "statuses": [attempt.status for attempt in seen.attempts],
        "errors": [attempt.error for attempt in seen.attempts],
        "wall_s": [round(attempt.wall_s, 1) for attempt in seen.attempts],
        "orphans": [attempt.num_orphans for attempt in seen.attempts],
        "starts": [[start.run, start.first, start.last] for start in seen.starts],
        "first_poisoned_step": first_poisoned_step(kept),
        "cut_file": seen.cut_file,
        "steps_lost": None,
        "surplus": None,
        "missing": None,
        "seconds": None,
    }
    if seen.fault_time is None:
        return row
    if seen.is_finished or _goes_on(seen):
        row["steps_lost"] = count_lost_steps(seen.starts)
    if seen.is_finished:
        row["surplus"], row["missing"] = count_samples(
            kept, num_samples=NUM_SAMPLES, num_epochs=NUM_EPOCHS
        )
        if None not in row["statuses"]:
            seconds = seconds_to_next_step(seen.starts, _last_sign(seen))
            row["seconds"] = None if seconds is None else round(seconds, 1)
    return row


def describe(seen: Observed) -> str:
    """Say in a few words what happened."""
    if seen.fault_time is None:
        return f"no fault came: {_ending(seen.attempts[0], seen.fault)}"
    parts = [_first(seen)]
    if len(seen.attempts) > 1:
        parts.append(_again(seen))
    poisoned = first_poisoned_step(kept_lines(seen.starts))
    if poisoned is not None:
        parts.append(f"weights are NaN from step {poisoned} on")
    return "; ".join(parts)


def markdown(rows: Sequence[Row], faults: Mapping[str, Fault]) -> str:
    """Write a heading and a table for each fault."""
    parts = []
    for name, fault in faults.items():
        lines = [_line(row) for row in rows if row["fault"] == name]
        if lines:
            rule = "|" + " --- |" * (_HEAD.count("|") - 1)
            parts.append("\n".join([f"### {fault.title}", "", _HEAD, rule, *lines]) + "\n")
    return "\n".join(parts)


def _line(row: Row) -> str:
    samples = None if row["surplus"] is None else f"{row['surplus']} / {row['missing']}"
    seconds = None if row["seconds"] is None else f"{row['seconds']} s"
    cells = [row["contender"], row["happened"], row["steps_lost"], samples, seconds]
    return f"| {' | '.join('-' if cell is None else str(cell) for cell in cells)} |"


def _first(seen: Observed) -> str:
    """Say how the first command ended, and what it did by itself."""
    attempt = seen.attempts[0]
    starts = [start for start in seen.starts if start.run == 0]
    text = _ending(attempt, seen.fault)
    if len(seen.attempts) == 1 and seen.is_finished:
        text = "went on to the end by itself"
        if len(starts) > 1:
            text = f"restarted by torchrun, {_from(starts[-1].first)}"
    elif attempt.status == 0 and starts:
        text = f"stopped with status 0 after step {starts[-1].last}"
    if attempt.num_orphans:
        text += f"; {attempt.num_orphans} processes lived on"
    after = [line.step for start in starts for line in start.lines if line.time > seen.fault_time]
    if seen.fault.only_once:
        text += f"; {len(set(after))} more steps done"
    return text


def _again(seen: Observed) -> str:
    """Say how the same command went the second time."""
    attempt = seen.attempts[1]
    starts = [start for start in seen.starts if start.run == 1]
    if not starts:
        return f"then {_ending(attempt, seen.fault)}, without a step"
    text = f"then {_from(starts[0].first)}"
    return text if attempt.status == 0 else f"{text}, {_ending(attempt, seen.fault)}"


def _from(step: int) -> str:
    return f"from step {step}"


def _ending(attempt: Attempt, fault: Fault) -> str:
    if attempt.status is None:
        return f"hung ({fault.limit_s:g} s, killed)"
    return f"status {attempt.status}"


def _goes_on(seen: Observed) -> bool:
    """Some later start did steps, though the run did not come to its end."""
    return len(seen.starts) > 1


def _last_sign(seen: Observed) -> float:
    """Give the time to count from: the fault, or the last step that was still done after it."""
    assert seen.fault_time is not None
    first_run = seen.starts[0]
    if len(seen.starts) == 1:
        return seen.fault_time
    return max([seen.fault_time, *(line.time for line in first_run.lines)])
