"""What of a stream each step takes, seen from the outside as a WindowSampler is.

Owns where the epoch's end is, as soon as that is known, and the facts of the last positions: what a
checkpoint needs. Does not own: the plan (shards.py), reading it (shard_loader.py).
"""

import logging
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from hardened_ddp.data.batches.run_length import RunLength
from hardened_ddp.errors import CheckpointMismatchError
from hardened_ddp.streams.shards import Facts, deal, id_of, shard_order
from hardened_ddp.streams.stream_types import Stream, changes, sizes_of

log = logging.getLogger(__name__)

_KEPT = 32
"""Positions whose facts are kept: those read ahead, and the last step, which may be taken back."""


class ShardSampler:
    """The plan of a stream on one rank. Everything but rank is equal on all ranks."""

    def __init__(
        self,
        stream: Stream,
        *,
        num_replicas: int,
        rank: int,
        seed: int,
        global_batch: int,
        batch_size: int,
        drop_last: bool = False,
        shuffle_block: int = 1,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """shuffle_block: samples are shuffled within so many of a shard. digests: of its files."""
        self.stream = stream
        self.num_shards = stream.num_shards
        self.num_replicas, self.rank, self.seed = num_replicas, rank, seed
        self.global_batch, self.batch_size = global_batch, batch_size
        self.drop_last, self.shuffle_block = drop_last, shuffle_block
        self.digests = dict(digests or {})
        self.sizes = sizes_of(stream)
        """(num_shards,): as the stream says, or as a first epoch has shown."""

        self.length: RunLength | None = None
        """Of the run; it is told when the end of the stream is known."""

        self.is_shared = self.num_shards < num_replicas
        """There are fewer shards than ranks: each rank reads all of them, and keeps its part."""

        self._facts: dict[tuple[int, int], Facts] = {}
        self._end = sys.maxsize
        self.begin_at(Facts.at_start(0, self.sizes))

    @property
    def declares_length(self) -> bool:
        """Whether the stream itself says how many samples it has."""
        return getattr(self.stream, "sizes", None) is not None

    @property
    def knows_sizes(self) -> bool:
        """Whether the samples of an epoch are known."""
        return bool((self.sizes >= 0).all())

    @property
    def size(self) -> int:
        """Samples of an epoch; 0 if they are not known."""
        return int(self.sizes.sum()) if self.knows_sizes else 0

    @property
    def end(self) -> int:
        """Cursor at which this epoch is done; more than any cursor if it is not known."""
        return self._end

    @property
    def num_windows(self) -> int:
        """Optimizer steps per epoch, if the sizes are known."""
        full, rest = divmod(self.size, self.global_batch)
        return full + (rest > 0 and not (self.drop_last and full > 0))

    def steps_left(self, epoch: int, cursor: int, *, epochs: int) -> int | None:
        """Return the steps from a position to the end of so many epochs; None: not known."""
        if not (self.knows_sizes and self.facts_at(epoch, cursor).knows_ends):
            return None
        full, rest = divmod(max(0, self.size - cursor), self.global_batch)
        here = full + (rest > 0 and not (self.drop_last and (full > 0 or cursor > 0)))
        return max(0, here + (epochs - epoch - 1) * self.num_windows)

    def next_ids(self, epoch: int, cursor: int) -> list[int]:
        """Return the samples of the step at a position, over all ranks, as far as is known."""
        facts = self.facts_at(epoch, cursor)
        turns = deal(facts, shard_order(self.seed, epoch, self.num_shards), self.global_batch)
        pairs = zip(turns.shards.tolist(), turns.indices.tolist(), strict=True)
        return [id_of(shard, index, self.num_shards) for shard, index in pairs]

    def ledger_facts(self) -> dict[str, int]:
        """Return what a ledger has to know about the order."""
        return {"num_shards": self.num_shards}

    def facts_at(self, epoch: int, cursor: int) -> Facts:
        """Return the facts at a position that was just reached, or that begins an epoch."""
        found = self._facts.get((epoch, cursor))
        if found is None and cursor == 0:
            return Facts.at_start(epoch, self.sizes)
        if found is None:
            raise KeyError(f"epoch {epoch}, sample {cursor} of a stream was never reached")
        return found

    def reach(self, facts: Facts) -> None:
        """Note facts that a step leads to. The same on all ranks."""
        self._facts[facts.epoch, facts.cursor] = facts
        if self._end == sys.maxsize and facts.knows_ends:
            self._end = int(facts.ends.sum())
        while len(self._facts) > _KEPT:
            del self._facts[next(iter(self._facts))]

    def begin_at(self, facts: Facts) -> None:
        """Go to a position: the epoch's end is what these facts say of it."""
        self._end = sys.maxsize
        if facts.knows_ends:
            total = int(facts.ends.sum())
            rest = (total - facts.cursor) % self.global_batch if self.drop_last else 0
            self._end = total - (rest if total - rest > 0 else 0)
        self.reach(facts)

    def end_at(self, facts: Facts, *, last_step: int, epochs: int) -> None:
        """Note that an epoch ends at facts: what was met is now known. last_step counts it too."""
        self._end = facts.cursor
        if facts.is_over:
            self.sizes = facts.ends.copy()
        if self.length is not None and self.knows_sizes:
            self.length.learn(last_step + max(0, epochs - facts.epoch - 1) * self.num_windows)

    def as_json(self, epoch: int, cursor: int) -> dict[str, Any]:  # Any: JSON
        """Return what a checkpoint at this position holds."""
        return {
            "facts": self.facts_at(epoch, cursor).as_json(),
            "sizes": self.sizes.tolist(),
            "identity": self._identity(),
            "digests": self.digests,
        }

    def problems_with(self, saved: Mapping[str, Any] | None) -> list[str]:  # Any: JSON
        """Describe how the stream differs from that of a checkpoint; empty: it does not."""
        if saved is None:
            return ["dataset: the checkpoint is of a map-style dataset, and this one is a stream"]
        here, before = self._identity(), saved["identity"]
        found = [
            f"{name}: the checkpoint has {before.get(name)}, this run {value}: the order of the "
            "stream's samples would change"
            for name, value in here.items()
            if before.get(name) != value
        ]
        changed = changes(saved["digests"], self.digests)
        if changed:
            more = f", and {len(changed) - 4} more" if len(changed) > 4 else ""
            found.append(
                f"since the checkpoint, of the stream's files {', '.join(changed[:4])}{more}"
            )
        return found

    def restore(self, saved: Any, *, epoch: int, cursor: int) -> None:  # Any: JSON
        """Go to the position of a checkpoint. Raises CheckpointMismatchError if it is none."""
        facts = Facts.from_json(saved["facts"])
        if (facts.epoch, facts.cursor) != (epoch, cursor) or len(facts.ends) != self.num_shards:
            raise CheckpointMismatchError(
                f"the checkpoint says epoch {epoch}, sample {cursor}, and its facts of the stream "
                f"say epoch {facts.epoch}, sample {facts.cursor}",
                fix="resume from another checkpoint: --resume PATH",
            )
        self.sizes = np.array(saved["sizes"], dtype=np.int64)
        self._facts.clear()
        self.begin_at(facts)

    def _identity(self) -> dict[str, int]:
        return {
            "num_shards": self.num_shards,
            "seed": self.seed,
            "shuffle_block": self.shuffle_block,
        }
