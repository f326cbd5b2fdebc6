"""The command verify-ledger: check the ledger up to the run's newest checkpoint.

Owns the proof that each epoch took every sample exactly once, or as often as it was drawn. Does not
own: the files (hardened_ddp/data/batches/ledger.py).
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from ddp_runs.replay_records import read_digests
from hardened_ddp.checkpoint.folder import find_newest
from hardened_ddp.data.batches.ledger import DIGESTS, HEAD, list_files, order_path
from hardened_ddp.errors import CheckpointError, RunFolderError
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME

_SHOWN = 8
Ids = npt.NDArray[np.int64]
_NO_IDS: Ids = np.zeros(0, dtype=np.int64)


def check_ledger(run: Path, *, output: TextIO) -> int:
    """Print a line for each epoch; return 0 if every sample was taken exactly once, else 1.

    Raises RunFolderError if there is no ledger, CheckpointError if no checkpoint is valid.
    """
    newest, _ = find_newest(run / CHECKPOINTS_NAME)
    if newest is None:
        raise CheckpointError(
            f"{run} has no valid checkpoint, so nothing counts as done yet",
            fix=f"name a run that has some in {CHECKPOINTS_NAME}, or let this one go on",
        )
    meta: dict[str, Any] = dict(newest.manifest.meta)  # Any: JSON
    if "place" in meta:  # a loop of the user's own has a ledger for each loader
        is_exact = True
        for name, at in meta["place"]["streams"].items():
            place = Done(step=newest.step, epoch=at["pass"], cursor=at["cursor"], may_pause=True)
            lines, is_good = verify_ledger(run / "data" / name, place)
            print("\n".join(f"{name}: {line}" for line in lines), file=output)
            is_exact = is_exact and is_good
        return 0 if is_exact else 1
    stream = {"facts": {"taken": ()}, "sizes": ()} | (meta.get("stream") or {})
    done = Done(
        step=newest.step,
        epoch=int(meta["epoch"]),
        cursor=int(meta["cursor"]),
        taken=stream["facts"]["taken"],
        sizes=stream["sizes"],
    )
    lines, is_exact = verify_ledger(run, done)
    if (run / DIGESTS).is_dir():
        digests = read_digests(run, may_be_empty=True)
        number = sum(step < done.step for step in digests.steps)
        lines.append(f"digests: of {number} of {done.step} steps, for replay and diff")
    print("\n".join(lines), file=output)
    return 0 if is_exact else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The position of the run's newest checkpoint."""

    step: int
    epoch: int
    cursor: int  # samples of that epoch that are done
    taken: Sequence[int] = ()  # of a stream: samples of each shard in that epoch that are done
    sizes: Sequence[int] = ()  # of a stream: samples of each shard in the epochs before
    may_pause: bool = False  # of a loader that is not read in each epoch


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
    path = order_path(run, epoch)
    try:
        drawn = np.load(path)[:expected]
    except (OSError, ValueError, EOFError) as error:
        return f"which samples were drawn for it is not known: {error}"
    # WHY without: a sample that can't be read is in no ledger, however often it was drawn.
    wanted, counts = (Counter(ids[~np.isin(ids, without)].tolist()) for ids in (drawn, found))
    wrong = sorted(i for i in wanted | counts if wanted[i] != counts[i])
    some = [f"{counts[i]} times {i} instead of {wanted[i]}" for i in wrong[:_SHOWN]]
    return f"{len(wrong)} not as often as drawn: {', '.join(some)}" if some else ""


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
    while position + HEAD.size <= len(raw):
        step, epoch, count = HEAD.unpack_from(raw, position)
        position += HEAD.size
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
