"""What --continue_on_error leaves out: samples and steps, counted and named on all ranks."""

import logging
from collections.abc import Sequence
from typing import Any

from hardened_ddp.data.loader import BadSample, Batch
from hardened_ddp.data.read_errors import file_of
from hardened_ddp.errors import TooManyErrors
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress

log = logging.getLogger(__name__)


class LeftOut:
    """The list of what was left out, and its limit."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.entries: list[dict[str, Any]] = []
        """What was left out and why, of all ranks."""

    def add(self, batches: Sequence[Batch], failure: str, progress: Progress) -> None:
        """Record this rank's bad samples, and the whole step if it failed. Collective: all ranks.

        Raises TooManyErrors on all ranks above max_errors.
        """
        here = {"step": progress.step, "epoch": progress.epoch}
        mine = [
            {**here, "index": bad.index, "file": self._file_of(bad), "error": bad.error}
            for batch in batches
            for bad in batch.bad
        ]
        if failure:
            samples = [int(index) for batch in batches for index in batch.indices]
            mine.append({**here, "window": samples, "error": failure})
        for rank, entries in enumerate(self.parts.group.gather_json(mine)):  # collective
            for entry in entries:
                what = f"sample {entry['index']}" if "index" in entry else "the whole step"
                log.warning(
                    "step %d left out %s: rank %d, %s",
                    progress.step,
                    what,
                    rank,
                    entry["error"],
                    extra=ON_EVERY_RANK,
                )
                self.entries.append({"rank": rank, **entry})
                progress.count_errors(1)
        limit = self.parts.config.loop.max_errors
        if progress.num_errors > limit:
            raise TooManyErrors(
                f"{progress.num_errors} samples or steps were left out by step {progress.step}, "
                f"more than max_errors {limit}; the last: {self.entries[-1]['error']}",
                fix="see skipped_samples.jsonl in the run folder; fix the cause or raise "
                "--max_errors",
            )

    def note_rollback(self, step: int, earlier: int, why: str) -> None:
        """Record that the run went back to an earlier step. The same on all ranks."""
        self.entries.append({"rank": 0, "step": step, "taken_back_to": earlier, "error": why})

    def _file_of(self, bad: BadSample) -> str:
        """Return the file of a sample; for one that failed in the model it is looked up now."""
        return bad.file or file_of(self.parts.data.train, bad.index)
