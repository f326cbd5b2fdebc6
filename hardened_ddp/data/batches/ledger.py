"""The ledger: the samples that each step consumed, and the proof that each was taken exactly once.

The files are ledger/NNNN-rank-R.bin of a run folder: one for each rank and each start of the run.
A rank writes the samples of a step before it trains on them; the step counts if the run continued
from that step or a later one. So a start from step S invalidates what earlier starts wrote for S
and later steps: that work was lost, and is repeated.
A file is a line of JSON, then records: step (8 bytes), epoch (4), count (4), count sample ids of 4
bytes (8 if the dataset has 2**32 samples or more), all little-endian. A record that was cut off by
a crash belongs to a step that does not count.

Before a checkpoint is committed, the files of all ranks are synced from where it is written; what a
rank on another host has only in the memory of its host is lost if that host loses its power.

Does not own: which samples a step takes (sampler.py), what was left out (skipped_samples.jsonl).
"""

import json
import logging
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hardened_ddp.errors import RunFolderError
from hardened_ddp.reporting.sinks import FileSink

log = logging.getLogger(__name__)

FOLDER = "ledger"
_NAME = re.compile(r"(\d{4,})-rank-(\d+)\.bin")
_HEAD = struct.Struct("<QII")
_SHOWN = 8
_KEEP_BYTES = 64 * 2**20
"""How much of a rank's ledger is kept in memory while its disk is full."""

Ids = npt.NDArray[np.uint64]


def next_start(run: Path) -> int:
    """Return the number for the files of a new start. On one rank only. Raises OSError."""
    (run / FOLDER).mkdir(exist_ok=True)
    return 1 + max((number for number, _, _ in _files(run)), default=0)


class LedgerWriter:
    """Writes the samples that this rank trains on in each step. Disk errors never stop training."""

    def __init__(
        self, run: Path, *, start: int, rank: int, step: int, facts: dict[str, int]
    ) -> None:
        """facts: num_samples, and epoch_end, the cursor at which an epoch is done; or num_shards
        of a stream, whose length may not be known yet.
        """
        self._dtype = "<u4" if facts.get("num_samples", 2**32) < 2**32 else "<u8"
        head = json.dumps({"schema": 1, "step": step, "dtype": self._dtype, **facts}) + "\n"
        path = run / FOLDER / f"{start:04d}-rank-{rank}.bin"
        self.start, self._run = start, run
        self._sink: FileSink | None = FileSink(path, keep_bytes=_KEEP_BYTES, has_lines=False)
        self._is_behind = False
        self._add(head.encode())

    def bring(self, step: int, epoch: int, indices: Sequence[npt.NDArray[Any]]) -> None:
        """Write the samples of this rank's micro-batches, before the step. Rank-local."""
        if not indices:
            return
        ids = np.concatenate(indices).astype(self._dtype)
        self._add(_HEAD.pack(step, epoch, len(ids)) + ids.tobytes())

    def files(self) -> list[Path]:
        """List the files of all ranks of this start. Any thread."""
        return [path for number, _, path in _files(self._run) if number == self.start]

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._sink is not None and not self._sink.close():
            log.warning(
                "%d records of the ledger could not be written: verify-ledger will miss samples",
                self._sink.num_lost,
            )
        self._sink = None

    def _add(self, record: bytes) -> None:
        """Write a record, and those before it that could not be written yet."""
        if self._sink is None:
            return
        self._sink.add(record)
        # WHY each at once: what the kernel has survives the end of this process.
        was_behind, self._is_behind = self._is_behind, not self._sink.flush()
        if self._is_behind and not was_behind:
            log.warning(
                "the ledger can't be written, and is kept in memory until it can: %s",
                self._sink.error,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The position of the run's newest checkpoint."""

    step: int
    epoch: int
    cursor: int
    """Samples of that epoch that are done."""

    taken: Sequence[int] = ()
    """Of a stream: samples of each shard in that epoch that are done."""

    sizes: Sequence[int] = ()
    """Of a stream: samples of each shard in the epochs before."""


def verify_ledger(run: Path, done: Done) -> tuple[list[str], bool]:
    """Check all epochs; return a line for each, and whether every sample was taken exactly once.

    Raises RunFolderError if there is no ledger to read.
    """
    # WHY: a file without a whole first line is of a rank that was killed before its first step.
    files = [file for file in _files(run) if b"\n" in file[2].read_bytes()]
    if not files:
        raise RunFolderError(f"{run} has no ledger", fix="train with --ledger, then verify")
    heads = {number: _read(path)[0] for number, _, path in files}
    facts = heads[files[0][0]]
    taken: dict[int, list[Ids]] = {}
    for number, _, path in files:
        head, raw = _read(path)
        for step, epoch, ids in _records(raw, head["dtype"]):
            if step < _end_of(number, done, heads):
                taken.setdefault(epoch, []).append(ids)
    left_out = _left_out(run, done, heads)
    lines, is_exact = [], True
    for epoch in range(done.epoch + (done.cursor > 0)):
        counts = _count(taken.get(epoch, []), facts.get("num_samples", 0))
        expected, problem = done.cursor, ""
        if "num_shards" in facts:
            of_shards = done.sizes if epoch < done.epoch else done.taken
            expected = sum(of_shards)
            problem = _judge_shards(counts, left_out.get(epoch, set()), of_shards)
        elif epoch < done.epoch:
            expected = facts["epoch_end"]
        found, num_left_out = _judge(counts, left_out.get(epoch, set()), expected)
        problem = "; ".join(filter(None, (found, problem)))
        is_exact = is_exact and not problem
        lines.append(
            f"epoch {epoch}: {problem or f'{expected} samples, each exactly once'}"
            + (f"; {num_left_out} of them left out, as reported" if num_left_out else "")
        )
    return lines, is_exact


def _end_of(start: int, done: Done, heads: Mapping[int, dict[str, Any]]) -> int:
    """Return the step before which what a start recorded counts: later ones did the rest again."""
    later = [int(head["step"]) for other, head in heads.items() if other > start]
    return min([done.step, *later])


def _count(parts: Sequence[Ids], num_samples: int) -> npt.NDArray[np.uint8]:
    """Count how often each sample was taken."""
    size = max([num_samples, *(int(ids.max()) + 1 for ids in parts if len(ids))])
    counts = np.zeros(size, dtype=np.uint8)
    for ids in parts:
        np.add.at(counts, ids, 1)
    return counts


def _judge_shards(
    counts: npt.NDArray[np.uint8], left_out: set[int], expected: Sequence[int]
) -> str:
    """Say of which shards of a stream more or fewer samples were taken than the checkpoint says.

    Sample number i is in shard i % num_shards.
    """
    num_shards = len(expected)
    is_done = counts > 0
    numbers = np.array([i for i in left_out if i >= len(is_done) or not is_done[i]], dtype=np.int64)
    found = np.bincount(np.flatnonzero(is_done) % num_shards, minlength=num_shards)
    found += np.bincount(numbers % num_shards, minlength=num_shards)
    wrong = [s for s in range(num_shards) if found[s] != expected[s]]
    some = ", ".join(f"{found[s]} of {expected[s]} of shard {s}" for s in wrong[:_SHOWN])
    return f"taken: {some}" if wrong else ""


def _judge(taken: npt.NDArray[np.uint8], left_out: set[int], expected: int) -> tuple[str, int]:
    """Return what is wrong with an epoch, and how many samples were left out."""
    twice = np.flatnonzero(taken > 1)
    num_missing = (
        expected - int((taken > 0).sum()) - sum(i >= len(taken) or taken[i] == 0 for i in left_out)
    )
    found = []
    if len(twice):
        found.append(f"{len(twice)} taken more than once: {twice[:_SHOWN].tolist()}")
    if num_missing:
        untaken = [int(i) for i in np.flatnonzero(taken == 0) if int(i) not in left_out]
        found.append(f"{num_missing} of {expected} never taken, among {untaken[:_SHOWN]}")
    # WHY count all: a left-out sample is also in the ledger if it failed only inside its step.
    return "; ".join(found), len(left_out)


def _files(run: Path) -> list[tuple[int, int, Path]]:
    """List start, rank and path of all files, in order."""
    paths = (run / FOLDER).glob("*.bin")
    found = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), int(match[2]), path) for match, path in found)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    head, _, raw = path.read_bytes().partition(b"\n")
    try:
        facts: dict[str, Any] = json.loads(head)
        if type(facts["step"]) is not int:
            raise ValueError(f"step is {facts['step']!r}")
        np.dtype(facts["dtype"])
    except (ValueError, TypeError, KeyError) as error:
        raise RunFolderError(f"{path} is not a ledger file: {error}") from error
    return facts, raw


def _records(raw: bytes, dtype: str) -> Iterator[tuple[int, int, Ids]]:
    position, width = 0, np.dtype(dtype).itemsize
    while position + _HEAD.size <= len(raw):
        step, epoch, count = _HEAD.unpack_from(raw, position)
        position += _HEAD.size
        if position + count * width > len(raw):
            return  # cut off by a crash
        ids = np.frombuffer(raw, dtype=dtype, count=count, offset=position)
        yield step, epoch, ids.astype("u8")
        position += count * width


def _left_out(run: Path, done: Done, heads: Mapping[int, dict[str, Any]]) -> dict[int, set[int]]:
    """Read which samples of which epoch were left out; whole steps are in the ledger."""
    path = run / "skipped_samples.jsonl"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found: dict[int, set[int]] = {}
    # WHY not the last part: no checkpoint covers a line that was cut off by a crash.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            entry = dict(json.loads(line))
            start = int(entry.get("start", max(heads)))
            if "index" in entry and int(entry["step"]) < _end_of(start, done, heads):
                found.setdefault(int(entry["epoch"]), set()).add(int(entry["index"]))
        except (ValueError, TypeError, KeyError) as error:
            raise RunFolderError(
                f"line {number} of {path} can't be read: {error}",
                fix="remove it; its sample then counts as never taken",
            ) from error
    return found
