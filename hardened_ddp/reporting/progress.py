"""What shows whoever waits that a run goes on: signs of life while it starts, then a progress bar.

While a run starts, a thread names the part that takes long, as the tracker is told. The bar is one,
on rank 0, and only in a terminal; log lines appear above it, and carry the same information where
there is none. A terminal that is closed ends the bar, not the run.
"""

import logging
import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.ranks.threads import HelperThread
from hardened_ddp.reporting.log import start_logging, stop_logging, write_within
from hardened_ddp.reporting.sinks import TextSink

if TYPE_CHECKING:
    from tqdm import tqdm

log = logging.getLogger(__name__)

FIRST_SIGN_S = 2.0
_TICK_S = 0.5
_END_LIMIT_S = 2.0
_REDRAW_S = 0.2
_REDRAW_IN_FILE_S = 10.0  # without a terminal each drawing is a line in a file
_OPEN_LAYOUT = "{desc}step {n_fmt} [{elapsed}]"  # while the number of all steps is not known
_LAYOUT = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"


class StartUp:
    """Logging, and the signs of life, from now to close()."""

    def __init__(
        self, tracker: Tracker, launch: Launch, *, debug: bool, first_sign_s: float = FIRST_SIGN_S
    ) -> None:
        start_logging(rank=launch.rank, world_size=launch.world_size, debug=debug)
        self._tracker = tracker
        self._first_sign_s = first_sign_s
        self._end = threading.Event()
        self._thread = HelperThread(self._watch, name="start-up")
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it still runs, and logging."""
        self._end.set()
        self._thread.join(_END_LIMIT_S)
        stop_logging()

    def _watch(self) -> None:
        seen, next_sign_s = "", 0.0
        tick_s = min(_TICK_S, self._first_sign_s / 4)
        while not self._end.wait(tick_s):
            tracker = self._tracker
            if tracker.num_steps > 0 or tracker.phase in (Phase.EVALUATION, Phase.CHECKPOINT):
                return
            part, age_s = tracker.part_of_start()
            if part != seen:
                seen, next_sign_s = part, self._first_sign_s
            if age_s >= next_sign_s:
                log.info("%s: %.0f s so far", part, age_s)
                next_sign_s = max(3 * next_sign_s, age_s + self._first_sign_s)


class ProgressBar:
    """Shows how far a run is. Costs one clock read per step, and nothing when it is off."""

    def __init__(
        self, *, total_steps: int | None, initial_step: int, enabled: bool | None = None
    ) -> None:
        """total_steps None: not known yet. enabled None: on if stderr is a terminal."""
        self._bar: tqdm[Any] | None = None  # Any: it iterates over nothing
        self._sink = TextSink(sys.stderr)
        is_terminal = self._sink.isatty()
        self._redraw_s = _REDRAW_S if is_terminal else _REDRAW_IN_FILE_S
        self._next_draw = 0.0
        if is_terminal if enabled is None else enabled:
            self._bar = _open_bar(self._sink, total=total_steps, initial=initial_step)
            write_within(self._above)
            self._end_if_gone()

    def update(self, step: int) -> None:
        """Move to step; draw if it is time. Never raises."""
        if self._bar is None or monotonic() < self._next_draw:
            return
        self._next_draw = monotonic() + self._redraw_s
        self._bar.n = step
        self._bar.refresh()
        self._end_if_gone()

    def describe(self, *parts: str) -> None:
        """Set the text before the bar; empty parts are left out. The next update draws it."""
        if self._bar is not None:
            self._bar.set_description_str(" | ".join(filter(None, parts)) + " ", refresh=False)

    def expect(self, total_steps: int) -> None:
        """Show the number of all steps, now that it is known."""
        if self._bar is not None and self._bar.total != total_steps:
            self._bar.total, self._bar.bar_format = total_steps, _LAYOUT

    def close(self) -> None:
        """End the bar. Safe to call twice."""
        if self._bar is not None:
            write_within(None)
            self._bar.close()
            self._bar = None

    def _above(self) -> AbstractContextManager[None]:
        """Clear the bar while something else is written, then draw it again."""
        bar = self._bar
        if bar is None:  # another thread logs while the bar is closed
            return nullcontext()
        return type(bar).external_write_mode(file=self._sink)

    def _end_if_gone(self) -> None:
        """Close the bar for good if a write to the terminal failed."""
        if self._sink.num_lost:
            log.debug("the progress bar is closed, its terminal is gone: %s", self._sink.error)
            self.close()


def _open_bar(sink: TextSink, *, total: int | None, initial: int) -> "tqdm[Any]":
    # WHY here: ranks without a bar don't need to load it.
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # WHY: its monitor thread would outlive the run
    # WHY our own lock: tqdm's also locks between processes, which costs a semaphore.
    tqdm.set_lock(threading.RLock())
    is_sized = False
    with suppress(OSError):  # WHY: of 0 columns tqdm gives the bar one
        is_sized = os.get_terminal_size(sink.fileno()).columns > 0
    return tqdm(
        total=total,
        initial=initial,
        file=sink,
        bar_format=_LAYOUT if total is not None else _OPEN_LAYOUT,
        ascii=True,
        dynamic_ncols=is_sized,
        ncols=None if is_sized else 80,
        mininterval=0,
        leave=False,
    )
