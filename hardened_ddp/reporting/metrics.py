"""Metrics on disk: metrics.jsonl and TensorBoard. A write that fails never stops training.

After a restart from an earlier step both contain some steps twice: TensorBoard is told to discard
the first, and a reader of metrics.jsonl takes the last line of a step.
Does not own: the formats (event_file.py), the thread and the disk (sinks.py).
"""

import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hardened_ddp.reporting import event_file
from hardened_ddp.reporting.sinks import FileSink, ReportWriter
from hardened_ddp.reporting.trackers import TrackerThread

log = logging.getLogger(__name__)

_KEEP_BYTES = 1024 * 1024  # of each file, in memory, while the disk is full
_CLOSE_LIMIT_S = 10.0


class MetricsLog:
    """Writes the numbers of one run. On ranks other than 0 every call does nothing."""

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        is_main: bool,
        trackers: Sequence[TrackerThread] = (),
    ) -> None:
        """Does not touch the disk: the writer thread opens the files at the first write.

        trackers: of rank 0, which get the same values.
        """
        self._trackers = trackers
        self._is_main = is_main
        self._has_board = tensorboard and is_main
        self._lines = FileSink(folder / "metrics.jsonl", keep_bytes=_KEEP_BYTES)
        # WHY pid and time: each start of a run has its own file, and all are shown as one curve.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        path = folder / "tensorboard" / name
        self._events = FileSink(path, keep_bytes=_KEEP_BYTES, has_lines=False)
        self._events.add(event_file.first_record(wall_time=time.time()))
        sinks = [self._lines, self._events] if tensorboard else [self._lines]
        self._sinks = sinks if is_main else []
        self._writer = ReportWriter(flush=self._flush, name="metrics")
        self._failing: set[Path] = set()
        self._has_restart_record = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write values at step: one line of metrics.jsonl, one point each in TensorBoard.

        A NaN or infinite number is null in metrics.jsonl and kept in TensorBoard.
        """
        if self._is_main:
            numbers = {name: float(number) for name, number in values.items()}
            self._writer.do(partial(self._add_scalars, step, numbers, time.time()))
            for tracker in self._trackers:
                tracker.log(step, numbers)

    def close(self) -> None:
        """Write what is left and close. Takes a limited time, even if a disk or tracker hangs."""
        for tracker in self._trackers:
            tracker.close()
        if not self._writer.close(timeout_s=_CLOSE_LIMIT_S):
            log.warning("the disk does not answer: the last metrics may be missing in the files")
            return
        unwritten = [sink for sink in self._sinks if not sink.close()]
        num_lost = sum(sink.num_lost for sink in self._sinks) + self._writer.num_refused
        if unwritten or num_lost:
            log.warning(
                "%d records of metrics could not be written to %s: %s",
                num_lost,
                ", ".join(str(sink.path) for sink in unwritten or self._sinks),
                next((sink.error for sink in self._sinks if sink.error), "the disk was too slow"),
            )

    def _add_scalars(self, step: int, numbers: Mapping[str, float], now: float) -> None:
        finite = {
            name: number if math.isfinite(number) else None for name, number in numbers.items()
        }
        line = json.dumps({"step": step, "time": round(now, 3), **finite})
        self._lines.add(line.encode() + b"\n")
        if self._has_board:
            if step > 0 and not self._has_restart_record:
                self._events.add(event_file.restart_record(step, wall_time=now))
            self._has_restart_record = True
            self._events.add(event_file.scalars_record(step, numbers, wall_time=now))

    def _flush(self) -> bool:
        """Write to all files; for each, warn once that it fails, and once that it works again."""
        is_all_written = True
        for sink in self._sinks:
            if sink.flush():
                if sink.path in self._failing:
                    self._failing.remove(sink.path)
                    log.warning("%s is written again, %d records lost", sink.path, sink.num_lost)
                continue
            is_all_written = False
            if sink.path not in self._failing:
                self._failing.add(sink.path)
                log.warning("%s can't be written, training continues: %s", sink.path, sink.error)
        return is_all_written
