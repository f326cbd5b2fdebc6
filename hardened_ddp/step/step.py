"""One optimizer step: forward, backward, all-reduce, update. A good step reads from do() down.

Gradients are summed in one of two ways. Overlapped: DDP's hooks send them while backward still
runs. Local: they stay on the rank, and are summed after backward, with a mark of each rank that
failed; between CPU ranks of one machine that is the faster way, and it also serves steps in which
some rank has no sample. In both the sums themselves tell all ranks of a failure: no extra message.

What happens when a rank fails is in retry.py. On GPUs that is known one step later: late.py.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from hardened_ddp.checkpoint.disk import Disk, sync_files
from hardened_ddp.data.batch import Batch, split
from hardened_ddp.data.ledger import LedgerWriter
from hardened_ddp.data.sampler import Window, WindowSampler
from hardened_ddp.errors import ANY_FAILURE, HardenedError
from hardened_ddp.model.optimizer_state import is_known
from hardened_ddp.model.precision import clip
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.seeding import seed_step, seed_update
from hardened_ddp.step import mean
from hardened_ddp.step.attempt import Attempt, Outcome
from hardened_ddp.step.boundary import Boundaries
from hardened_ddp.step.failure import BAD_SUM, Failure, LossNotFinite, explain_failure
from hardened_ddp.step.late import Flag
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress, Totals
from hardened_ddp.step.retry import StepRetry

log = logging.getLogger(__name__)


class ReadsWeights(Protocol):
    """What may still read the weights of the last step: a checkpoint write under way."""

    reads_weights: bool

    def before_update(self) -> None:
        """Wait until the weights may change."""


class Stepper:
    """Does optimizer steps with the parts of a run, and adds up their losses."""

    def __init__(
        self,
        parts: Parts,
        progress: Progress,
        *,
        left_out: LeftOut,
        saver: ReadsWeights,
    ) -> None:
        self.parts = parts
        self.progress = progress
        self.totals = Totals(parts.task, parts.device)
        self.left_out = left_out
        self.retry = StepRetry(self)
        behind = parts.runs_behind
        self.boundaries = Boundaries(parts, progress, self.totals) if behind else None
        """Which update the device has finished; None: the host runs each one itself."""

        self.unread: Attempt | None = None
        """The last step, as long as its flag has not been read."""

        self.grad_norm: torch.Tensor | None = None
        """The gradient's norm in the last reported step."""

        self.batch: Batch | None = None
        """The current micro-batch, for a message about a hang in it."""

        self.is_whole = True
        """Weights and optimizer state are those of a step boundary: not half updated."""

        self.commit_lock = threading.Lock()
        """Held while weights and progress change: a thread that holds it sees a whole step."""

        self.buffers_before: Sequence[torch.Tensor | None] | None = None
        """The moving buffers at the last step boundary, before a forward under way changed them.
        None: no forward is under way."""

        self.has_unread_totals = False
        """Steps were done since read_totals. The same on all ranks."""

        self.last_good = -1
        """The last step that succeeded. The same on all ranks."""

        config = parts.config
        self._saver = saver
        self._ledger: LedgerWriter | None = None
        self._tracker = parts.group.tracker
        self._counts_samples = parts.task.counts_samples
        self._is_late = parts.looks_late
        self._watches_loss = parts.watches_loss
        self._checks_sums = parts.checks_loss or config.loop.continue_on_error or self._is_late
        self._moves_batches = parts.device.type != "cpu" or parts.replica.channels_last
        self._schedule = parts.schedule
        self._seeds_update = not is_known(parts.optimizer)
        parts.replica.buffers.note_bits()

    def do(self, window: Window, batches: Sequence[Batch]) -> Outcome:
        """Train on this rank's batches of window, and commit it. Collective: all ranks.

        On a GPU the step may still be taken back by the next one or by settle. Raises SampleError,
        OutOfMemoryError, NonFiniteError, StepError or PeerLostError, each naming rank, step, phase
        and samples; then nothing of the step is committed.
        """
        progress = self.progress
        if self._ledger is not None:
            ids = [batch.indices.numpy() for batch in batches]
            self._ledger.bring(progress.step, progress.epoch, ids)
        if self.unread is not None and not self._overlaps(window):
            self.settle()  # collective
        attempt = self._sum_gradient(window, batches)  # collective
        if self.unread is not None and self._is_bad(self.unread):
            self.settle()  # collective
            attempt = self._sum_gradient(window, batches)  # collective
        self.commit(attempt)
        self._tracker.end_step(progress.step)
        if self.unread is not None and self._is_read_next(window):
            self.settle()  # collective
        return attempt.outcome

    def _sum_gradient(self, window: Window, batches: Sequence[Batch]) -> Attempt:
        """Compute the gradient of a step and sum it over the ranks. Collective: all ranks."""
        parts = self.parts
        # What a retry restores: forward changes the buffers, and adds to the losses.
        self.buffers_before = buffers = parts.replica.copy_buffers(batches)
        attempt = Attempt(window, batches, buffers, self.totals.mark())
        if parts.replica.attributes.watched:
            attempt.attributes = parts.replica.attributes.begin_step()
        if parts.precision.scaler is not None:
            attempt.scale_before = parts.precision.mark()
        if self._schedule.has_state:
            attempt.schedule_before = self._schedule.mark()
        if self.boundaries is not None:
            self.boundaries.begin(attempt)
        with self.explained(attempt):
            overlaps = self._overlaps(window)
            attempt.failure = self.run_once(attempt, keep_local=not overlaps)  # collective
            if not self.sum_up(attempt, overlaps=overlaps):  # collective
                self.retry.until_done(attempt)  # collective
        return attempt

    def run_once(self, attempt: Attempt, *, keep_local: bool) -> Failure | None:
        """Run forward and backward on this rank's samples; return how that failed, or None.

        Rank-local if keep_local; else its backward is collective.
        """
        parts, progress = self.parts, self.progress
        rank, batches = parts.group.launch.rank, attempt.batches
        if not keep_local and parts.replica.buckets is not None:
            parts.replica.buckets.begin()
        if (bad := [sample for batch in batches for sample in batch.bad]) or progress.most_samples:
            if bad and not parts.config.loop.continue_on_error:
                text = f"rank {rank} can't read sample {bad[0].name}: {bad[0].error}"
                return Failure("sample", text)
            batches = split(batches, progress.most_samples)
        if not self._schedule.is_constant:
            self._schedule.begin_step(progress.step)
        seed = parts.config.device.seed
        seed_step(seed, step=progress.step, rank=rank, device_type=parts.device.type)
        try:
            if self.retry.is_close:
                self.retry.run_watched(attempt, batches)
            else:
                self.forward_backward(attempt, batches, keep_local=keep_local)
        except ANY_FAILURE as error:  # WHY broad: whatever it is, the other ranks must learn of it
            return self.retry.failure_of(error, batches)
        parts.replica.note_written()
        expects_all = not parts.replica.looks_for_unused
        if expects_all and attempt.window.is_for_all(parts.group.world_size):
            names = parts.replica.parameters_without_gradient()
            return self.retry.unused_failure(names) if names else None
        return None

    def forward_backward(
        self, attempt: Attempt, batches: Sequence[Batch], *, keep_local: bool
    ) -> None:
        """Run micro-batches forward and backward; the last backward averages unless keep_local.

        Losses are sums, divided by the samples of the whole step: so accumulation, a short last
        step and uneven shares all give the gradient of one big batch. If the loss is a mean over
        something else, such as tokens, sum_up divides by that.
        """
        parts, replica, tracker = self.parts, self.parts.replica, self._tracker
        ddp = replica.ddp
        # DDP also divides its sum by world_size: undone here.
        is_divided = not keep_local and replica.averages
        size = attempt.window.size
        divisor = size if self._counts_samples else mean.divisor(size)
        scale = (parts.group.world_size if is_divided else 1) / divisor
        scaler = parts.precision.scaler  # fp16's; else None
        attempt.count = 0.0
        for index, batch in enumerate(batches):
            if replica.copies_inputs:
                batch = batch.copied()
            if self._moves_batches:
                batch = batch.to(parts.device, channels_last=replica.channels_last)
            is_synced = index == len(batches) - 1 and not keep_local
            self.batch = batch
            tracker.enter(Phase.FORWARD)
            with contextlib.nullcontext() if is_synced or ddp is None else ddp.no_sync():
                with parts.precision.autocast():
                    output = parts.task.forward(replica.call, batch)
                    score = parts.task.score(output, batch)
                    del output  # WHY: backward frees what it needs; the caller's would stay
                attempt.count = attempt.count + score.count
                if is_synced and replica.buckets is not None:
                    replica.buckets.count = attempt.count
                if self._watches_loss and not math.isfinite(value := score.loss_sum.item()):
                    raise LossNotFinite(f"the loss is {value}")
                tracker.enter(Phase.BACKWARD)
                loss = score.loss_sum if scaler is None else scaler.scale(score.loss_sum)
                # WHY not loss * scale: where backward starts, a factor needs no operation.
                factor = torch.full_like(loss, scale)
                loss.backward(factor)  # type: ignore[no-untyped-call]  # collective if is_synced
            self.totals.add(score, len(batch.indices))
        self.batch = None
        tracker.enter(Phase.OPTIMIZER)

    def sum_up(self, attempt: Attempt, *, overlaps: bool) -> bool:
        """Sum a gradient over the ranks, and make it that of a mean. Collective: all ranks.

        False: some rank failed, or the sum is not finite. The same on all ranks.
        """
        replica, size = self.parts.replica, attempt.window.size
        if overlaps:
            counts = self._end_overlapped(attempt)  # collective
            if counts is None:
                return False
            num_valid, count = counts
        else:
            has_failed = attempt.failure is not None
            num_here = float(sum([len(batch.indices) for batch in attempt.batches]))
            count_here = 0.0 if has_failed else float(attempt.count)
            # Sent with the gradients: a mark of each rank that failed, the samples, what counts.
            marks = replica.sum_gradients([float(has_failed), num_here, count_here])  # collective
            if marks[0] > 0:
                return False
            num_valid, count = int(marks[1]), marks[2]
        is_checked = attempt.flag is None and (self._checks_sums or self.retry.is_close)
        # WHY not with a scaler: it handles an overflow of fp16 itself.
        if is_checked and self.parts.precision.scaler is None and not replica.has_finite_sums():
            attempt.failure = Failure("not finite", BAD_SUM)
            return False
        if num_valid < size:
            self.left_out.add(attempt.batches, "", self.progress)  # collective
            if not num_valid:
                self.undo(attempt)
                attempt.outcome = Outcome.LEFT_OUT
                return True
            if self._counts_samples:
                replica.scale_gradients(size / num_valid)
        if attempt.flag is None and not self._counts_samples:  # with a flag: done on the device
            mean.divide(replica, attempt, count, step=self.progress.step)
        if replica.attributes.shared and self.parts.group.world_size > 1:
            is_even = self._is_even(attempt.window) and num_valid == size
            replica.attributes.equalize(self.parts.group, is_even=is_even)  # collective
        if attempt.outcome is Outcome.DONE:
            if replica.buffers.names:
                replica.sync_buffers()  # collective
            self.last_good = self.progress.step
            self.retry.given_up.clear()
        return True

    def _end_overlapped(self, attempt: Attempt) -> tuple[int, float] | None:
        """Complete this rank's part in DDP's sums; None: some rank failed. Collective: all ranks.

        Returns how many samples of the step, over all ranks, are in the sums, and what counts in
        them. On a GPU it is known later what counts, and whether a rank failed: then attempt gets a
        flag, which is also up if nothing counts.
        """
        replica, buckets = self.parts.replica, self.parts.replica.buckets
        size = attempt.window.size
        has_failed = attempt.failure is not None
        if has_failed:
            self.retry.stand_in(attempt)  # collective
        if self._is_late and (buckets is None or not buckets.are_old):
            is_bad = replica.is_gradient_bad(has_failed)
            if not has_failed and not self._counts_samples:
                is_bad = mean.divide_on_device(replica, attempt.count, is_bad, num_samples=size)
            attempt.flag = Flag(is_bad)
            attempt.loss_after = self.totals.loss_sum.clone()
            if has_failed and buckets is not None:
                buckets.disarm()
            return size, 0.0
        if buckets is None:
            count = 0.0 if self._counts_samples else replica.sum_count(attempt.count)  # collective
            return size, count
        if buckets.some_rank_failed(has_failed):  # collective
            buckets.reset()
            return None
        buckets.renew()  # collective
        return size, 0.0 if self._counts_samples else float(buckets.total())

    def commit(self, attempt: Attempt) -> None:
        """Update weights and progress. Rank-local: every rank has the same gradient."""
        if self.boundaries is not None:
            with self.explained(attempt):
                self.boundaries.before_update(attempt)
        with self.explained(attempt), self.commit_lock:
            if attempt.outcome is Outcome.DONE:
                self._update(attempt)
            if self._schedule.has_state:
                self._end_schedule_step()
            self.progress.commit(attempt.window)
            self.buffers_before = None
            if attempt.attributes:
                self.parts.replica.attributes.end_step()
            if self.boundaries is not None:
                self.boundaries.after_update(attempt)
            self.unread = attempt if attempt.flag is not None else None
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.has_unread_totals = True

    def _update(self, attempt: Attempt) -> None:
        """Unscale, clip, update the weights. Every rank has the same gradients."""
        parts = self.parts
        max_norm = parts.config.optimizer.clip_grad_norm
        is_reported = is_due(self.progress.step + 1, parts.config.loop.log_interval)
        if is_reported and attempt.failure is None:
            self.retry.name_unused()
        if self._is_late:
            flag = None if attempt.flag is None else attempt.flag.on_device
            parts.precision.leave_out(parts.optimizer, flag)
        if max_norm > 0 or is_reported:
            parts.precision.unscale(parts.optimizer)
            self.grad_norm = clip(parts.replica.trainable.values(), max_norm=max_norm)
        if self._saver.reads_weights:
            self._saver.before_update()
        self.is_whole = False
        if self._seeds_update:
            seed, step = parts.config.device.seed, self.progress.step
            seed_update(seed, step=step, device_type=parts.device.type)
        if (scaler := parts.precision.scaler) is None:
            parts.optimizer.step()
        else:  # skips it on all ranks alike if the gradient overflowed
            scaler.step(parts.optimizer)
            scaler.update()
        self.is_whole = True

    def _end_schedule_step(self) -> None:
        """Step the scheduler object, also after a step that was left out: it counts steps."""
        if self._saver.reads_weights:
            self._saver.before_update()
        self.is_whole = False
        if self.progress.step + 1 < self.parts.length.total:  # WHY: torch's may end with the run
            self._schedule.end_step()
        self.is_whole = True

    def _overlaps(self, window: Window) -> bool:
        """Return whether gradients are sent within backward. The same on all ranks."""
        parts, world_size = self.parts, self.parts.group.world_size
        if parts.config.loop.continue_on_error:
            return False  # the sum after backward counts the samples that are left out
        can = parts.replica.can_overlap if world_size > 1 else self._is_late
        return can and window.is_for_all(world_size)

    def _is_even(self, window: Window) -> bool:
        """Return whether each rank has as many samples of it. The same on all ranks."""
        is_cut_evenly = isinstance(self.parts.sampler, WindowSampler)  # a stream's shards may end
        return is_cut_evenly and not window.size % self.parts.group.world_size

    def _is_read_next(self, window: Window) -> bool:
        """Return whether the loss or the weights of this step are read before the next one."""
        parts, step = self.parts, self.progress.step
        is_last = step >= parts.length.total or window.stop >= parts.sampler.end
        is_compared = is_due(step, parts.compares_every)
        return is_last or is_compared or is_due(step, parts.config.loop.log_interval)

    def settle(self) -> None:
        """Read the flag of the last step; do the step again if it was bad. Collective: all ranks.

        Call it before weights, losses or progress are used for anything but the next step.
        """
        attempt, self.unread = self.unread, None
        if attempt is None or not self._is_bad(attempt):
            return
        with self.commit_lock:
            self.undo(attempt)
            self.take_back_on_host(attempt)
            self.buffers_before = attempt.buffers
            self.progress.take_back(attempt.window)
            if self.boundaries is not None:
                self.boundaries.take_back(attempt)
        with self.explained(attempt):
            self.retry.do_again(attempt)  # collective
        self.commit(attempt)

    def _is_bad(self, attempt: Attempt) -> bool:
        """Return whether a step must be done again. Waits for the device."""
        # WHY: this rank may wait here for another one that has not joined an all-reduce
        with self._tracker.within(Phase.ALL_REDUCE):
            return attempt.is_bad()

    def undo(self, attempt: Attempt) -> None:
        """Undo what forward and backward have changed. Rank-local."""
        self.parts.replica.put_back_buffers(attempt.buffers)
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.totals.go_back(attempt.totals_before)
        self.parts.replica.attributes.put_back(attempt.attributes)

    def lost(self, *, reads_bits: bool = True) -> list[str]:
        """Name what a forward under way changed, and nobody has as it was. Rank-local.

        reads_bits: look also at the values of what is believed still; waits for the device.
        """
        replica, is_under_way = self.parts.replica, self.buffers_before is not None
        if is_under_way:
            replica.note_written(reads_bits=reads_bits)
        return replica.unsafe(num_forwards=is_under_way + self.parts.runs_behind)

    def take_back_on_host(self, attempt: Attempt) -> None:
        """Undo what a commit without an update has changed besides the tensors. Rank-local."""
        self.parts.precision.go_back(attempt.scale_before)
        self._schedule.go_back(attempt.schedule_before)
        self.parts.replica.attributes.put_back(attempt.attributes)

    @contextlib.contextmanager
    def explained(self, attempt: Attempt) -> Iterator[None]:
        """Undo the changes of a step that fails, and name the step in the error."""
        try:
            yield
        except ANY_FAILURE as error:
            if self.is_whole:
                self.parts.replica.note_written()
                self.parts.replica.put_back_buffers(attempt.buffers)
                self.parts.replica.attributes.put_back(attempt.attributes)
            if isinstance(error, HardenedError):
                raise
            samples = [int(index) for batch in attempt.batches for index in batch.indices]
            step, phase = self.progress.step, self._tracker.work
            raise explain_failure(
                error, self.parts.group, step=step, phase=phase, samples=samples
            ) from error

    def end_epoch(self) -> None:
        """Go to the start of the next epoch, if this one is over. Rank-local."""
        with self.commit_lock:
            self.progress.end_epoch(self.parts.sampler.end)

    def read_totals(self) -> dict[str, float]:
        """Return mean loss and metrics since the last reading, and reset them. Collective."""
        self.settle()  # collective
        sums = self.totals.read(self.parts.group)  # collective
        self.totals.reset()
        self.has_unread_totals = False
        return sums

    def is_finite(self) -> bool:
        """Return whether losses since the last reading, and the last gradient, are finite.

        Rank-local; waits for the device. WHY: a checkpoint of weights with NaN would replace a
        good one.
        """
        is_bad = self.unread is not None and self.unread.is_bad()
        return not is_bad and math.isfinite(self.totals.loss())

    def open_ledger(self, folder: Path) -> None:
        """Record in the ledger from now on which samples each step takes. Collective: all ranks."""
        if self._ledger is not None:
            self._ledger.close()
        self._ledger = self.parts.open_ledger(folder, step=self.progress.step)  # collective
        if self._ledger is not None:
            self.left_out.begin(self._ledger.start)

    def sync_records(self) -> None:
        """Have on the disk what is recorded of the steps that are done. Any thread, any rank.

        Raises OSError.
        """
        self.left_out.write(is_synced=True)
        if self._ledger is not None and (files := self._ledger.files()):
            sync_files(files[0].parent, files, disk=Disk())

    def close_ledger(self) -> None:
        """Write what a full disk did not take, or say that it is lost. Rank-local."""
        if self._ledger is not None:
            self._ledger.close()

    @contextlib.contextmanager
    def changing_state(self) -> Iterator[None]:
        """Keep other threads out while a state is loaded; if that fails, no state is saved."""
        with self.commit_lock:
            self.is_whole = False
            yield
            self.is_whole = True

    def start_over(self) -> None:
        """Reset everything that depends on steps after the loaded state. Rank-local."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.totals.reset()
        self.has_unread_totals = False
        self.buffers_before = None
        self.parts.replica.buffers.note_bits()
        self.last_good = -1
        self.unread = None
        if self.boundaries is not None:
            self.boundaries.forget()
        self.retry.given_up.clear()


def is_due(count: int, every: int | None) -> bool:
    """Return whether count is a multiple of every; every 0 or None: never."""
    return every is not None and every > 0 and count % every == 0
