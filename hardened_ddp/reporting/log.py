"""Logging: one console, one file per rank, and neither ever stops training.

Owns the handlers of the program. A line that can't be written (disk full, terminal gone) is counted
and dropped. WHY: a run of days must not die because somebody closed the window it was started in.
"""

import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TextIO

_ROOT = logging.getLogger()
_MAX_EARLY_RECORDS = 10_000


class SteadyHandler(logging.Handler):
    """Writes lines to a stream; counts those that can't be written instead of raising."""

    def __init__(self, stream: TextIO, *, owns_stream: bool) -> None:
        super().__init__()
        self.stream = stream
        self.owns_stream = owns_stream
        self.num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode("ascii", "backslashreplace").decode("ascii")
            if self.num_lost:
                line = f"({self.num_lost} lines were lost before this one)\n{line}"
            self.stream.write(line + "\n")
            self.stream.flush()
            self.num_lost = 0
        except (OSError, ValueError):  # ValueError: the stream was closed by somebody
            self.num_lost += 1

    def close(self) -> None:
        if self.owns_stream:
            try:
                self.stream.close()
            except OSError:
                self.num_lost += 1
        super().close()


def start_logging(*, rank: int, world_size: int, debug: bool) -> None:
    """Log to stderr: everything of rank 0, warnings of the others; with debug all of all."""
    stop_logging()
    tag = f"[rank {rank}] " if world_size > 1 else ""
    console = SteadyHandler(sys.stderr, owns_stream=False)
    console.setLevel(logging.DEBUG if debug else logging.INFO if rank == 0 else logging.WARNING)
    console.setFormatter(_LevelFormatter(tag))
    early = MemoryHandler(_MAX_EARLY_RECORDS, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    _ROOT.setLevel(logging.INFO)
    logging.getLogger("hardened_ddp").setLevel(logging.DEBUG)
    for handler in (console, early):
        _ROOT.addHandler(handler)
    logging.captureWarnings(True)


def add_log_file(folder: Path, *, rank: int) -> None:
    """Write this rank's log to folder/rank-N.log as well, with all that was said before."""
    early = next((h for h in _ROOT.handlers if isinstance(h, MemoryHandler)), None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / f"rank-{rank}.log").open("a", encoding="ascii")
    except OSError as error:
        logging.getLogger(__name__).warning("no log file for this rank: %s", error)
        return
    handler = SteadyHandler(stream, owns_stream=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if early is not None:
        early.setTarget(handler)
        early.close()  # flushes nothing by itself: see flushOnClose
        for record in early.buffer:
            handler.handle(record)
        _ROOT.removeHandler(early)
    _ROOT.addHandler(handler)


def stop_logging() -> None:
    """Close what start_logging and add_log_file opened. Safe to call twice."""
    logging.captureWarnings(False)
    for handler in [h for h in _ROOT.handlers if isinstance(h, SteadyHandler | MemoryHandler)]:
        _ROOT.removeHandler(handler)
        handler.close()


class _LevelFormatter(logging.Formatter):
    """Short lines for people: the level is told only where something is wrong."""

    def __init__(self, tag: str) -> None:
        super().__init__(f"%(asctime)s {tag}%(message)s", datefmt="%H:%M:%S")
        self._loud = logging.Formatter(
            f"%(asctime)s {tag}%(levelname)s %(message)s", datefmt="%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            return self._loud.format(record)
        return super().format(record)
