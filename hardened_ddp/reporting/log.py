"""Logging: one console, one file per rank, and neither ever stops training.

A line that can't be written (disk full, terminal closed) is dropped: a run of days must not die
because somebody closed its terminal. While a run starts, a thread names the part that takes long.
"""

import contextlib
import logging
import os
import select
import sys
import threading
from pathlib import Path
from typing import TextIO

from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.ranks.threads import HelperThread
from hardened_ddp.reporting.sinks import FileSink
from hardened_ddp.settings.wording import printable

log = logging.getLogger(__name__)

# extra= of a line that every rank logs with the same words: only rank 0 prints it.
ON_EVERY_RANK = {"on_every_rank": True}
FIRST_SIGN_S, _LONGEST_PAUSE_S = 2.0, 30.0  # between the signs of life of a start

_ROOT = logging.getLogger()
_OURS = logging.getLogger("hardened_ddp")
_KEEP_BYTES = 256 * 1024  # of a rank's log, in memory, while it has no file or its disk is full


def start_logging(
    *, rank: int, world_size: int, debug: bool = False, is_guest: bool = False
) -> None:
    """Log to stderr: INFO on rank 0, warnings of its own on another rank; with debug everything.

    The file of add_log_file has every line, also those from here to its opening. is_guest: in a
    program of the user's, whose own logging stays as it is, and shows our lines if there is any.
    """
    stop_logging()
    is_shown = bool(is_guest and _ROOT.handlers)
    tag = f"[rank {rank}] " if world_size > 1 else ""
    console = ConsoleHandler(sys.stderr, tag=tag)
    console.setLevel(logging.DEBUG if debug else logging.INFO if rank == 0 else logging.WARNING)
    if rank > 0 and not debug:
        console.addFilter(_is_of_this_rank)
    if is_guest:
        console.addFilter(logging.Filter(_OURS.name))
    for handler in (RankFileHandler(),) if is_shown else (console, RankFileHandler()):
        _ROOT.addHandler(handler)
    if is_guest:
        _OURS.setLevel(logging.INFO)
        return
    # WHY two levels: the debug lines of other libraries would bury ours.
    _ROOT.setLevel(logging.INFO)
    _OURS.setLevel(logging.DEBUG)
    logging.captureWarnings(True)


def add_log_file(folder: Path, *, rank: int) -> None:
    """Write this rank's log to folder/rank-N.log too, including the lines logged so far."""
    for handler in _ROOT.handlers:
        if isinstance(handler, RankFileHandler):
            handler.open(folder / f"rank-{rank}.log")


def stop_logging() -> None:
    """Close what start_logging and add_log_file opened. Safe to call twice."""
    for handler in list(_ROOT.handlers):
        if isinstance(handler, ConsoleHandler):
            logging.captureWarnings(False)
            _ROOT.setLevel(handler.levels_before[0])
            _OURS.setLevel(handler.levels_before[1])
        if isinstance(handler, ConsoleHandler | RankFileHandler):
            _ROOT.removeHandler(handler)
            handler.close()


class ConsoleHandler(logging.Handler):
    """Writes short lines: the level is shown only from WARNING on."""

    def __init__(self, stream: TextIO | None, *, tag: str) -> None:
        """stream None: Python had no stderr when it started; everything is dropped."""
        super().__init__()
        self._stream = stream
        self._fd: int | None = None
        if stream is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # in memory, or closed
                self._fd = stream.fileno()
        self.levels_before = (_ROOT.level, _OURS.level)
        self._plain, self._loud = (
            logging.Formatter(f"%(asctime)s {tag}{level}%(message)s", datefmt="%H:%M:%S")
            for level in ("", "%(levelname)s ")
        )

    def emit(self, record: logging.LogRecord) -> None:
        is_loud = record.levelno >= logging.WARNING
        line = _format(self._loud if is_loud else self._plain, record)
        if record.name == "py.warnings":  # its second line quotes the source: only the file gets it
            line = line.partition("\n")[0]
        with contextlib.suppress(OSError, ValueError):
            self.write(f"{line}\n")

    def write(self, text: str) -> None:
        """Write text at once. Raises OSError or ValueError."""
        data = text.encode("ascii", "backslashreplace")
        if self._stream is None or getattr(self._stream, "closed", False):  # a user's may lack it
            raise ValueError("the stream is closed")
        if self._fd is None:
            self._stream.write(data.decode("ascii"))
            self._stream.flush()
            return
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # a full buffer: it has 0.5 s to take more
                if not select.select([], [self._fd], [], 0.5)[1]:
                    raise


class RankFileHandler(logging.Handler):
    """Writes all lines of one rank to its file; keeps the newest in memory until there is one."""

    def __init__(self) -> None:
        super().__init__()
        # WHY lines and not records: a record with an exception keeps the exception's tensors alive.
        self._sink = FileSink(Path(), keep_bytes=_KEEP_BYTES)
        self._has_file = False
        self._formatter = logging.Formatter(
            "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
        )

    def open(self, path: Path) -> None:
        """Write to path from here on, earlier lines first. Warns if that fails."""
        self.acquire()
        try:
            self._sink.path, self._has_file = path, True
            is_written = self._sink.flush()
        finally:
            self.release()
        if not is_written:
            log.warning(
                "this rank's log file can't be written, training continues: %s", self._sink.error
            )

    def emit(self, record: logging.LogRecord) -> None:
        line = _format(self._formatter, record) + "\n"
        self._sink.add(line.encode("ascii", "backslashreplace"))
        if self._has_file:
            self._sink.flush()

    def close(self) -> None:
        if self._has_file:
            self._sink.close()
        super().close()


def _is_of_this_rank(record: logging.LogRecord) -> bool:
    # WHY py.warnings: the ranks run the same program, and so get the same warnings of Python
    return record.name != "py.warnings" and not hasattr(record, "on_every_rank")


def _format(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Format a record; if that fails, return a line that names its source location."""
    try:
        return printable(formatter.format(record))
    except Exception as error:  # WHY broad: it runs the __str__ of whatever was logged
        kind = type(error).__name__
        return f"{record.levelname} {record.pathname}:{record.lineno}: unreadable line ({kind})"


def watch_start(tracker: Tracker, *, first_sign_s: float = FIRST_SIGN_S) -> threading.Event:
    """Name the part of a start that takes long, until the first step, or until the event is set.

    Again whenever its duration has doubled, or after half a minute. Returns the event.
    """
    end = threading.Event()

    def watch() -> None:
        age_s = 0.0
        while not end.wait(max(first_sign_s, min(age_s, _LONGEST_PAUSE_S))):
            if tracker.num_steps > 0 or tracker.phase in (Phase.EVALUATION, Phase.CHECKPOINT):
                return
            part, age_s = tracker.part_of_start()
            if age_s >= first_sign_s:
                log.info("%s: %.0f s so far", part, age_s)

    HelperThread(watch, name="start-up").start()
    return end
