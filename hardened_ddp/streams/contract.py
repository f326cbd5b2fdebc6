"""What a stream is: an iterable dataset in shards, each of which gives its samples in order.

Owns the contract that users write to, and what is derived from it. Does not own: other kinds of
iterable datasets, which are adapted to it (adapters.py), and reading (shard_reader.py).
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hardened_ddp.errors import DataError
from hardened_ddp.streams.planner import UNKNOWN, Numbers, shard_of

# Files up to this size are hashed as a whole; of larger ones, parts that are spread over it.
_WHOLE_BYTES = 16 << 20
_NUM_PARTS, _PART_BYTES = 17, 1 << 16

# What a dataset may say of itself.
_FORWARDED = ("num_classes", "classes", "collate_fn", "in_memory", "uses_randomness", "files")


class Stream(Protocol):
    """What a user writes.

    Optional attributes: sizes, the number of samples of each shard (then all steps but the last are
    full, and the length of an epoch is known); files, of each shard or of all (a changed file is
    noticed on resume); num_classes or classes; uses_randomness = False (no seeding per sample).
    """

    num_shards: int

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        """Read a shard from its start; or, with a state, go on where it was taken.

        The same (shard, epoch) must give the same samples in the same order. If the iterator has
        state_dict(), then open with what it returned after n samples gives sample n first. If it
        has skip(), that passes over the next sample without making it: one that can't be read.
        """


def check_stream(stream: Any, name: str) -> None:  # Any: the user's
    """Raise DataError if the stream's own numbers can't be right."""
    count = stream.num_shards
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise DataError(
            f"dataset {name}: num_shards is {count!r}; need a whole number from 1",
            fix="set num_shards to the number of shards that open() can read",
        )
    sizes = getattr(stream, "sizes", None)
    if sizes is None:
        return
    are_counts = all(isinstance(size, int | np.integer) and size >= 0 for size in sizes)
    if len(sizes) != count or not are_counts:
        raise DataError(
            f"dataset {name} has {count} shards and sizes of {len(sizes)}: {list(sizes)[:8]}",
            fix="make sizes the number of samples of each shard, or leave it out",
        )


def sizes_of(stream: Stream) -> Numbers:
    """Return the number of samples of each shard; UNKNOWN for all if the stream does not say."""
    sizes = getattr(stream, "sizes", None)
    if sizes is None:
        return np.full(stream.num_shards, UNKNOWN, dtype=np.int64)
    return np.array([int(size) for size in sizes], dtype=np.int64)


def forward(source: Any, target: Any) -> None:
    """Let target say of itself what source says, where it says nothing yet. Any: datasets."""
    for name in _FORWARDED:
        value = getattr(source, name, None)
        if value is not None and getattr(target, name, None) is None:
            setattr(target, name, value)


def name_of(stream: Stream, number: int) -> str:
    """Name a sample by its shard and its position there; the shard's file if there is one each."""
    shard, index = shard_of(number, stream.num_shards)
    files = list(getattr(stream, "files", None) or ())
    place = f", {files[shard]}" if len(files) == stream.num_shards else ""
    return f"shard {shard}{place}, sample {index} of it"


def digests_of(stream: Stream) -> dict[str, str]:
    """Return size and hash of each file of a stream by its name; empty if it names no files."""
    files = [Path(os.fspath(file)) for file in getattr(stream, "files", None) or ()]
    if not files:
        return {}
    # WHY relative: the same files may have another place on another node, or after a move.
    root = Path(os.path.commonpath([file.absolute().parent for file in files]))
    return {str(file.absolute().relative_to(root)): _digest(file) for file in files}


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Describe which files of a stream are not those of the checkpoint."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            found.append(f"{name} is missing")
        elif before.get(name) != now[name]:
            found.append(f"{name} {'has changed' if name in before else 'is new'}")
    return found


def _digest(path: Path) -> str:
    """Return size:hash of a file. Raises DataError if it can't be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256()
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
            else:
                for part in range(_NUM_PARTS):
                    file.seek((size - _PART_BYTES) * part // (_NUM_PARTS - 1))
                    digest.update(file.read(_PART_BYTES))
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error}", fix="check the path and its permissions"
        ) from error
    return f"{size}:{digest.hexdigest()[:16]}"
