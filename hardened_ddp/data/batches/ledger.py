"""The ledger: the samples that each step consumed, and the proof that each was taken exactly once.

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hardened_ddp.errors import RunFolderError
from hardened_ddp.reporting.sinks import FileSink

log = logging.getLogger(__name__)

FOLDER = "ledger"
# The folder of the digests, whose files have such names too: see step/records.py.
DIGESTS = "digests"

# Step, epoch, most samples of a micro-batch (0: no limit), where the window starts, its samples
# over all ranks, 1 if it was left out; two numbers of the gradient and one of this rank's batches;
# this rank's loss and what counts in it, the gradient's norm (NaN: not computed), the rate.
RECORD = struct.Struct("<QIIQIIqqqdddd")
_NAME = re.compile(r"(\d{4,})-rank-(\d+)\.bin")
_HEAD = struct.Struct("<QII")
_SHOWN = 8
_KEEP_BYTES = 64 * 2**20  # of a rank's ledger, in memory while its disk is full

Ids = npt.NDArray[np.int64]
_NO_IDS: Ids = np.zeros(0, dtype=np.int64)


def next_start(run: Path, folders: Sequence[str] = (FOLDER,)) -> int:
    """Return the number for the files of a new start. On one rank only. Raises OSError.

    folders: of the run, in which files have such names.
    """
    for folder in folders:
        (run / folder).mkdir(exist_ok=True)
    return 1 + max((file[0] for folder in folders for file in list_files(run, folder)), default=0)


class StepFile:
    """A file of one start and rank: a line of facts, then records. No disk error is raised."""

    def __init__(
        self, run: Path, folder: str, *, start: int, rank: int, head: Mapping[str, Any]
    ) -> None:
        path = run / folder / f"{start:04d}-rank-{rank}.bin"
        self.start, self._run, self._folder = start, run, folder
        self._sink: FileSink | None = FileSink(path, keep_bytes=_KEEP_BYTES, has_lines=False)
        self.add(json.dumps(head).encode() + b"\n")

    def add(self, record: bytes) -> None:
        """Write a record, and those before it that could not be written yet."""
        if self._sink is None:
            return
        self._sink.add(record)
        was_failing = self._sink.is_failing
        # WHY each at once: what the kernel has survives the end of this process.
        if not self._sink.flush() and not was_failing:
            why = self._folder, self._sink.error
            log.warning("the %s can't be written, and is kept in memory until it can: %s", *why)

    def files(self) -> list[Path]:
        """List the files of all ranks of this start. Any thread."""
        found = list_files(self._run, self._folder)
        return [path for number, _, path in found if number == self.start]

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._sink is not None and not self._sink.close():
            lost = self._sink.num_lost, self._folder
            log.warning("%d records of the %s could not be written, and will be missed", *lost)
        self._sink = None


class LedgerWriter(StepFile):
    """Writes the samples that this rank trains on in each step."""

    def __init__(
        self,
        run: Path,
        *,
        start: int,
        rank: int,
        step: int,
        facts: dict[str, int],
        order_of: Callable[[int], npt.NDArray[Any]] | None = None,
    ) -> None:
        """facts: num_samples and epoch_end, the cursor at which an epoch is done; num_shards of a
        stream. order_of: on one rank, gives the samples of an epoch where they are drawn.
        """
        self._order_of, self._ordered = order_of, -1
        self._dtype = "<u4" if facts.get("num_samples", 2**32) < 2**32 else "<u8"
        head = {"schema": 1, "step": step, "dtype": self._dtype, **facts}
        super().__init__(run, FOLDER, start=start, rank=rank, head=head)

    def bring(self, step: int, epoch: int, indices: Sequence[npt.NDArray[Any]]) -> None:
        """Write the samples of this rank's micro-batches, before the step. Rank-local."""
        if not indices:
            return
        if self._order_of is not None and epoch != self._ordered:
            self._ordered = epoch
            self._write_order(epoch, self._order_of(epoch))
        ids = np.concatenate(indices).astype(self._dtype)
        self.add(_HEAD.pack(step, epoch, len(ids)) + ids.tobytes())

    def _write_order(self, epoch: int, order: npt.NDArray[Any]) -> None:
        path = _order_path(self._run, epoch)
        try:
            with path.with_suffix(".partial").open("wb") as file:
                np.save(file, order)
                file.flush()
                os.fsync(file.fileno())
            path.with_suffix(".partial").replace(path)
        except OSError as error:
            log.warning("verify-ledger will miss the order of epoch %d: %s", epoch, error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The position of the run's newest checkpoint."""

    step: int
    epoch: int
    cursor: int  # samples of that epoch that are done
    taken: Sequence[int] = ()  # of a stream: samples of each shard in that epoch that are done
    sizes: Sequence[int] = ()  # of a stream: samples of each shard in the epochs before

    may_pause: bool = False
    """Of a loader that is not read in each epoch."""


def verify_ledger(run: Path, done: Done) -> tuple[list[str], bool]:
    """Check all epochs; return a line for each, and whether every sample was taken exactly once.

    Raises RunFolderError if there is no ledger to read.
    """
    contents = [(number, path, path.read_bytes()) for number, _, path in list_files(run)]
    # WHY: a file without a whole first line is of a rank that was killed before its first step.
    files = [(number, *_parse(path, raw)) for number, path, raw in contents if b"\n" in raw]
    if not files:
        raise RunFolderError(f"{run} has no ledger", fix="train with --ledger, then verify")
    heads = {number: head for number, head, _ in files}
    facts = files[0][1]
    taken: dict[int, list[Ids]] = {}
    for number, head, raw in files:
        for step, epoch, ids in _records(raw, head["dtype"]):
            if step < _end_of(number, done, heads):
                taken.setdefault(epoch, []).append(ids)
    left_out = _left_out(run, done, heads)
    lines, is_exact = [], True
    for epoch in range(done.epoch + (done.cursor > 0)):
        if done.may_pause and epoch not in taken:
            lines.append(f"epoch {epoch}: not read")
            continue
        found = np.concatenate([_NO_IDS, *taken.get(epoch, [])])
        without = np.array(sorted(left_out.get(epoch, ())), dtype=np.int64)
        expected = done.cursor if epoch == done.epoch else facts.get("epoch_end", 0)
        right = "each exactly once"
        if "is_drawn" in facts:
            right = "each as often as it was drawn"
            problem = _judge_drawn(run, epoch, found, expected, without)
        else:
            of_shards: Sequence[int] = ()
            if "num_shards" in facts:
                of_shards = done.sizes if epoch < done.epoch else done.taken
                expected = sum(of_shards)
            size = max(facts.get("num_samples", 0), int(without.max(initial=-1)) + 1)
            counts = np.bincount(found, minlength=size)
            # WHY count all: one that failed only inside of its step is also in the ledger.
            counts[without] = np.maximum(counts[without], 1)
            problem = "; ".join(_judge(counts, expected, of_shards))
        is_exact = is_exact and not problem
        lines.append(
            f"epoch {epoch}: {problem or f'{expected} samples, {right}'}"
            + (f"; {len(without)} of them left out, as reported" if len(without) else "")
        )
    return lines, is_exact


def _end_of(start: int, done: Done, heads: Mapping[int, dict[str, Any]]) -> int:
    """Return the step before which what a start recorded counts: later ones did the rest again."""
    later = [int(head["step"]) for other, head in heads.items() if other > start]
    return min([done.step, *later])


def _judge(counts: Ids, expected: int, of_shards: Sequence[int]) -> Iterator[str]:
    """Yield what is wrong with an epoch.

    of_shards: of a stream, the samples of each shard that are to be taken; sample number i is in
    shard i % num_shards.
    """
    done, twice = np.flatnonzero(counts), np.flatnonzero(counts > 1)
    if len(twice):
        yield f"{len(twice)} taken more than once: {twice[:_SHOWN].tolist()}"
    if len(done) != expected:
        untaken = np.flatnonzero(counts == 0)[:_SHOWN].tolist()
        yield f"{expected - len(done)} of {expected} never taken, among {untaken}"
    if of_shards:
        found = np.bincount(done % len(of_shards), minlength=len(of_shards))
        wrong = np.flatnonzero(found != np.array(of_shards))[:_SHOWN]
        if some := ", ".join(f"{found[s]} of {of_shards[s]} of shard {s}" for s in wrong):
            yield f"taken: {some}"


def _judge_drawn(run: Path, epoch: int, found: Ids, expected: int, without: Ids) -> str:
    """Say what is wrong with an epoch whose samples were drawn; usually nothing."""
    path = _order_path(run, epoch)
    try:
        drawn = np.load(path)[:expected]
    except (OSError, ValueError, EOFError) as error:
        return f"which samples were drawn for it is not known: {error}"
    # WHY without: a sample that can't be read is in no ledger, however often it was drawn.
    wanted, counts = (Counter(ids[~np.isin(ids, without)].tolist()) for ids in (drawn, found))
    wrong = sorted(i for i in wanted | counts if wanted[i] != counts[i])
    some = [f"{counts[i]} times {i} instead of {wanted[i]}" for i in wrong[:_SHOWN]]
    return f"{len(wrong)} not as often as drawn: {', '.join(some)}" if some else ""


def _order_path(run: Path, epoch: int) -> Path:
    return run / FOLDER / f"order-{epoch:06d}.npy"


def list_files(run: Path, folder: str = FOLDER) -> list[tuple[int, int, Path]]:
    """List start, rank and path of all files, in order."""
    found = [(_NAME.fullmatch(path.name), path) for path in (run / folder).glob("*.bin")]
    return sorted((int(match[1]), int(match[2]), path) for match, path in found if match)


def _parse(path: Path, content: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, raw = content.partition(b"\n")
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
        yield step, epoch, ids.astype(np.int64)
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
