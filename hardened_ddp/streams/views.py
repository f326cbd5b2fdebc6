"""A stream seen as a map-style dataset: to look at its first samples, and to test on it.

Owns the two views. Reading in order is as fast as the stream; any other access opens it anew.
Does not own: training on a stream (shard_loader.py).
"""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hardened_ddp.errors import ANY_FAILURE, DataError
from hardened_ddp.ranks.seeding import keeping_random_state
from hardened_ddp.streams.adapters import adapt
from hardened_ddp.streams.contract import Stream, digests_of, forward, name_of, sizes_of
from hardened_ddp.streams.planner import shard_of
from hardened_ddp.streams.shard_reader import EndOfShard, SampleIsError, ShardReader

log = logging.getLogger(__name__)

# Samples of a shard of a test part that are counted: larger ones say their length.
MOST_COUNTED = 2**20


class StreamView(Dataset[Any]):  # Any: whatever the stream gives
    """A stream by the numbers of its samples. Its length is that of the first round: num_shards."""

    is_view_of_stream = True

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.digests = digests_of(stream)  # size and hash of each file by its name
        self._reader = ShardReader(stream, seed=0)
        forward(stream, self)

    def __len__(self) -> int:
        return self.stream.num_shards

    def __getitem__(self, number: int) -> Any:  # Any: as above
        try:
            return _read(self._reader, *shard_of(number, self.stream.num_shards))
        finally:
            self._reader.close()

    def name_of_sample(self, number: int) -> str:
        return name_of(self.stream, number)

    def first_samples(self, most: int, name: str) -> list[int]:
        """Return so many numbers of samples, each the first one of a shard that is not empty.

        name: of the dataset. Raises DataError if all are.
        """
        with keeping_random_state():
            found = list(itertools.islice(self._first_of_shards(), most))
        if not found:
            raise DataError(
                f"dataset {name} has no training sample: each of its {len(self)} shards is empty",
                fix="check its files, and what open() gives",
            )
        return found

    def _first_of_shards(self) -> Iterator[int]:
        for shard in range(self.stream.num_shards):
            try:
                self._reader.read(0, shard, 0, [])
            except EndOfShard:
                continue
            except ANY_FAILURE:  # WHY broad: the user's code; who reads the sample meets it again
                log.debug("shard %d, sample 0", shard, exc_info=True)
            finally:
                self._reader.close()
            yield shard


class StreamInOrder(Dataset[Any]):  # Any: as above
    """All samples of a stream, one shard after the other: for a test set."""

    is_read_in_order = True  # any other order opens the stream anew

    def __init__(self, stream: Stream, name: str) -> None:
        """Count the samples, by reading them all if the stream does not say their number."""
        self.stream, self._name = stream, name
        sizes = sizes_of(stream)
        self.is_counted = bool((sizes < 0).any())
        if self.is_counted:
            log.info("%s: the test part does not say its length: counting its samples", name)
            sizes = np.array([self._count(shard) for shard in range(stream.num_shards)])
        self._stops = np.cumsum(sizes)
        self._reader = ShardReader(stream, seed=0)
        self.digests = digests_of(stream)
        forward(stream, self)

    def __len__(self) -> int:
        return int(self._stops[-1])

    def __getitem__(self, place: int) -> Any:  # Any: as above
        return _read(self._reader, *self._find(place))

    def name_of_sample(self, place: int) -> str:
        shard, index = self._find(place)
        return name_of(self.stream, index * self.stream.num_shards + shard)

    def _find(self, place: int) -> tuple[int, int]:
        if not 0 <= place < len(self):
            raise IndexError(f"sample {place} of {len(self)}")
        shard = int(np.searchsorted(self._stops, place, side="right"))
        return shard, place - int(self._stops[shard - 1] if shard else 0)

    def _count(self, shard: int) -> int:
        """Count the samples of a shard, bad ones too. Raises DataError where they have no end."""
        reader, count = ShardReader(self.stream, seed=0), 0
        while True:
            if count >= MOST_COUNTED:
                raise DataError(
                    f"dataset {self._name}: shard {shard} of the test part has given "
                    f"{count:,} samples, and goes on: it has no end, or does not say its length",
                    fix="let it end (itertools.islice), or give it sizes, the samples of each "
                    "shard; --eval_every 0 trains without a test",
                )
            try:
                reader.read(0, shard, count, [])
            except EndOfShard as over:
                return over.end
            except ANY_FAILURE as error:  # WHY broad: users' code; met again in evaluation
                if reader.is_blocked(0, shard):
                    log.warning("shard %d of the test part ends early: %s", shard, error)
                    return count + 1
            count += 1


def view_of(dataset: Any, name: str) -> StreamView:  # Any: a user's
    """Return what training sees of a dataset that is no map-style one. Raises DataError."""
    return StreamView(adapt(dataset, name))


def view_in_order(dataset: Any, name: str, *, evaluates: bool) -> StreamInOrder | None:
    """Return what a test sees of a dataset that is no map-style one. Raises DataError.

    None: it would have to be counted, and the run does not evaluate: it may have no end.
    """
    stream = adapt(dataset, name, is_resumed=False)
    is_wanted = evaluates or bool((sizes_of(stream) >= 0).all())
    return StreamInOrder(stream, name) if is_wanted else None


def _read(reader: ShardReader, shard: int, index: int) -> Any:  # Any: as above
    try:
        return reader.read(0, shard, index, [])
    except EndOfShard as over:
        raise IndexError(f"shard {shard} has {over.end} samples now") from None
    except SampleIsError as sample:
        raise sample.error from None
