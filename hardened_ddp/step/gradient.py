"""One try at the gradient of a step: this rank's forward and backward, the sum over the ranks.

Losses are sums, divided by the samples of the whole step: so accumulation, a short last step and
uneven shares all give the gradient of one big batch. A loss may also be a mean over something else,
such as tokens. How many of them a step has over all ranks is known only after backward: until then
losses are divided by a power of two near the number of samples, which keeps numbers in range and
costs no precision. What follows from a failure is in retry.py.
"""

import logging
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from hardened_ddp.data.batches.batch import Batch, cut_by_length, split
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.data.batches.sampler import Window, WindowSampler
from hardened_ddp.errors import ANY_FAILURE
from hardened_ddp.gradients.sums import LocalGradients, Marks, Sums
from hardened_ddp.model.moving_attributes import Copies as Attributes
from hardened_ddp.model.moving_buffers import NO_COPIES, Copies
from hardened_ddp.model.replica import Replica
from hardened_ddp.ranks.group import Group, lost_peer
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.failure import (
    BAD_SUM,
    NUM_SHOWN,
    Failure,
    Kind,
    LossNotFinite,
    error_of,
    format_samples,
    in_full,
    is_out_of_memory,
)
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.nonfinite import watch
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress
from hardened_ddp.task.task import LOSS, Score, Task

log = logging.getLogger(__name__)

INPUTS = "the batch"  # in the list of what a forward has written: the samples themselves

# The loss, the sums of the metrics and the number of samples at one moment.
Mark = tuple[torch.Tensor, list[torch.Tensor], int]

# The sum of what the loss is a mean over, among the sums of a task that does not count samples.
COUNT = "count"
_VERSION = operator.attrgetter("_version")  # of a tensor: it grows with each write in place


class Outcome(Enum):
    """The outcome of a step. The same on all ranks."""

    DONE = "done"
    # Given up under --continue_on_error: its samples are skipped, the weights don't change.
    LEFT_OUT = "left out"
    EMPTY = "empty"  # nothing in it counts, such as no valid token: the weights don't change


@dataclass(slots=True)
class Attempt:
    """The current step, and what a retry needs. A launcher's attempt is another thing: a start."""

    window: Window
    batches: Sequence[Batch]
    totals_before: Mark
    buffers: Copies = NO_COPIES  # the moving buffers before it

    # The plain attributes that may move, before it.
    attributes: Attributes = field(default_factory=dict)
    is_reported: bool = True  # losses and metrics are read after it
    after_forward: Callable[[], None] | None = None  # called when the first forward is queued

    # Called when this rank's gradients are computed, before the last of them are sent.
    when_computed: Callable[[], None] | None = None

    # Scale and growth tracker of fp16's scaler before it. Any: from Precision.mark.
    scale_before: Any = ()

    # The state of the schedule before it, if it has one. Any: from Schedule.mark.
    schedule_before: Any = None
    outcome: Outcome = Outcome.DONE
    failure: Failure | None = None  # how this rank failed in it
    searches_for_nan: bool = False  # the next try searches the module that gives NaN or inf first

    # What counts in this rank's samples, such as valid tokens. On the device.
    count: float | torch.Tensor = 0.0
    losses: list[torch.Tensor] = field(default_factory=list)  # of this rank's micro-batches
    norm: float | torch.Tensor = math.nan  # of the gradient, before it was clipped; NaN: not known


class Writes:
    """What a forward writes that was not known to move, told by the versions of tensors."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._still: Sequence[torch.Tensor] = ()
        self._watched: Sequence[torch.Tensor] = ()  # these and the inputs
        self._versions: list[int] = []
        # What the last two forwards were the first to write: nothing can put it back.
        self._unsafe: deque[list[str]] = deque([[], []], maxlen=2)

    def begin(self, batches: Sequence[Batch]) -> None:
        """Note the versions of all that is believed still, before a forward of batches.

        What was written since the last forward, as by a hook of the optimizer, does move: taken up.
        """
        inputs = [part for batch in batches for part in (batch.inputs, batch.targets)]
        if not all([isinstance(part, torch.Tensor) for part in inputs]):
            inputs = list(tensors_of(inputs))
        if self._replica.inputs.are_copied:
            inputs = []
        buffers, before = self._replica.buffers, self._still
        self._still = buffers.watched
        if before is self._still:  # nothing was taken up or loaded
            num, old = buffers.num_free, self._versions
            now = list(map(_VERSION, before[:num]))
            if now != old[:num]:
                pairs = zip(before, now, old, strict=False)
                written = [tensor for tensor, new, old in pairs if new != old]
                # unsafe for the last step, whose update an asynchronous device may take back
                self._unsafe[-1] += buffers.take_up_written(written)
                self._still = buffers.watched
        self._watched = [*self._still, *[part for part in inputs if not part.is_inference()]]
        self._versions = list(map(_VERSION, self._watched))
        self._unsafe.append([])

    def note(self, *, reads_bits: bool = False) -> None:
        """Take up what was written since begin, and was not known to be. Rank-local.

        Call it before the update, which writes the weights. reads_bits: look also at the values of
        what is believed still, some of which was perhaps written long ago; waits for the device.
        """
        now = list(map(_VERSION, self._watched))
        if now != self._versions:
            pairs = zip(self._watched, now, self._versions, strict=True)
            written = [tensor for tensor, new, old in pairs if new != old]
            in_model = {id(tensor) for tensor in self._replica.buffers.watched}
            if not all(id(tensor) in in_model for tensor in written):
                self._replica.inputs = replace(self._replica.inputs, are_copied=True)
                self._unsafe[-1].append(INPUTS)
            self._unsafe[-1] += self._replica.buffers.take_up_written(written)
            self._watched, self._versions = (), []
        if reads_bits:
            self._unsafe[-1] += self._replica.buffers.changed_bits()

    def unsafe(self, *, num_forwards: int) -> list[str]:
        """Name what the last forwards wrote, and nothing can put back. Rank-local."""
        last = list(self._unsafe)[len(self._unsafe) - num_forwards :]
        return [name for names in last for name in names]


class Gradient:
    """Computes gradients of steps, and adds up the losses."""

    def __init__(self, parts: Parts, progress: Progress, *, left_out: LeftOut) -> None:
        self.parts = parts
        self.progress = progress
        self.totals = Totals(parts.task, parts.device)
        self.left_out = left_out
        self.batch: Batch | None = None  # the current micro-batch, for a message about a hang in it
        self.writes = Writes(parts.replica)
        config = parts.config.loop
        # A step in which a rank failed is tried again. WHY not with collectives in forward: a rank
        # that fails there leaves the others in them.
        self.retries = config.step_retry == "on" and not parts.replica.collectives
        self._leaves_out = config.continue_on_error
        self._counts_samples = parts.task.counts_samples
        # WHY not before backward with collectives in forward: the other ranks wait there
        self._watches_loss = parts.checks_loss and not parts.replica.collectives
        checks_late = parts.checks_one_step_late
        self._checks_sums = parts.checks_loss or self._leaves_out or checks_late
        self._moves_batches = parts.device.type != "cpu" or parts.replica.inputs.channels_last

    def run(self, attempt: Attempt, *, is_retry: bool) -> Failure | None:
        """Run forward and backward on this rank's samples; return how that failed, or None.

        Rank-local if is_retry; else its backward may be collective.
        """
        parts, progress = self.parts, self.progress
        rank, batches = parts.group.launch.rank, attempt.batches
        # WHY local too if samples may be left out: the sum after backward counts those that are not
        parts.gradients.begin(
            attempt.window,
            keeps_local=is_retry or self._leaves_out,
            when_computed=attempt.when_computed,
        )
        bad = [sample for batch in batches for sample in batch.bad]
        if bad and not self._leaves_out:
            what = f"can't read sample {bad[0].name}: {bad[0].error}"
            return Failure("sample", f"{self.where()}, {Phase.DATA.label}: {what}")
        if bad or progress.max_micro_batch:
            batches = split(batches, progress.max_micro_batch)
        if not parts.schedule.is_constant:
            parts.schedule.begin_step(progress.step)
        seed = parts.config.device.seed
        seed_step(seed, step=progress.step, rank=rank, device_type=parts.device.type)
        try:
            if least := parts.replica.inputs.least_padding:
                ignored = parts.task.ignore_index  # type: ignore[attr-defined]  # it is Tokens
                batches = [p for batch in batches for p in cut_by_length(batch, ignored, least)]
            if attempt.searches_for_nan:
                self._find_nan(attempt, batches)
            else:
                self._forward_backward(attempt, batches)
        except ANY_FAILURE as error:  # WHY broad: whatever it is, the other ranks must learn of it
            return self._failure_of(error, batches)
        self.writes.note()
        gradients = parts.gradients
        has_all = all(p.grad is not None for p in gradients.local.parameters)
        is_enough = has_all or gradients.allows_unused
        if not is_enough and attempt.window.is_for_all(parts.group.world_size):
            names = [n for n, p in gradients.local.by_name.items() if p.grad is None]
            some = f"{', '.join(names[:NUM_SHOWN])} ({len(names)} in all)"
            where = f"{self.where()}, {Phase.BACKWARD.label}"
            return Failure("unused", f"{where}: no gradient came for {some}")
        return None

    def reduce(self, attempt: Attempt, *, on_device: bool) -> Sums | None:
        """Sum a gradient over the ranks, scaled to that of the mean loss. Collective: all ranks.

        None: some rank failed, or the gradient is not finite. The same on all ranks. on_device: the
        device may be the first to know that, see Sums.is_bad.
        """
        parts, window, failure = self.parts, attempt.window, attempt.failure
        gradients = parts.gradients
        if failure is not None and not gradients.send_nan_for_rest():  # collective
            raise error_of(failure.kind, failure.text)
        mine = Marks(
            has_failed=failure is not None,
            num_samples=sum([len(batch.indices) for batch in attempt.batches]),
            count=attempt.count,
        )
        sums = gradients.finish(mine, window=window, on_device=on_device)  # collective
        if sums is None:
            return None
        is_checked = self._checks_sums or attempt.searches_for_nan
        # WHY not with a scaler: it handles an overflow of fp16 itself
        is_checked = is_checked and parts.precision.scaler is None
        is_known = sums.are_finite or sums.is_bad is not None
        if is_checked and not is_known and not gradients.local.are_finite():
            attempt.failure = Failure("not finite", BAD_SUM)
            return None
        if sums.num_samples < window.size:
            self.left_out.add(attempt.batches, "", self.progress)  # collective
            if not sums.num_samples:
                self.undo(attempt)
                attempt.outcome = Outcome.LEFT_OUT
                return sums
            if self._counts_samples:
                gradients.local.scale(window.size / sums.num_samples)
        if sums.is_bad is None and not self._counts_samples:  # else it is done on the device
            self._divide_by_count(attempt, float(sums.count))
        if parts.replica.attributes.shared and parts.group.world_size > 1:
            # each rank has as many samples of it; a stream's shards may end on some
            is_even = isinstance(parts.sampler, WindowSampler) and sums.num_samples == window.size
            is_even = is_even and window.size % parts.group.world_size == 0
            parts.replica.attributes.equalize(parts.group, is_even=is_even)  # collective
        if attempt.outcome is Outcome.DONE and parts.replica.buffers.names:
            parts.replica.buffers.equalize(parts.group)  # collective
        return sums

    def undo(self, attempt: Attempt) -> None:
        """Undo what forward and backward have changed. Rank-local."""
        self.parts.replica.buffers.put_back(attempt.buffers)
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.totals.go_back(attempt.totals_before)
        self.parts.replica.attributes.put_back(attempt.attributes)

    def lost(self, *, is_under_way: bool = True, reads_bits: bool = True) -> list[str]:
        """Name what the last forward changed, and nobody has as it was. Rank-local.

        is_under_way: its step is not committed. reads_bits: look also at the values of what is
        believed still; waits for the device.
        """
        if is_under_way:
            self.writes.note(reads_bits=reads_bits)
        return self.writes.unsafe(num_forwards=is_under_way + self.parts.is_async_device)

    def where(self) -> str:
        return f"rank {self.parts.group.launch.rank}, step {self.progress.step}"

    def _forward_backward(self, attempt: Attempt, batches: Sequence[Batch]) -> None:
        """Run micro-batches forward and backward. Collective in the last one if DDP sends there."""
        parts, replica, gradients = self.parts, self.parts.replica, self.parts.gradients
        tracker = parts.group.tracker
        size = attempt.window.size
        # If the loss is a mean over something else, reduce divides by that.
        scale = 1 / (size if self._counts_samples else _divisor(size))
        scaler = parts.precision.scaler  # fp16's; else None
        attempt.count = 0.0
        attempt.losses.clear()
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            self.batch = batch
            tracker.enter(Phase.FORWARD)  # WHY first: to send may wait for the device, as a kernel
            if self._moves_batches or replica.inputs.are_copied:
                batch = replica.inputs.send(batch, parts.device)
            batch.is_measured = attempt.is_reported
            with gradients.around(is_last=is_last):  # DDP's no_sync, but for the last one
                with parts.precision.autocast():
                    output = parts.task.forward(gradients.call, batch)
                    score = parts.task.score(output, batch)
                    del output  # WHY: backward frees what it needs; the caller's would stay
                attempt.count = attempt.count + score.count
                if self._watches_loss and not math.isfinite(value := score.loss_sum.item()):
                    raise LossNotFinite(f"samples {format_samples(batches)}: the loss is {value}")
                if index == 0 and attempt.after_forward is not None:
                    attempt.after_forward()
                tracker.enter(Phase.BACKWARD)
                loss = score.loss_sum if scaler is None else scaler.scale(score.loss_sum)
                if not self._counts_samples:
                    gradients.note_count(attempt.count)
                # WHY not loss * factor: where backward starts, a factor needs no operation.
                start = torch.full_like(loss, scale)
                loss.backward(start)  # type: ignore[no-untyped-call]  # collective if is_last
            self.totals.add(score, len(batch.indices))
            attempt.losses.append(score.loss_sum.detach())
        self.batch = None
        tracker.enter(Phase.OPTIMIZER)

    def _divide_by_count(self, attempt: Attempt, count: float) -> None:
        """Make the gradient the mean over count, what counts in the step over all ranks.

        With a count of 0 there is nothing to learn, and no weight may change: weight decay and
        momentum would move the weights with a gradient of zeros too.
        """
        if count > 0:
            self.parts.gradients.local.scale(_divisor(attempt.window.size) / count)
            return
        text = "step %d: no label of its samples counts, so no weight changes"
        log.warning(text, self.progress.step, extra=ON_EVERY_RANK)
        self.parts.replica.buffers.put_back(attempt.buffers)
        attempt.outcome = Outcome.EMPTY

    def _failure_of(self, error: BaseException, batches: Sequence[Batch]) -> Failure:
        """Return this rank's failure for an exception. Rank-local.

        Raises PeerLostError if another rank ended; or error itself if nothing is retried.
        """
        if isinstance(error, LossNotFinite):
            return Failure("not finite", f"{self.where()}, {error}")
        if (lost := lost_peer(error, self.parts.group)) is not None:
            raise lost from error
        if not self.retries and not self._leaves_out:
            raise error
        log.debug("step %d failed", self.progress.step, exc_info=error)
        kind: Kind = "out of memory" if is_out_of_memory(error) else "error"
        work = self.parts.group.tracker.phase.label
        text = f"{self.where()}, {work}, samples {format_samples(batches)}: {in_full(error)}"
        return Failure(kind, text, max(len(batch.indices) for batch in batches))

    def _find_nan(self, attempt: Attempt, batches: Sequence[Batch]) -> None:
        """Run forward and backward, searching the module that gives the first NaN or inf.

        Rank-local. Raises LossNotFinite with what was found.
        """
        with watch(self.parts.replica.module, batches) as finder:
            try:
                self._forward_backward(attempt, batches)
                loss = self.totals.loss() - float(attempt.totals_before[0])
                problem = "" if math.isfinite(loss) else f"the loss is {loss}"
                gradients, scaler = self.parts.gradients.local, self.parts.precision.scaler
                if not problem and scaler is None and not gradients.are_finite():
                    problem = "the gradient is not finite"
            except LossNotFinite as error:
                problem = str(error).partition(": ")[2]
        if problem:
            raise LossNotFinite(finder.tell(problem))


class Totals:
    """Loss, sums of the task's metrics, and their count, since the last reading.

    They stay on the device, so that adding to them never waits for it. WHY in place: small tensors
    that outlive a step fragment the memory that the step frees, so the next step's large tensors do
    not fit there: memory grew by 200 MiB for a 2 MiB model.
    """

    def __init__(
        self, task: Task, device: torch.device, *, loss_dtype: torch.dtype = torch.float32
    ) -> None:
        self.task = task
        self.loss_sum = torch.zeros((), dtype=loss_dtype, device=device)
        zeros = dict(task.sums)
        if not task.counts_samples:
            zeros[COUNT] = torch.zeros((), dtype=torch.float64)
        self.sums = {name: torch.zeros_like(zero, device=device) for name, zero in zeros.items()}
        self.num_samples = 0
        self.grad_norm: torch.Tensor | None = None  # the gradient's norm in the last reported step

        # Steps since the last reading, also those that were left out. The same on all ranks.
        self.num_steps = 0

    def add(self, score: Score, num_samples: int) -> None:
        self.loss_sum += score.loss_sum.detach()
        for name, value in self.task.sums_of(score).items():
            self.sums[name] += value
        if COUNT in self.sums:
            self.sums[COUNT] += score.count
        self.num_samples += num_samples

    def reset(self) -> None:
        for total in (self.loss_sum, *self.sums.values()):
            total.zero_()
        self.num_samples = self.num_steps = 0

    def mark(self) -> Mark:
        """Copy the current sums, for go_back or a comparison."""
        copies = [total.clone() for total in self.sums.values()]
        return self.loss_sum.clone(), copies, self.num_samples

    def go_back(self, mark: Mark) -> None:
        loss_sum, sums, self.num_samples = mark
        self.loss_sum.copy_(loss_sum)
        for total, before in zip(self.sums.values(), sums, strict=True):
            total.copy_(before)

    def loss(self) -> float:
        """Return the sum of the losses. Waits for the device."""
        return float(self.loss_sum)

    def read(self, group: Group) -> dict[str, float]:
        """Return the mean loss, each metric and the samples over all ranks. Collective."""
        sums, count = self.gather(group)  # collective
        figures = self.task.figures(sums, count)
        return {LOSS: sums[LOSS] / count, **figures, "samples": sums["samples"]}

    def gather(self, group: Group) -> tuple[dict[str, Any], float]:  # Any: numbers, nested lists
        """Return the sums by name and what the loss is a mean over, of all ranks. Collective."""
        device = self.loss_sum.device
        # WHY full: a tensor made of a list would be copied to the device, which waits for it
        num_samples = torch.full((), self.num_samples, dtype=torch.float64, device=device)
        totals = [self.loss_sum, *self.sums.values(), num_samples]
        flat = torch.cat([total.double().reshape(-1) for total in totals])
        with group.tracker.within(Phase.ALL_REDUCE):  # WHY here: on a GPU tolist is what waits
            values = torch.tensor(group.sum_(flat).tolist(), dtype=torch.float64)  # collective
        parts = torch.split(values, [total.numel() for total in totals])
        sums = [part.view(total.shape).tolist() for part, total in zip(parts, totals, strict=True)]
        named: dict[str, Any] = dict(zip((LOSS, *self.sums, "samples"), sums, strict=True))
        return named, max(1.0, named.get(COUNT, named["samples"]))


def divide_on_device(
    gradients: LocalGradients,
    count: float | torch.Tensor,
    is_bad: torch.Tensor,
    *,
    num_samples: int,
) -> torch.Tensor:
    """Make gradients the mean over count, without a wait; return is_bad, or 1.0 if nothing counts.

    count and is_bad: over all ranks, of shape (), on the device.
    """
    total = torch.as_tensor(count)
    is_empty = total <= 0
    gradients.scale(_divisor(num_samples) / torch.where(is_empty, 1.0, total))
    return torch.where(is_empty, torch.ones_like(is_bad), is_bad)


def _divisor(num_samples: int) -> float:
    """Return what the losses of a step are divided by before it is known how much counts."""
    return 2.0 ** round(math.log2(num_samples))
