"""The progress bar: one, on rank 0, and only where a person looks at a terminal.

Owns the bar and how often it is drawn. Elsewhere the log lines tell the same.
"""

import sys
import time
from typing import Any

from tqdm import tqdm

_REDRAW_S = 0.2


class ProgressBar:
    """Shows how far a run is. Costs a comparison per step, and nothing when it is off."""

    def __init__(self, *, total_steps: int, initial_step: int, enabled: bool | None = None) -> None:
        """enabled None: on if stderr is a terminal."""
        is_on = sys.stderr.isatty() if enabled is None else enabled
        self._bar: tqdm[Any] | None = None  # Any: it iterates over nothing
        self._next_draw = 0.0
        if is_on:
            tqdm.monitor_interval = 0  # WHY: its watching thread would outlive the run
            self._bar = tqdm(
                total=total_steps,
                initial=initial_step,
                unit="step",
                dynamic_ncols=True,
                mininterval=0,
                leave=False,
            )

    def update(self, step: int, **numbers: float) -> None:
        """Move to step; draw if it is time. Never raises."""
        if self._bar is None:
            return
        now = time.monotonic()
        if now >= self._next_draw:
            self._next_draw = now + _REDRAW_S
            try:
                self._bar.n = step
                if numbers:
                    self._bar.set_postfix(
                        {name: f"{number:.4g}" for name, number in numbers.items()}, refresh=False
                    )
                self._bar.refresh()
            except OSError:  # the terminal is gone: so is whoever looked at it
                self._bar = None

    def clear(self) -> None:
        """Take the bar away before a log line; the next update draws it again."""
        if self._bar is not None:
            try:
                self._bar.clear()
                self._next_draw = 0.0
            except OSError:
                self._bar = None

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            try:
                self._bar.close()
            except OSError:
                self._bar = None
