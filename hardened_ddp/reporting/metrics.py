"""Metrics on disk: metrics.jsonl and TensorBoard. A write that fails never stops training.

After a restart from an earlier step both contain some steps twice: TensorBoard is told to discard
the first, and a reader of metrics.jsonl takes the last line of a step.
WHY not tensorboard's own writers: they load 290 modules. Its protocol buffers alone load 50.
"""

import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from hardened_ddp.errors import first_line
from hardened_ddp.reporting.sinks import FileSink, ReportWriter
from hardened_ddp.reporting.trackers import TrackerThread

log = logging.getLogger(__name__)

_KEEP_BYTES = 1024 * 1024  # of each file, in memory, while the disk is full
_CLOSE_LIMIT_S = 10.0
_CRC32C_POLYNOMIAL = 0x82F63B78


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
        """The writer thread opens the files at the first write. trackers: of rank 0."""
        self._trackers = trackers
        self._is_main = is_main
        self._lines = FileSink(folder / "metrics.jsonl", keep_bytes=_KEEP_BYTES)
        # WHY pid and time: each start of a run has its own file, and all are shown as one curve.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        path = folder / "tensorboard" / name
        self._events = FileSink(path, keep_bytes=_KEEP_BYTES, has_lines=False)
        sinks = [self._lines, self._events] if tensorboard else [self._lines]
        self._sinks = sinks if is_main else []
        self._writer = ReportWriter(flush=self._flush, name="metrics")
        self._has_events = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write values at step. NaN and infinity are null in metrics.jsonl, kept in TensorBoard."""
        if self._is_main:
            numbers = {name: float(number) for name, number in values.items()}
            self._writer.do(partial(self._add_scalars, step, numbers, time.time()))
            for tracker in self._trackers:
                tracker.log(step, numbers)

    def close(self) -> None:
        """Write what is left and close. Takes a limited time, even if a disk or tracker hangs."""
        for tracker in self._trackers:
            tracker.close()
        if not self._writer.close("the files of metrics", limit_s=_CLOSE_LIMIT_S):
            log.warning("the disk does not answer: the last metrics may be missing in the files")
            return
        unwritten = [sink for sink in self._sinks if not sink.close()]
        num_lost = sum(sink.num_lost for sink in self._sinks) + self._writer.num_refused
        if unwritten or num_lost:
            error = next((sink.error for sink in self._sinks if sink.error), "the disk is too slow")
            log.warning("%d records of metrics could not be written: %s", num_lost, error)

    def _add_scalars(self, step: int, numbers: Mapping[str, float], now: float) -> None:
        finite = {
            name: number if math.isfinite(number) else None for name, number in numbers.items()
        }
        line = json.dumps({"step": step, "time": round(now, 3), **finite})
        self._lines.add(line.encode() + b"\n")
        if self._events in self._sinks:
            self._add_events(step, numbers, now)

    def _add_events(self, step: int, numbers: Mapping[str, float], now: float) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
        except Exception as error:  # WHY broad: protobuf of another version raises TypeError
            text = "tensorboard can't be imported, its curves are not written: %s"
            log.warning(text, first_line(error))
            self._sinks.remove(self._events)
            return

        values = [Summary.Value(tag=n, simple_value=v) for n, v in numbers.items()]
        found = [Event(summary=Summary(value=values))]
        if not self._has_events:
            found.insert(0, Event(file_version="brain.Event:2"))
            if step > 0:  # discard what earlier files have from this step on
                found.insert(1, Event(session_log=SessionLog(status=SessionLog.START)))
        self._has_events = True
        for event in found:
            event.wall_time, event.step = now, step
            self._events.add(_framed(event.SerializeToString()))

    def _flush(self) -> bool:
        """Write to all files; for each, warn once that it fails."""
        for sink in self._sinks:
            was_failing = sink.is_failing
            if not sink.flush() and not was_failing:
                log.warning("%s can't be written, training continues: %s", sink.path, sink.error)
        return not any(sink.is_failing for sink in self._sinks)


def _framed(data: bytes) -> bytes:
    """Frame a record as TFRecord does: length, checksum, data, checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked_crc(length), data, _masked_crc(data)))


def _masked_crc(data: bytes) -> bytes:
    """Compute TFRecord's checksum of the Castagnoli CRC, which zlib does not have."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_CRC32C_POLYNOMIAL if entry & 1 else 0)
        table.append(entry)
    return tuple(table)
