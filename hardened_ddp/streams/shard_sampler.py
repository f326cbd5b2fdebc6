"""Which samples of a stream each step takes, with the interface of a WindowSampler.

Owns where the epoch ends, as soon as that is known, and the last positions: what a checkpoint
needs; and which settings a stream can't have. Does not own: the plan (planner.py), reading it
(shard_loader.py).
"""

import logging
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from hardened_ddp.data.batches.sampler import UNKNOWN_STEPS, RunLength
from hardened_ddp.errors import CheckpointMismatchError, ConfigError, DataError
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.settings.config import EACH_ONCE, Config, DataConfig
from hardened_ddp.settings.wording import listed
from hardened_ddp.streams.contract import Stream, changes, sizes_of
from hardened_ddp.streams.planner import StreamPosition, deal, id_of, shard_order

log = logging.getLogger(__name__)

_KEPT = 32  # positions that are kept: those read ahead, and the last step, which may be taken back


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
        # (num_shards,): as the stream says, or as a first epoch has shown.
        self.sizes = sizes_of(stream)
        self.declares_length = self.knows_sizes  # the stream itself says how many samples it has

        # Of the run; it is told when the end of the stream is known.
        self.length: RunLength | None = None

        # There are fewer shards than ranks: each rank reads all of them, and keeps its part.
        self.is_shared = self.num_shards < num_replicas
        self._positions: dict[tuple[int, int], StreamPosition] = {}
        # Cursor at which this epoch is done; more than any cursor if it is not known.
        self.end = sys.maxsize
        self.begin_at(StreamPosition.at_start(0, self.sizes))

    @property
    def knows_sizes(self) -> bool:
        """Whether the samples of an epoch are known."""
        return bool((self.sizes >= 0).all())

    @property
    def size(self) -> int:
        """Samples of an epoch; 0 if they are not known."""
        return int(self.sizes.sum()) if self.knows_sizes else 0

    @property
    def num_windows(self) -> int:
        """Optimizer steps per epoch, if the sizes are known."""
        full, rest = divmod(self.size, self.global_batch)
        return full + (rest > 0 and not (self.drop_last and full > 0))

    def steps_left(self, epoch: int, cursor: int, *, epochs: int) -> int | None:
        """Return the steps from a position to the end of so many epochs; None: not known."""
        if not (self.knows_sizes and self.position_at(epoch, cursor).knows_ends):
            return None
        full, rest = divmod(max(0, self.size - cursor), self.global_batch)
        here = full + (rest > 0 and not (self.drop_last and (full > 0 or cursor > 0)))
        return max(0, here + (epochs - epoch - 1) * self.num_windows)

    def next_ids(self, epoch: int, cursor: int) -> list[int]:
        """Return the samples of the step at a position, over all ranks, as far as is known."""
        position = self.position_at(epoch, cursor)
        turns = deal(position, shard_order(self.seed, epoch, self.num_shards), self.global_batch)
        pairs = zip(turns.shards.tolist(), turns.indices.tolist(), strict=True)
        return [id_of(shard, index, self.num_shards) for shard, index in pairs]

    def ledger_facts(self) -> dict[str, int]:
        return {"num_shards": self.num_shards}

    def position_at(self, epoch: int, cursor: int) -> StreamPosition:
        """Return the position at a cursor that was just reached, or that begins an epoch."""
        found = self._positions.get((epoch, cursor))
        if found is None and cursor == 0:
            return StreamPosition.at_start(epoch, self.sizes)
        if found is None:
            raise KeyError(f"epoch {epoch}, sample {cursor} of a stream was never reached")
        return found

    def reach(self, position: StreamPosition) -> None:
        """Note the position that a step leads to. The same on all ranks."""
        self._positions[position.epoch, position.cursor] = position
        if self.end == sys.maxsize and position.knows_ends:
            self.end = int(position.ends.sum())
        while len(self._positions) > _KEPT:
            del self._positions[next(iter(self._positions))]

    def begin_at(self, position: StreamPosition) -> None:
        """Go to a position: the epoch ends where it says."""
        self.end = sys.maxsize
        if position.knows_ends:
            total = int(position.ends.sum())
            rest = (total - position.cursor) % self.global_batch if self.drop_last else 0
            self.end = total - (rest if total - rest > 0 else 0)
        self.reach(position)

    def end_at(self, position: StreamPosition, *, last_step: int, epochs: int) -> None:
        """Note that an epoch ends here: its length is now known. last_step: the steps with it."""
        self.end = position.cursor
        if position.is_over:
            self.sizes = position.ends.copy()
        if self.length is not None and self.knows_sizes:
            self.length.learn(last_step + max(0, epochs - position.epoch - 1) * self.num_windows)

    def as_json(self, epoch: int, cursor: int) -> dict[str, Any]:  # Any: JSON
        """Return what a checkpoint at this position holds."""
        return {
            "facts": self.position_at(epoch, cursor).as_json(),
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
            found.append(f"since the checkpoint, of the stream's files {listed(changed, 4)}")
        return found

    def restore(self, saved: Any, *, epoch: int, cursor: int) -> None:  # Any: JSON
        """Go to the position of a checkpoint."""
        self.sizes = np.array(saved["sizes"], dtype=np.int64)
        self._positions.clear()
        self.begin_at(StreamPosition.from_json(saved["facts"]))

    def _identity(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("num_shards", "seed", "shuffle_block")}


def build_shard_sampler(
    view: Any,  # a StreamView
    config: DataConfig,
    *,
    launch: Launch,
    saved: Mapping[str, Any] | None,  # Any: the numbers of a checkpoint
    how: Mapping[str, Any],  # Any: numbers and flags
) -> ShardSampler:
    """Build the sampler of a stream, where the checkpoint stands. Rank-local.

    how: what each sampler is given. Raises DataError for a setting that a stream can't have, and
    CheckpointMismatchError if it is not the stream of the checkpoint.
    """
    if config.sampling != EACH_ONCE:
        raise DataError(
            f"--sampling {config.sampling}: {config.dataset} is a stream, which is read in its own "
            "order",
            fix="leave --sampling out, or give a map-style data set",
        )
    block = config.shuffle_block
    sampler = ShardSampler(view.stream, **how, shuffle_block=block, digests=view.digests)
    if config.drop_last and not sampler.declares_length:
        raise DataError(
            "drop_last: which samples of this stream are the last ones is known only after it was "
            "read once",
            fix="leave --drop_last out, or give the stream sizes, the samples of each shard",
        )
    if sampler.is_shared and launch.is_main:
        log.warning(
            "%d shards for %d ranks: each rank reads all samples and trains on its part of them; "
            "from %d shards on, each would read only its own",
            *(sampler.num_shards, launch.world_size, launch.world_size),
        )
    if saved is not None:
        if problems := sampler.problems_with(saved.get("stream")):
            raise CheckpointMismatchError(
                f"the checkpoint of step {saved['step']} belongs to another run: "
                + "; ".join(problems),
                fix="resume with the data and the settings of that run; or start a new run: "
                "without --resume, with another --run_name",
            )
        sampler.restore(saved["stream"], epoch=int(saved["epoch"]), cursor=int(saved["cursor"]))
    return sampler


def length_of_run(
    config: Config,
    saved: Mapping[str, Any] | None,  # Any: the numbers of a checkpoint
    *,
    total: int,
    most: int,
) -> RunLength:
    """Return the length of a run on a stream that does not say how many samples it has.

    total: its steps, as far as they are known. most: the limit max_steps, which is then what the
    learning rate's schedule is stretched over. A run that auto gave a constant rate keeps it, when
    its length is known later, too. Raises ConfigError if the schedule needs a length.
    """
    schedule = config.optimizer.lr_schedule
    if schedule == "auto":
        # WHY as before: where a run continues, its rate must not jump.
        before = None if saved is None else saved.get("lr_schedule")
        schedule = before or ("constant" if most == UNKNOWN_STEPS else "cosine")
        if schedule == "constant":
            return RunLength(total, schedule=UNKNOWN_STEPS, most=most)
    if most == UNKNOWN_STEPS and schedule != "constant":
        raise ConfigError(
            f"lr_schedule {schedule} needs the number of steps, and this stream does not say how "
            "many samples it has",
            fix="--max_steps N, or --lr_schedule constant, or give the stream sizes, the samples "
            "of each shard",
        )
    return RunLength(total, schedule=most, most=most)
