"""What --continue_on_error leaves out: samples and steps, counted and named on all ranks.

Owns skipped_samples.jsonl. Every rank knows all entries, so that whichever rank saves can write
them: what a checkpoint covers is on the disk before it.
"""

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.data.batches.batch import BadSample, Batch
from hardened_ddp.data.batches.read_errors import file_of
from hardened_ddp.errors import TooManyErrors
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.reporting.sinks import open_no_link
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress

log = logging.getLogger(__name__)

NAME = "skipped_samples.jsonl"


class LeftOut:
    """The list of what was left out, and its limit."""

    def __init__(self, parts: Parts, folder: Path | None = None) -> None:
        """folder: of the run; None: nothing is written."""
        self.parts = parts
        self._path = None if folder is None else folder / NAME
        self._start: dict[str, int] = {}
        self._num_written = 0
        self._lock = threading.Lock()
        self.entries: list[dict[str, Any]] = []  # what was left out and why, of all ranks

    def add(self, batches: Sequence[Batch], failure: str, progress: Progress) -> None:
        """Record this rank's bad samples, and the whole step if it failed. Collective: all ranks.

        Raises TooManyErrors on all ranks above max_errors.
        """
        here = {"step": progress.step, "epoch": progress.epoch, **self._start}
        mine = []
        for bad in (bad for batch in batches for bad in batch.bad):
            # one that failed in the model has none yet
            file = bad.file or file_of(self.parts.data.train, bad.index)
            mine.append({**here, "index": bad.index, "file": file, "error": bad.error})
        if failure:
            samples = [int(index) for batch in batches for index in batch.indices]
            mine.append({**here, "window": samples, "error": failure})
        for rank, entries in enumerate(self.parts.group.gather_json(mine)):  # collective
            for entry in entries:
                what = "the whole step"
                if "index" in entry:
                    bad = BadSample(entry["index"], entry["error"], entry["file"])
                    what = f"sample {bad.name}"
                text = f"step {progress.step} left out {what}: rank {rank}, {entry['error']}"
                log.warning("%s", text, extra=ON_EVERY_RANK)
                self.entries.append({"rank": rank, **entry})
                progress.num_errors += 1
        limit = self.parts.config.loop.max_errors
        if progress.num_errors > limit:
            raise TooManyErrors(
                f"{progress.num_errors} samples or steps were left out by step {progress.step}, "
                f"more than max_errors {limit}; the last: {self.entries[-1]['error']}",
                fix="see skipped_samples.jsonl in the run folder; fix the cause or raise "
                "--max_errors",
            )

    def begin(self, start: int) -> None:
        """Note the number of the ledger's files: what a later start does again does not count."""
        self._start = {"start": start}

    def write(self) -> None:
        """Append what the file does not have yet, and have it on the disk. Any thread.

        Raises OSError.
        """
        with self._lock:
            entries = list(self.entries)
            if self._path is None or len(entries) == self._num_written:
                return
            lines = [f"{json.dumps(entry)}\n".encode() for entry in entries[self._num_written :]]
            with open(self._path, "a+b", opener=open_no_link) as file:
                file.seek(0)
                # WHY look: a rank that died may have written some of it, the last line in part
                *known, rest = file.read().split(b"\n")
                file.truncate(file.tell() - len(rest))
                file.write(b"".join(line for line in lines if line[:-1] not in known))
            Disk().sync_files(self._path.parent, [self._path])
            self._num_written = len(entries)

    def note_rollback(self, step: int, earlier: int, why: str) -> None:
        """Record that the run went back to an earlier step. The same on all ranks."""
        self.entries.append({"rank": 0, "step": step, "taken_back_to": earlier, "error": why})
