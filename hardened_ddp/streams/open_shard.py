"""An open reader of one shard of a stream, and how it is opened: at the start, or at a state.

What goes wrong here: the state is not what open() takes. It may be older than the user's code, or
hold what JSON changes, such as tuples. That costs time, never a sample.
Does not own: which samples are read (shard_reader.py), where states are kept (shard_states.py).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hardened_ddp.data.batches.read_errors import is_transient
from hardened_ddp.data.foreign_code import describe
from hardened_ddp.errors import ANY_FAILURE, SampleError
from hardened_ddp.ranks.seeding import seed_sample
from hardened_ddp.streams.stream_types import Stream
from hardened_ddp.streams.worker_info import seen_by_user

log = logging.getLogger(__name__)

Shortcut = tuple[int, int, Any]
"""(epoch, position, state): a reader opened with this state gives sample number position first."""


class EndOfShard(Exception):
    """The shard has no such sample: it ends before."""

    def __init__(self, end: int) -> None:
        super().__init__(f"the shard has {end} samples")
        self.end = end


class Given(Exception):
    """A reader gave an exception as its sample: that one is bad, and the reader goes on."""

    def __init__(self, error: Exception) -> None:
        super().__init__(describe(error))
        self.error = error


def behind(place: int, error: str) -> SampleError:
    """Return the error of a sample that can't be read because of one before it in its shard."""
    return SampleError(f"sample {place} of its shard ended the reader: {error}")


@dataclass(slots=True)
class OpenShard:
    """A reader, and the index of the sample that it gives next."""

    epoch: int
    position: int
    samples: Iterator[Any]
    after_error: str = ""
    """It raised, and was asked to go on: its end may be no end of the shard."""

    state_after_error: Any = None
    """Its state then, if it has one."""


def open_shard(
    stream: Stream,
    shard: int,
    *,
    epoch: int,
    seed: int | None,
    position: int = 0,
    state: Any = None,
) -> OpenShard:
    """Open a shard at its start, or at the state of a position. Any: the stream's own.

    seed: None if the stream uses no randomness.
    """
    if seed is not None:
        seed_sample(seed, epoch, -1 - shard)
    with seen_by_user(stream, shard):
        samples = iter(stream.open(shard, epoch=epoch, state=state))
    return OpenShard(epoch, position, samples)


def open_at_state(
    stream: Stream, shard: int, shortcut: Shortcut, *, seed: int | None
) -> OpenShard | None:
    """Open a shard at a state; None if open() does not take it."""
    epoch, position, state = shortcut
    try:
        return open_shard(stream, shard, epoch=epoch, seed=seed, position=position, state=state)
    except ANY_FAILURE as error:  # WHY broad: the user's code
        if is_transient(error):
            raise
        log.warning(
            "shard %d is read from its start: it can't be opened at the state of its sample %d: %s",
            *(shard, position, describe(error)),
        )
        return None
