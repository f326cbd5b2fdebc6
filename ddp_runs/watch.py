"""The command watch: what every rank of a run does, from another terminal or another host.

It reads the run folder only, so it costs the run nothing, and it needs no torch. Without a
terminal, on one that can't move its cursor (TERM=dumb), or with --once, it prints plain text once.
Owns the loop, the words and the columns. Does not own: reading the folder (run_files.py).
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from ddp_runs.replay_records import Step, largeness, read_digests
from ddp_runs.run_events import FAULTS
from ddp_runs.run_files import RunView, mirror_words, read_run, resume_command
from hardened_ddp.errors import ConfigError, RunFolderError
from hardened_ddp.reporting.rank_status import WAITS, RankStatus
from hardened_ddp.reporting.run_json import number_of
from hardened_ddp.settings.earlier_run import find_folder
from hardened_ddp.settings.typed_command import own_command
from hardened_ddp.settings.wording import as_typed, listed, printable, shown

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

PLAIN_WIDTH = 160
_COLORS = {"running": "bold green", "finished": "bold green", "stopped": "bold yellow"}
_ROW_COLORS = ("", "yellow", "red")
_SHARES = ("data", "forward", "backward", "optimizer")
_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_CURVE_WIDTH, _SHORTEST_CURVE = 60, 8
_TABLE_LINES, _FEWEST_ROWS, _MOST_PROBLEMS = 5, 3, 2
_NEWEST_EVENTS = 3
_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s"))
_SPIKE, _BEFORE = 1.5, 5  # a loss so many times as large as the median of so many reports before
_MOST_RANKS = 100_000  # a damaged file may say any number
COLUMNS: tuple[str, ...] = ("rank", "host", "device", "step", "doing", "for", "samples/s")
COLUMNS += (*_SHARES, "waits", "memory")
_TEXT_COLUMNS = ("host", "device", "doing")
_LEFT_OUT_FIRST: tuple[str, ...] = ("device", "memory", "optimizer", "forward", "backward", "data")
_LEFT_OUT_FIRST += ("host", "waits", "samples/s", "for")


def run_watch(options: Mapping[str, str], *, output: TextIO) -> int:
    """Show a run until it ends or Ctrl-C; return 1 if it failed or is dead. Raises ConfigError."""
    try:
        every_s = float(options["every"])
    except ValueError:
        every_s = 0.0
    if not 0.1 <= every_s <= 3600:
        raise ConfigError(
            f"--every: found {shown(options['every'])}, needs seconds, from 0.1 to 3600",
            fix=own_command("watch", "--help"),
        )
    folder = find_folder(options["run"], Path(options["output_dir"]))
    from rich.console import Console
    from rich.live import Live

    run = read_run(folder)
    console = Console(file=output, width=None if output.isatty() else PLAIN_WIDTH, highlight=False)
    can_redraw = output.isatty() and not console.is_dumb_terminal
    if options["once"] or not can_redraw or run.state != "running":
        # a program that reads it, or a hand that copies a command, finds no line folded
        console.print(drawn(run, width=console.width), soft_wrap=not output.isatty())
        return int(run.state in ("failed", "dead"))
    try:
        with Live(console=console, auto_refresh=False, screen=False) as live:
            while True:
                width, height = console.size
                bars = _PLAIN_BARS if console.options.ascii_only else _BARS
                live.update(drawn(run, width=width, height=height, bars=bars), refresh=True)
                if run.state in ("finished", "stopped"):
                    return 0
                time.sleep(every_s)
                run = read_run(folder)
    except KeyboardInterrupt:
        return 0


def drawn(
    run: RunView, *, width: int, height: int | None = None, bars: str = _PLAIN_BARS
) -> "Group":
    """Draw a run with rich.

    width, height: of the terminal. If not all ranks fit, those that need a look come first.
    Without a height everything is drawn, as plain text.
    """
    from rich.console import Console, Group
    from rich.text import Text

    problems = list(run.problems)
    if height is not None and len(problems) > _MOST_PROBLEMS:
        rest = f"and {len(problems) - _MOST_PROBLEMS} more: --once prints all"
        problems = [*problems[:_MOST_PROBLEMS], rest]
    head = [Text(_as_line(line)) for line in _head(run)]
    lines = [*_lines(run, bars, width), *(f"problem     {problem}" for problem in problems)]
    ranks, most_rows = list(run.ranks), len(run.ranks)
    if height is not None:
        above = sum(len(text.wrap(Console(), width)) for text in head)
        most_rows = max(_FEWEST_ROWS, height - above - len(lines) - _TABLE_LINES)
    if len(ranks) > most_rows:
        ranks = sorted(ranks, key=lambda rank: (-_worry(run, rank), rank.rank))[: most_rows - 1]
    rows = [_row(run, rank) for rank in ranks]
    colors = [_ROW_COLORS[_worry(run, rank)] for rank in ranks]
    if len(ranks) < len(run.ranks):
        more = {"rank": "...", "doing": f"{len(run.ranks) - len(ranks)} more ranks"}
        rows.append([more.get(name, "") for name in COLUMNS])
        colors.append("")
    table = _table(rows, colors, width=width, is_plain=height is None)
    head[0].highlight_words([f": {run.state}"], _COLORS.get(run.state, "bold red"))
    cut: Mapping[str, Any] = {} if height is None else {"no_wrap": True, "overflow": "ellipsis"}
    below = [Text(_as_line(line), **cut) for line in lines]
    return Group(*head, *([table] if ranks else []), *below)


def _table(
    rows: Sequence[Sequence[str]], colors: Sequence[str], *, width: int, is_plain: bool
) -> "Table":
    """Draw the ranks, in the columns that fit into so many characters."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [list(map(_as_line, column)) for column in zip(COLUMNS, *rows, strict=True)]
    kept = list(range(len(COLUMNS)))
    for name in _LEFT_OUT_FIRST:
        # between two columns are a space, a line and a space; at each end is a line
        if sum(max(map(len, cells[i])) for i in kept) + 3 * (len(kept) - 1) + 2 <= width:
            break
        kept.remove(COLUMNS.index(name))
    table = Table(box=box.ASCII if is_plain else box.SIMPLE, pad_edge=False)
    for i in kept:
        table.add_column(
            COLUMNS[i],
            # WHY: in a narrow terminal what a rank does is cut, not its number
            min_width=None if COLUMNS[i] == "doing" else max(map(len, cells[i])),
            justify="left" if COLUMNS[i] in _TEXT_COLUMNS else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for number, color in enumerate(colors, start=1):  # cells[i][0] is the name of the column
        table.add_row(*(Text(cells[i][number]) for i in kept), style=color)
    return table


def _as_line(text: str) -> str:
    """Write text of a file so that it stays in its place on the screen."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


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
    main, step = run.main, run.step
    words = [f"step {step}" + (f" of {main.total_steps}" if main.total_steps else "")]
    if main.epochs and step == main.step:
        words.append(f"epoch {min(main.epoch + 1, main.epochs)} of {main.epochs}")
    if (count := len(run.attempts)) > 1:
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


def _row(run: RunView, rank: RankStatus) -> list[str]:
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
        *_shares(rank),
        f"{rank.rss_mib / 1024:.1f} GiB"
        + (f", GPU {rank.gpu_mib / 1024:.1f}" if rank.gpu_mib else ""),
    ]


def _shares(rank: RankStatus) -> list[str]:
    """Return the share of each part of the time since the start, and that of waiting."""
    spent = rank.at_work_s()
    total = sum(spent.values())
    if total <= 0:
        return ["-"] * (len(_SHARES) + 1)
    waits = sum(spent.get(name, 0.0) for name in WAITS)
    return [f"{spent.get(name, 0.0) / total:.0%}" for name in _SHARES] + [f"{waits / total:.0%}"]


def spikes_of(run: RunView) -> list[tuple[int, float, str]]:
    """List the reports whose training loss has a spike, and what replays the worst of their steps.

    Of a run without digests: none.
    """
    (steps, losses), spikes = run.curve("loss/train"), list[int]()
    for at, loss in enumerate(losses):
        before = [value for value in losses[max(0, at - _BEFORE) : at] if math.isfinite(value)]
        if len(before) > 1 and not loss <= _SPIKE * median(before):
            spikes.append(at)
    known: Mapping[int, Step] = {}
    if spikes:  # WHY not of any run: to read the digests of a long one takes time
        with suppress(RunFolderError, OSError):
            known = read_digests(run.folder).steps
    found = []
    for at in spikes:
        if numbers := [n for n in range(*steps[at - 1 : at + 1]) if n in known]:
            worst = max(numbers, key=lambda n: largeness(known[n].numbers["loss"]))
            command = own_command("replay", run.folder, "--step", str(worst))
            found.append((steps[at], losses[at], command))
    return found


def _lines(run: RunView, bars: str, width: int) -> list[str]:
    lines = []
    known = {rank.rank for rank in run.ranks}
    world_size = max((rank.world_size for rank in run.ranks), default=0)
    if missing := [n for n in range(min(world_size, _MOST_RANKS)) if n not in known]:
        yet = " yet" if run.state == "running" else ""
        lines.append(f"missing     no status{yet} of {ranks_of(missing)}")
    steps, losses = run.curve("loss/train")
    if losses:
        # WHY the newest value first: a narrow terminal cuts the end of a line
        line = f"loss        {losses[-1]:.4g} at step {steps[-1]}"
        first = f" from {losses[0]:.4g}"
        room = min(_CURVE_WIDTH, width - len(line) - len(first) - 2)
        if room >= _SHORTEST_CURVE:
            line += f"  {sparkline(losses, bars, width=room)}{first}"
        lines.append(line)
    for step, loss, command in spikes_of(run)[-1:]:
        lines.append(f"spike       {loss:.4g} by step {step}: {command}")
    if run.tested:
        words = [f"{name} {values[-1]:.4g}" for name, (_, values) in run.tested.items()]
        at = next(iter(run.tested.values()))[0][-1]
        lines.append(f"test set    {', '.join(words)} at step {at}")
    saved = "none yet"
    if run.checkpoints:
        step, moment = run.checkpoints[-1]
        ago = duration(run.now - moment)
        saved = f"{len(run.checkpoints)}, the newest of step {step}, {ago} ago"
        if "step" in run.best:
            value = f"{number_of(run.best, 'value'):.4g}"
            saved += f"; best: step {run.best['step']}, {run.best.get('metric', 'value')} {value}"
    lines.append(f"checkpoints {saved}")
    lines += [f"mirror      {told}"] if (told := mirror_words(run)) else []
    # WHY not in the table: a long message would take the width of every other column
    for event in run.events[-_NEWEST_EVENTS:]:
        lines.append(f"{event.level.lower():<11} {ranks_of(event.ranks)}: {event.text}")
    counts = Counter(event.kind for event in run.events)
    lines.append(f"faults      {', '.join(run.faults) or 'none'}")
    if others := [f"{n} x {kind}" for kind, n in counts.items() if kind not in FAULTS]:
        lines.append(f"also        {', '.join(others)}")
    return lines


def ranks_of(numbers: Sequence[int]) -> str:
    """Name some ranks: rank 3, ranks 0, 1, ranks 0, 1, 2, 3 and 4 more."""
    return f"rank{'s' * (len(numbers) != 1)} {listed(numbers, 4)}"


def sparkline(values: Sequence[float], bars: str, *, width: int = _CURVE_WIDTH) -> str:
    """Draw a curve in one line of text: the mean of each part of the values, ? for NaN.

    By the logarithm, if the values are positive and differ by more than a decade.
    """
    width = min(width, len(values))
    ends = [i * len(values) // width for i in range(width + 1)]
    parts = [values[start:end] for start, end in pairwise(ends)]
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
    whole = round(seconds)
    for size, name, part, of_part in _UNITS:
        if whole >= size:
            return f"{whole // size}{name}{whole % size // part:02d}{of_part}"
    return f"{seconds:.1f}s" if seconds < 9.95 else f"{whole}s"
