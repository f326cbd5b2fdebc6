"""What the command watch draws of a run: its state, a table of its ranks, its loss and its faults.

Owns the words and the columns. Does not own: where they come from (run_files.py), and how they are
drawn (watch.py).
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runs.run_events import FAULTS
from ddp_runs.run_files import RunView, resume_command
from hardened_ddp.reporting.goodput import num_attempts
from hardened_ddp.reporting.rank_status import WAITS, RankStatus
from hardened_ddp.reporting.run_json import number_of
from hardened_ddp.settings.typed_command import own_command
from hardened_ddp.settings.wording import as_typed, printable

_SHARES = ("data", "forward", "backward", "optimizer")
_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_CURVE_WIDTH, _SHORTEST_CURVE = 60, 8
_TABLE_LINES, _FEWEST_ROWS, _MOST_PROBLEMS = 5, 3, 2
_NEWEST_EVENTS = 3
_MOST_RANKS = 100_000  # a damaged file may say any number
COLUMNS: tuple[str, ...] = (
    *("rank", "host", "device", "step", "doing", "for", "samples/s", *_SHARES),
    *("waits", "memory"),
)
TEXT_COLUMNS = ("host", "device", "doing")
_LEFT_OUT_FIRST: tuple[str, ...] = ("device", "memory", "optimizer", "forward", "backward", "data")
_LEFT_OUT_FIRST += ("host", "waits", "samples/s", "for")


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A run as words: what stands above the table, its rows, and what stands below."""

    head: tuple[str, ...]
    """The first line begins with the folder and the state."""

    rows: tuple[tuple[str, ...], ...]
    """A cell for each of COLUMNS."""

    worries: tuple[int, ...]
    """Of each row: 2 for a rank that is lost, 1 for one that takes long, else 0."""

    lines: tuple[str, ...]


def view_of(
    run: RunView,
    *,
    before: RunView | None = None,
    width: int,
    height: int | None = None,
    is_plain: bool = False,
) -> View:
    """Describe a run; before: an earlier look, since which the shares of the time are counted.

    width, height: of the terminal. If not all ranks fit, those that need a look come first.
    """
    ranks = list(run.ranks)
    head, lines = _head(run), _lines(run, is_plain, width)
    problems = [f"problem     {problem}" for problem in run.problems]
    most_rows = len(ranks)
    if height is not None and len(problems) > _MOST_PROBLEMS:
        rest = f"problem     and {len(problems) - _MOST_PROBLEMS} more: --once prints all"
        problems = [*problems[:_MOST_PROBLEMS], rest]
    lines += problems
    if height is not None:
        others = sum(-(-len(line) // width) for line in head) + len(lines) + _TABLE_LINES
        most_rows = max(_FEWEST_ROWS, height - others)
    if len(ranks) > most_rows:
        ranks = sorted(ranks, key=lambda rank: (-_worry(run, rank), rank.rank))[: most_rows - 1]
    earlier = {rank.rank: rank for rank in (before.ranks if before else ())}
    rows = [tuple(_row(run, rank, earlier.get(rank.rank))) for rank in ranks]
    worries = [_worry(run, rank) for rank in ranks]
    if len(ranks) < len(run.ranks):
        more = {"rank": "...", "doing": f"{len(run.ranks) - len(ranks)} more ranks"}
        rows.append(tuple(more.get(name, "") for name in COLUMNS))
        worries.append(0)
    return View(
        head=tuple(map(_as_line, head)),
        rows=tuple(tuple(map(_as_line, row)) for row in rows),
        worries=tuple(worries),
        lines=tuple(map(_as_line, lines)),
    )


def _as_line(text: str) -> str:
    """Write text of a file so that it stays in its place on the screen."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


def columns_for(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Choose the columns that fit into so many characters, in their order."""
    longest = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    kept = list(range(len(COLUMNS)))
    for name in _LEFT_OUT_FIRST:
        # between two columns are a space, a line and a space; at each end is a line
        if sum(longest[i] for i in kept) + 3 * (len(kept) - 1) + 2 <= width:
            break
        kept.remove(COLUMNS.index(name))
    return kept


def _head(run: RunView) -> list[str]:
    name = as_typed(run.folder)
    lines = [", ".join([f"{name}: {run.state}", *_progress_words(run)])]
    if run.state == "dead":
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.newest_sign))
        lines.append(f"no heartbeat since {clock}, {duration(run.now - run.newest_sign)} ago")
    if run.state in ("dead", "failed"):
        lines.append(f"why: {own_command('explain', run.folder)}")
        lines.append(f"continue: {resume_command(run)}")
    elif run.state == "unknown":
        lines.append("no rank has written anything yet")
    return lines


def _progress_words(run: RunView) -> list[str]:
    """Say how far the run is, and how long it still takes."""
    main, step = run.main, run.step
    words = [f"step {step}" + (f" of {main.total_steps}" if main.total_steps else "")]
    if main.epochs and step == main.step:
        words.append(f"epoch {min(main.epoch + 1, main.epochs)} of {main.epochs}")
    if (count := num_attempts(run.attempts)) > 1:
        words.append(f"{count} attempts")
    if run.account:
        words.append(f"goodput {run.account['goodput']:.0%}")
    if run.state == "running" and main.steps_here and main.total_steps > step:
        left_s = (main.total_steps - step) * sum(main.at_work_s().values()) / main.steps_here
        words += [f"about {duration(left_s)} left"] if left_s else []
    return words


def _worry(run: RunView, rank: RankStatus) -> int:
    """Return 2 for a rank that is lost, 1 for one that takes longer than others, else 0."""
    if rank.state == "failed" or (rank.state == "running" and rank.is_silent(run.now)):
        return 2
    return int(rank.state == "running" and rank.phase_s > 10)


def _row(run: RunView, rank: RankStatus, before: RankStatus | None) -> list[str]:
    doing, age_s = rank.phase, rank.phase_s
    if rank.state != "running":
        doing, age_s = rank.state, run.now - rank.now
    elif rank.is_silent(run.now):
        doing, age_s = f"silent, was in {doing}", run.now - rank.now
    has_name = rank.device != "cpu" and rank.device_name
    return [
        str(rank.rank),
        str(rank.process.get("host", "?")),
        f"{rank.device} {rank.device_name}" if has_name else rank.device,
        str(rank.step),
        doing,
        duration(age_s),
        f"{rank.samples_per_s / max(1, rank.world_size):.0f}",
        *_shares(rank, before),
        f"{rank.rss_mib / 1024:.1f} GiB"
        + (f", GPU {rank.gpu_mib / 1024:.1f}" if rank.gpu_mib else ""),
    ]


def _shares(rank: RankStatus, before: RankStatus | None) -> list[str]:
    """Return the share of each part of the time since the earlier look, and that of waiting."""
    spent = rank.at_work_s()
    if not rank.split_s and before is not None and before.process == rank.process:
        old = before.at_work_s()
        newer = {name: seconds - old.get(name, 0.0) for name, seconds in spent.items()}
        spent = newer if sum(newer.values()) > 0.2 else spent
    total = sum(spent.values())
    if total <= 0:
        return ["-"] * (len(_SHARES) + 1)
    waits = sum(spent.get(name, 0.0) for name in WAITS)
    return [f"{spent.get(name, 0.0) / total:.0%}" for name in _SHARES] + [f"{waits / total:.0%}"]


def _lines(run: RunView, is_plain: bool, width: int) -> list[str]:
    """Write what is below the table."""
    lines = []
    known = {rank.rank for rank in run.ranks}
    world_size = max((rank.world_size for rank in run.ranks), default=0)
    missing = [n for n in range(min(world_size, _MOST_RANKS)) if n not in known]
    if missing:
        yet = " yet" if run.state == "running" else ""
        lines.append(f"missing     no status{yet} of {ranks_of(missing)}")
    steps, losses = run.curve("loss/train")
    if losses:
        # WHY the newest value first: a narrow terminal cuts the end of a line
        line = f"loss        {losses[-1]:.4g} at step {steps[-1]}"
        first = f" from {losses[0]:.4g}"
        room = min(_CURVE_WIDTH, width - len(line) - len(first) - 2)
        if room >= _SHORTEST_CURVE:
            bars = _PLAIN_BARS if is_plain else _BARS
            line += f"  {sparkline(losses, bars, width=room)}{first}"
        lines.append(line)
    if run.tested:
        words = [f"{name} {values[-1]:.4g}" for name, (_, values) in run.tested.items()]
        at = next(iter(run.tested.values()))[0][-1]
        lines.append(f"test set    {', '.join(words)} at step {at}")
    lines.append(f"checkpoints {_checkpoints(run)}")
    # WHY not in the table: a long message would take the width of every other column
    for event in run.events[-_NEWEST_EVENTS:]:
        lines.append(f"{event.level.lower():<11} {ranks_of(event.ranks)}: {event.text}")
    counts = Counter(event.kind for event in run.events)
    others = [f"{n} x {kind}" for kind, n in counts.items() if kind not in FAULTS]
    lines.append(f"faults      {', '.join(run.faults) or 'none'}")
    if others:
        lines.append(f"also        {', '.join(others)}")
    return lines


def ranks_of(numbers: Sequence[int]) -> str:
    """Name some ranks: rank 3, ranks 0, 1, ranks 0, 1, 2, 3 ..."""
    return f"rank{'s' * (len(numbers) != 1)} {first_of(numbers, 4)}"


def first_of(numbers: Sequence[int], most: int) -> str:
    """List some numbers: 0, 1, 2, 3 ..."""
    return ", ".join(map(str, numbers[:most])) + " ..." * (len(numbers) > most)


def _checkpoints(run: RunView) -> str:
    if not run.checkpoints:
        return "none yet"
    step, moment = run.checkpoints[-1]
    text = f"{len(run.checkpoints)}, the newest of step {step}, {duration(run.now - moment)} ago"
    if "step" in run.best:
        value = f"{number_of(run.best, 'value'):.4g}"
        text += f"; best: step {run.best['step']}, {run.best.get('metric', 'value')} {value}"
    return text


def sparkline(values: Sequence[float], bars: str, *, width: int = _CURVE_WIDTH) -> str:
    """Draw a curve in one line of text: the mean of each part of the values, ? for NaN.

    By the logarithm, if the values are positive and differ by more than a decade.
    """
    width = min(width, len(values))
    parts = [
        values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)
    ]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    if spans_decades(finite):
        means = [math.log(mean) if math.isfinite(mean) else mean for mean in means]
        finite = [math.log(mean) for mean in finite]
    low, high = min(finite), max(finite)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    heights = [round((mean - low) * scale) if math.isfinite(mean) else None for mean in means]
    return "".join("?" if height is None else bars[height] for height in heights)


def spans_decades(values: Sequence[float]) -> bool:
    """Whether positive values differ by more than a decade, so that a log scale shows more."""
    return bool(values) and 0 < 10 * min(values) < max(values)


def duration(seconds: float) -> str:
    """Write a time as a person reads it: 0.4s, 12s, 3m20s, 5h02m, 2d04h."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
