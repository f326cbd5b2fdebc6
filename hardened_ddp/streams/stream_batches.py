"""Batches made of a stream's samples, once these have been read.

Owns how they are made: as micro-batches, for one step or for several at once, and the samples that
are held because parts of a batch may be made again.
Does not own: which samples a step takes (shard_loader.py), what a batch consists of
(data/batches/fetch.py).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.sampler import Window, split_evenly
from hardened_ddp.errors import ANY_FAILURE
from hardened_ddp.streams.contract import Stream, name_of
from hardened_ddp.streams.planner import StreamPosition
from hardened_ddp.streams.read_ahead import Items, split_bad

# Steps whose batches are made together if their samples have been read. WHY: a training step
# replaces what is in the CPU's caches; so samples and code are loaded into them once in 16 steps.
_AT_ONCE = 16

# Of such batches. Larger ones gain nothing, and memory would be held for them.
_MOST_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step whose size is known, and this rank's samples of it."""

    window: Window
    items: Items
    after: StreamPosition
    is_next_here: bool  # the samples of the next step have been read


class HeldSamples:
    """The samples of the last batches as a map-style dataset, of which a Fetcher makes batches."""

    uses_randomness = False  # a sample was read with its own random numbers

    def __init__(self, stream: Stream, *, num_windows: int = 1) -> None:
        """num_windows: so many are held, because parts of their batches may be made again."""
        self.stream = stream
        self._windows: deque[dict[int, Any]] = deque(maxlen=num_windows)

    def begin_window(self) -> None:
        """Let go of the samples of the oldest window."""
        self._windows.append({})

    def put(self, numbers: Sequence[int], samples: Sequence[Any]) -> None:
        """Hold more samples of the current window. Any: whatever the stream gives."""
        self._windows[-1].update(zip(numbers, samples, strict=True))

    def name_of_sample(self, number: int) -> str:
        """Name a sample by shard and position, for messages."""
        return name_of(self.stream, number)

    def __getitem__(self, number: int) -> Any:  # Any: whatever the stream gives
        for held in reversed(self._windows):
            if number in held:
                return held[number]
        raise KeyError(f"sample {number} is not held any more")


class BatchMaker:
    """Makes the batches of this rank."""

    def __init__(self, fetcher: Fetcher, *, batch_size: int, pin_memory: bool) -> None:
        """fetcher: of HeldSamples. batch_size: of a micro-batch."""
        assert isinstance(fetcher.dataset, HeldSamples)
        self.fetcher = fetcher
        self._held = fetcher.dataset
        self._batch_size = batch_size
        self._pins = pin_memory
        # WHY not with a GPU: one batch is made while it works, and 16 would take longer than that.
        # WHY not with a collate: parts of its batches are made again of the last samples held.
        self._at_once = 1 if pin_memory or fetcher.collate is not None else _AT_ONCE

    def batches_of(self, steps: Iterator[TakenStep]) -> Iterator[tuple[TakenStep, list[Batch]]]:
        """Yield each step without its items, and its batches. Collective as steps is."""
        made: deque[tuple[TakenStep, list[Batch]]] = deque()
        num_bytes = 0
        for step in steps:
            try:
                batches = self._make_all(step)
            except ANY_FAILURE:  # WHY broad: whatever it is, the steps before it are trained
                yield from made
                raise
            made.append((replace(step, items=Items()), batches))
            num_bytes += sum(batch.size_bytes() for batch in batches)
            has_room = len(made) < self._at_once and num_bytes < _MOST_BYTES
            if step.is_next_here and has_room:
                continue
            num_bytes = 0
            while made:
                yield made.popleft()

    def make_one(self, items: Items, epoch: int) -> Batch:
        """Make one batch of all items, as if they were a step."""
        self._held.begin_window()
        return self._made_ready(self._make(items, epoch), epoch)

    def _make_all(self, step: TakenStep) -> list[Batch]:
        self._held.begin_window()
        epoch, items = step.window.epoch, step.items
        size = len(items.numbers)
        parts = split_evenly(size, -(-size // self._batch_size))
        batches = [self._make(items.part(first, last), epoch) for first, last in parts]
        return [self._made_ready(batch, epoch) for batch in batches]

    def _make(self, items: Items, epoch: int) -> Batch:
        good, bad = split_bad(items)
        if self.fetcher.collate is not None:  # then parts of the batch may be made again
            self._held.put(good.numbers, good.samples)
        batch = self.fetcher.assemble(epoch, good.samples, good.numbers)
        return replace(batch, bad=batch.bad + bad) if bad else batch

    def _made_ready(self, batch: Batch, epoch: int) -> Batch:
        """Pin a batch, if that is wanted, and let its parts be made again."""
        if self._pins:
            batch.pin()
        return self.fetcher.with_parts(batch, epoch)
