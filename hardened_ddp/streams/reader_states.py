"""The states of a stream's readers in the run folder, for a resume in the middle of an epoch.

Owns the files readers/epoch-E-*.jsonl, a line for each shard every few seconds: its position and
the reader's state there. Each rank writes its own, so that no rank has to wait for another one.
A line that is lost or old costs time, never a sample: the position itself is in the checkpoint.
WHY JSON and not pickle: what a run folder holds is never executed.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hardened_ddp.reporting.run_json import read_lines
from hardened_ddp.reporting.sinks import write_text
from hardened_ddp.streams.planner import StreamPosition
from hardened_ddp.streams.shard_reader import ReaderState

log = logging.getLogger(__name__)

FOLDER = "readers"
EVERY_S = 5.0  # between two notes; a resume reads what came after the last one again
_BYTES_PER_S = 20_000  # with larger states notes are rarer

StatesAt = Callable[[StreamPosition], Mapping[int, ReaderState]]


class ShardStates:
    """Writes the states of this rank's readers, and reads those of all ranks."""

    def __init__(
        self, run: Path, *, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = run / FOLDER
        self._rank = rank
        self._clock = clock
        self._next_at = clock() + EVERY_S
        self._last: tuple[StreamPosition, StatesAt] | None = None
        self._is_on = True

    def note(self, position: StreamPosition, states: StatesAt) -> None:
        """Write the states up to position, if it is time. Disk errors never stop training."""
        self._last = (position, states)
        if self._is_on and self._clock() >= self._next_at:
            self._write()

    def read(self, position: StreamPosition) -> dict[int, ReaderState]:
        """Return for each shard the state nearest before position, of whatever rank wrote it."""
        found: dict[int, ReaderState] = {}
        for path in sorted(self._folder.glob(f"epoch-{position.epoch}-*.jsonl")):
            for line in read_lines(path, []):
                shard, index = line["shard"], line["index"]
                if found.get(shard, (0, 0, None))[1] <= index <= position.taken[shard]:
                    found[shard] = (position.epoch, index, line["state"])
        return found

    def close(self) -> None:
        """Write the states at the last position. A second call does nothing."""
        if self._is_on and self._last is not None:
            self._write()
        self._last = None

    def _write(self) -> None:
        assert self._last is not None
        position, states = self._last
        try:
            lines = [
                json.dumps({"shard": shard, "index": index, "state": state}) + "\n"
                for shard, (epoch, index, state) in states(position).items()
                if epoch == position.epoch
            ]
            text = "".join(lines)
            self._next_at = self._clock() + EVERY_S + len(text) / _BYTES_PER_S
            if not text:
                return
            self._folder.mkdir(exist_ok=True)
            # WHY the pid: each start has its own file; a line can't be added to one cut off.
            name = f"epoch-{position.epoch}-rank-{self._rank}-{os.getpid()}.jsonl"
            write_text(self._folder / name, text, mode="a")
            # WHY the last epoch stays: the newest checkpoint may be from its end.
            for path in self._folder.glob(f"epoch-{position.epoch - 2}-*.jsonl"):
                path.unlink(missing_ok=True)
        except (TypeError, ValueError, OSError) as error:  # no JSON, or no disk
            self._is_on = False
            text = (
                "the states of the stream's readers can't be written (%s): a resume in mid-epoch "
            )
            log.warning(text + "reads its samples again from the start of the epoch", error)
