"""Blocks of a stream's shards, as a BatchReader requests them.

A block is read in one run as long as nothing happens; then sample by sample, which finds the bad
one. On the way from a worker to its rank samples are packed into few tensors: to send one costs as
much as to send a thousand numbers, and a block of 64 samples would be 128 tensors.
Does not own: the readers (shard_reader.py), the order of the samples in a block (read_ahead.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.data

from hardened_ddp.data.batches.batch import Batch, Request
from hardened_ddp.data.batches.read_errors import BadSamples
from hardened_ddp.streams.contract import Stream, name_of
from hardened_ddp.streams.planner import UNKNOWN, shard_of
from hardened_ddp.streams.shard_reader import EndOfShard, SampleIsError, ShardReader

_NO_TARGETS = torch.empty(0, dtype=torch.int64)  # of a block: its samples hold their labels


class BlockReader:
    """Reads blocks of a stream's shards: what a BatchReader of a stream calls its fetcher.

    A request is (epoch, numbers of consecutive samples of one shard); the batch that answers holds
    the samples packed, the end of the shard if it was met, whether an error keeps readers from it,
    and the reader's state.
    """

    def __init__(self, stream: Stream, *, seed: int) -> None:
        self.dataset = stream
        self.reader = ShardReader(stream, seed=seed)
        # The sample that is being read; other processes may read this.
        self.reading: list[int] | memoryview[int] = [-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "reading": [-1]}  # WHY: memory of this process alone

    def __getitem__(self, request: Request) -> Batch:
        epoch, ids = request
        numbers: list[int] = ids.tolist()
        if not numbers:  # nothing is asked of this worker at the moment
            return Batch({"shard": -1}, _NO_TARGETS, ids)
        shard, start = shard_of(numbers[0], self.dataset.num_shards)
        troubles: list[str] = []
        run, bad, end = self._run(epoch, numbers, troubles), BadSamples(), UNKNOWN
        for number, sample in zip(numbers, run, strict=False):
            if isinstance(sample, Exception):  # given as a sample
                bad.add(number, sample, self.name_of(number))
        samples = [sample for sample in run if not isinstance(sample, Exception)]
        good = [n for n, s in zip(numbers, run, strict=False) if not isinstance(s, Exception)]
        for number in numbers[len(good) + len(bad) :]:
            self.reading[0] = number
            try:
                index = number // self.dataset.num_shards
                samples.append(self.reader.read(epoch, shard, index, troubles))
                good.append(number)
            except EndOfShard as over:
                end = over.end
                break
            except BaseException as error:  # WHY broad: the user's code; see BadSamples
                cause = error.error if isinstance(error, SampleIsError) else error
                bad.add(number, cause, self.name_of(number))
        is_worker = torch.utils.data.get_worker_info() is not None
        content = {
            "samples": pack(samples) if is_worker else ("list", samples),
            "shard": shard,
            "start": start,
            "end": end,
            "is_blocked": self.reader.is_blocked(epoch, shard),
            "state": self.reader.state_of(shard) if end < 0 else None,
        }
        found = torch.tensor(good, dtype=torch.int64) if len(good) < len(numbers) else ids
        return Batch(content, _NO_TARGETS, found, tuple(bad), tuple(troubles))

    def _run(self, epoch: int, numbers: list[int], troubles: list[str]) -> list[Any]:
        """Read the samples at the start of a block that come without trouble."""
        self.reading[0] = numbers[0]
        num_shards = self.dataset.num_shards
        if numbers[-1] - numbers[0] != (len(numbers) - 1) * num_shards:  # some are left out
            return []
        shard, index = shard_of(numbers[0], num_shards)
        return self.reader.read_run(epoch, shard, index, len(numbers), troubles)

    def name_of(self, index: int) -> str:
        return name_of(self.dataset, index)

    def pass_over(self, epoch: int, index: int, error: str) -> None:
        """Never read this sample again: it ends the process that reads it."""
        shard, position = shard_of(index, self.dataset.num_shards)
        self.reader.pass_over(epoch, shard, position, error)


Packed = tuple[Any, ...]  # what pack made: a tag, then what the tag says


def pack(samples: Sequence[Any]) -> Packed:  # Any: samples of a foreign dataset
    """Pack samples; what is no tensor, is empty or differs between samples stays a list."""
    if not samples:
        return ("list", [])
    first = samples[0]
    kind = type(first)
    if any(type(sample) is not kind for sample in samples):
        return ("list", list(samples))
    if kind is torch.Tensor:
        return _pack_tensors(samples)
    if kind is dict and all(sample.keys() == first.keys() for sample in samples):
        return ("dict", {key: pack([sample[key] for sample in samples]) for key in first})
    if kind in (tuple, list) and first and all(len(s) == len(first) for s in samples):
        tag = "tuple" if kind is tuple else "columns"
        return (tag, [pack(column) for column in zip(*samples, strict=True)])
    return ("list", list(samples))


def unpack(packed: Packed, count: int) -> list[Any]:  # Any: as above
    """Return the count samples that were packed."""
    tag, content = packed[0], packed[1]
    match tag:
        case "list":
            return list(content)
        case "equal":
            return list(content.unbind(0))
        case "ragged":
            parts = content.split([torch.Size(shape).numel() for shape in packed[2]])
            return [part.view(shape) for part, shape in zip(parts, packed[2], strict=True)]
        case "dict":
            columns = {key: unpack(column, count) for key, column in content.items()}
            return [{key: columns[key][i] for key in columns} for i in range(count)]
        case _:
            rows = zip(*(unpack(column, count) for column in content), strict=True)
            return list(rows) if tag == "tuple" else [list(row) for row in rows]


def _pack_tensors(tensors: Sequence[torch.Tensor]) -> Packed:
    first = tensors[0]
    if any(tensor.dtype != first.dtype or tensor.requires_grad for tensor in tensors):
        return ("list", list(tensors))
    if all(tensor.shape == first.shape for tensor in tensors):
        return ("equal", torch.stack(list(tensors)))
    shapes = [tuple(tensor.shape) for tensor in tensors]
    return ("ragged", torch.cat([tensor.reshape(-1) for tensor in tensors]), shapes)
