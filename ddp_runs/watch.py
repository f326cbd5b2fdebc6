"""The command watch: what every rank of a run does, from another terminal or another host.

Owns the loop. It reads the run folder only, so it costs the run nothing, and it needs no torch.
Without a terminal, on one that can't move its cursor (TERM=dumb), or with --once, it prints plain
text once.
Does not own: reading the folder (run_files.py), what is drawn (watch_view.py), what the ranks write
(reporting/rank_status.py).
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from ddp_runs.run_files import RunView, find_run_folder, read_run
from ddp_runs.watch_view import COLUMNS, TEXT_COLUMNS, View, columns_for, view_of
from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.typed_command import own_command, pip_command
from hardened_ddp.settings.wording import shown

if TYPE_CHECKING:
    from rich.console import Group

PLAIN_WIDTH = 160
_COLORS = {"running": "bold green", "finished": "bold green", "stopped": "bold yellow"}
_ROW_COLORS = ("", "yellow", "red")


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
    folder = find_run_folder(options["run"], options["output_dir"])
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise ConfigError(
            "the command watch draws with rich, which is not installed",
            fix=pip_command("requirements.txt"),
        ) from error

    run = read_run(folder)
    console = Console(file=output, width=None if output.isatty() else PLAIN_WIDTH, highlight=False)
    can_redraw = output.isatty() and not console.is_dumb_terminal
    if options["once"] or not can_redraw or run.state != "running":
        view = view_of(run, width=console.width, is_plain=True)
        if not output.isatty():  # a program that reads it finds the first lines unfolded
            console.width = max(PLAIN_WIDTH, *map(len, view.head))
        console.print(drawn(view, run.state, width=console.width, is_plain=True))
        return exit_status(run)
    try:
        with Live(console=console, auto_refresh=False, screen=False) as live:
            before: RunView | None = None
            while True:
                width, height = console.size
                is_plain = console.options.ascii_only
                view = view_of(run, before=before, width=width, height=height, is_plain=is_plain)
                live.update(drawn(view, run.state, width=width), refresh=True)
                if run.state in ("finished", "stopped"):
                    return exit_status(run)
                time.sleep(every_s)
                before, run = run, read_run(folder)
    except KeyboardInterrupt:
        return 0


def exit_status(run: RunView) -> int:
    """Return 1 if the run failed or is dead, else 0."""
    return int(run.state in ("failed", "dead"))


def drawn(view: View, state: str, *, width: int, is_plain: bool = False) -> "Group":
    """Draw a view with rich, for a terminal of so many columns."""
    from rich import box
    from rich.console import Group, OverflowMethod
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.ASCII if is_plain else box.SIMPLE, pad_edge=False)
    kept = columns_for(view.rows, width)
    cells = list(zip(*view.rows, strict=True)) or [()] * len(COLUMNS)
    for i in kept:
        name = COLUMNS[i]
        table.add_column(
            name,
            # WHY: in a narrow terminal what a rank does is cut, not its number
            min_width=None if name == "doing" else max(map(len, [name, *cells[i]])),
            justify="left" if name in TEXT_COLUMNS else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row, worry in zip(view.rows, view.worries, strict=True):
        table.add_row(*(Text(row[i]) for i in kept), style=_ROW_COLORS[worry])
    first, *rest = (Text(line, overflow="fold") for line in view.head)
    first.highlight_words([f": {state}"], _COLORS.get(state, "bold red"))
    overflow: OverflowMethod = "fold" if is_plain else "ellipsis"
    lines = [Text(line, overflow=overflow, no_wrap=not is_plain) for line in view.lines]
    return Group(first, *rest, *([table] if view.rows else []), *lines)
