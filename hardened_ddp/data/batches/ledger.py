"""The ledger: the samples that each step consumed. The proof from it: ddp_runs/ledger_check.py.

The files are ledger/NNNN-rank-R.bin of a run folder: one for each rank and each start of the run.
A rank writes the samples of a step before it trains on them. A start from step S invalidates what
earlier starts wrote for S and later steps: that work was lost, and is repeated.
With --sampling the order of an epoch is beside them, in order-EPOCH.npy: a sample is to be taken as
often as it is there.
A file is a line of JSON, then records: step (8 bytes), epoch (4), count (4), count sample ids of 4
bytes (8 if the dataset has 2**32 samples or more), all little-endian. A record that was cut off by
a crash belongs to a step that does not count.

Before a checkpoint is committed, the files of all ranks are synced from where it is written: what
is only in the memory of another host is lost if that one loses its power.
"""

import json
import logging
import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hardened_ddp.reporting.run_json import Json
from hardened_ddp.reporting.sinks import FileSink

log = logging.getLogger(__name__)

FOLDER, DIGESTS = "ledger", "digests"  # of a run; step/records.py has the latter

# Of a digest: step, epoch, most samples of a micro-batch (0: no limit), where the window starts,
# its samples over all ranks, 1 if it was left out; a number of this rank's batches, two of the
# gradient; this rank's loss, what counts in it, the gradient's norm (NaN: not computed), the rate.
RECORD = struct.Struct("<QIIQIIqqqdddd")
_NAME = re.compile(r"(\d{4,})-rank-(\d+)\.bin")
HEAD = struct.Struct("<QII")
_KEEP_BYTES = 64 * 2**20  # of a rank's ledger, in memory while its disk is full


def next_start(run: Path) -> int:
    """Return the number for the files of a new start. On one rank only. Raises OSError."""
    return 1 + max((number for number, _, _ in list_files(run, "*")), default=0)


class LedgerWriter:
    """Writes the samples that this rank trains on in each step. Disk errors never stop training."""

    def __init__(
        self, run: Path, *, start: int, rank: int, step: int, facts: Json, name: str = FOLDER
    ) -> None:
        """facts: num_samples and epoch_end, the cursor at which an epoch is done; num_shards of a
        stream. name: of the folder.
        """
        self.start, self._run, self._name = start, run, name
        # On one rank: gives the samples of an epoch where they are drawn.
        self.order_of: Callable[[int], npt.NDArray[Any]] | None = None
        self._ordered = -1
        self._dtype = "<u4" if facts.get("num_samples", 2**32) < 2**32 else "<u8"
        path = run / name / f"{start:04d}-rank-{rank}.bin"
        self._sink: FileSink | None = FileSink(path, keep_bytes=_KEEP_BYTES, has_lines=False)
        head = {"schema": 1, "step": step, "dtype": self._dtype, **facts}
        self.add(json.dumps(head).encode() + b"\n")

    def bring(self, step: int, epoch: int, indices: Sequence[npt.NDArray[Any]]) -> None:
        """Write the samples of this rank's micro-batches, before the step. Rank-local."""
        if not indices:
            return
        if self.order_of is not None and epoch != self._ordered:
            self._ordered = epoch
            self._write_order(epoch, self.order_of(epoch))
        ids = np.concatenate(indices).astype(self._dtype)
        self.add(HEAD.pack(step, epoch, len(ids)) + ids.tobytes())

    def add(self, record: bytes) -> None:
        """Write a record, and those before it that could not be written yet."""
        if self._sink is None:
            return
        self._sink.add(record)
        was_failing = self._sink.is_failing
        # WHY each at once: what the kernel has survives the end of this process.
        if not self._sink.flush() and not was_failing:
            why = self._name, self._sink.error
            log.warning("the %s can't be written, and is kept in memory until it can: %s", *why)

    def files(self) -> list[Path]:
        """List the files of all ranks of this start. Any thread."""
        found = list_files(self._run, self._name)
        return [path for number, _, path in found if number == self.start]

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._sink is not None and not self._sink.close():
            lost = self._sink.num_lost, self._name
            log.warning("%d records of the %s could not be written, and will be missed", *lost)
        self._sink = None

    def _write_order(self, epoch: int, order: npt.NDArray[Any]) -> None:
        path = order_path(self._run, epoch)
        try:
            with path.with_suffix(".partial").open("wb") as file:
                np.save(file, order)
                file.flush()
                os.fsync(file.fileno())
            path.with_suffix(".partial").replace(path)
        except OSError as error:
            log.warning("verify-ledger will miss the order of epoch %d: %s", epoch, error)


def order_path(run: Path, epoch: int) -> Path:
    return run / FOLDER / f"order-{epoch:06d}.npy"


def list_files(run: Path, folder: str = FOLDER) -> list[tuple[int, int, Path]]:
    """List start, rank and path of all files, in order."""
    found = [(_NAME.fullmatch(path.name), path) for path in run.glob(f"{folder}/*.bin")]
    return sorted((int(match[1]), int(match[2]), path) for match, path in found if match)
