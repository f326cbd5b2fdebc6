"""A window's gradient on all ranks, also when one of them fails on the way.

Owns what happens when a rank fails inside of a step. There are two forms of a window.
Overlapped: DDP's hook sends gradients while backward still runs; a rank that failed sends NaN for
what it owes (model/buckets.py). On a GPU that is seen one step later (late.py).
Safe: gradients stay local, and are summed after it; each rank adds a mark, and one that failed
takes part with zeros. Between CPU ranks of one machine it is the faster one; it also serves windows
in which some rank has no sample, and --continue_on_error.
Either way the good path has no vote, and nobody waits for a rank that failed.

After a failure all ranks put back what the window has changed, tell each other what happened, and
do the window again in the safe form: with the same random numbers and the same order of additions,
so that the weights are those of a run without the fault.

What is done about a cause: out of memory: smaller micro-batches, the same gradient; a parameter
that gets no gradient any more: from now on such are looked for; anything else: once more, as it
was, and NaN or inf are then watched for, to name the module (nonfinite.py). What fails again
is no accident: with --continue_on_error the samples that fail alone are left out, or else the whole
window; without it all ranks stop with that one cause.

With SyncBatchNorm or PowerSGD nobody can stand in for a rank: an exception there ends the attempt.
"""

import logging
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace

from hardened_ddp.data.fetch import BadSample, describe, split, take
from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.ranks.lost import lost_peer
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.step.failure import NUM_SHOWN, Failure, error_of, shown, told, where_of
from hardened_ddp.step.finite import FiniteCheck
from hardened_ddp.step.late import Attempt, Flag
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.memory import is_out_of_memory
from hardened_ddp.step.nonfinite import watch
from hardened_ddp.step.parts import Parts, Progress
from hardened_ddp.step.passes import LossNotFinite, Passes

log = logging.getLogger(__name__)

_BAD_SUM = "the gradient over all ranks is not finite, though every loss is"


class StepRetry:
    """Does forward and backward of windows, again if need be."""

    def __init__(self, parts: Parts, passes: Passes, left_out: LeftOut) -> None:
        self.parts = parts
        self.passes = passes
        self.left_out = left_out
        self._checks_unused = parts.replica.ddp is not None
        self._heals = parts.config.loop.step_retry == "on"
        self.finite = FiniteCheck(parts, passes)
        self._is_late = self._heals and parts.looks_late

    def do(self, attempt: Attempt, progress: Progress) -> bool:
        """Bring the gradient of a window to all ranks; False: it was given up. Collective.

        If attempt has a flag then, the gradient is in doubt until that is read (late.py). Raises
        the same error on all ranks if it can't be had.
        """
        self.finite.is_close = False
        if not self.is_quick(attempt.window):
            return self._until_done(attempt, progress, has_failed=False)  # collective
        attempt.failure = self._try(attempt, progress, keep_local=False)  # collective
        if self._end_overlapped(attempt):  # collective
            return self._until_done(attempt, progress, has_failed=True)  # collective
        if attempt.flag is None and not self.finite.accepts_sum():
            attempt.failure = Failure("not finite", _BAD_SUM)
            return self._until_done(attempt, progress, has_failed=True)  # collective
        return self._finish(attempt, progress, attempt.window.size)  # collective

    def do_again(self, attempt: Attempt, progress: Progress) -> bool:
        """Do a window whose flag is up as do does, without doubt. Collective: all ranks."""
        attempt.flag = None
        self.finite.is_close = False
        if (buckets := self.parts.replica.buckets) is not None:
            buckets.reset()  # WHY here too: DDP builds its buckets anew after it, on all ranks
        if attempt.failure is None and not math.isfinite(loss := attempt.loss()):
            where = f"rank {self.parts.group.launch.rank}, step {progress.step}"
            text = f"{where}, samples {shown(attempt.batches)}: the loss is {loss}"
            attempt.failure = Failure("not finite", text)
        return self._until_done(attempt, progress, has_failed=True)  # collective

    def _until_done(self, attempt: Attempt, progress: Progress, *, has_failed: bool) -> bool:
        """Do the window in the safe form, again and again if need be; False: it was given up.

        has_failed: it was tried already, and failed on some rank or in the sum. Collective.
        """
        num_failures: Counter[int] = Counter()  # by rank
        while True:
            if not has_failed:
                attempt.failure = self._try(attempt, progress)
                num_failed, num_valid = self._sum(attempt)  # collective
                if not num_failed and self.finite.accepts_sum():
                    if self._finish(attempt, progress, num_valid):  # collective
                        return True
                    self._undo(attempt)
                    return False
                if not num_failed:
                    attempt.failure = Failure("not finite", _BAD_SUM)
            has_failed = False
            failure = attempt.failure
            self._undo(attempt)
            everyone = self.parts.group.gather_json(failure and asdict(failure))  # collective
            causes = {rank: Failure(**cause) for rank, cause in enumerate(everyone) if cause}
            if not causes and self.parts.precision.scaler is not None:
                continue  # an overflow of fp16: now its scaler may leave the step out for good
            if not causes:  # nobody failed, so the sum that DDP made is no number
                causes = {0: Failure("not finite", _BAD_SUM)}
            self.finite.is_close = any(cause.kind == "not finite" for cause in causes.values())
            if self._adapt(causes, progress):
                continue
            num_failures.update(causes.keys())
            # WHY: the first failure of another rank is another accident, with its own second try
            num_tries = max(num_failures[rank] for rank in causes)
            self._stop_unless_useful(causes, num_tries)
            if num_tries == 1 and self._heals:
                _say(causes, progress, "the window is done again")
            elif num_tries == 2 and self._heals:
                _say(causes, progress, "looking for the samples that fail alone")
                if failure is not None:
                    attempt.batches = self._without_bad(attempt, progress)
            else:
                if self.finite.is_close:
                    self.finite.poisoned.append(f"step {progress.step}: {told(causes)}")
                self.left_out.add(attempt.batches, failure.text if failure else "", progress)
                return False

    def is_quick(self, window: Window) -> bool:
        """Say whether gradients are sent within backward, if at all: the same on all ranks."""
        parts, world_size = self.parts, self.parts.group.world_size
        if parts.config.loop.continue_on_error:  # which samples are left out is seen in the sum
            return False
        can = parts.replica.can_overlap if world_size > 1 else self._is_late
        return can and window.size >= world_size

    def _try(
        self, attempt: Attempt, progress: Progress, *, keep_local: bool = True
    ) -> Failure | None:
        """Run forward and backward on what can be read; say how it failed.

        Rank-local, but for a backward that does not keep_local: that is collective.
        """
        parts, rank = self.parts, self.parts.group.launch.rank
        window, batches = attempt.window, attempt.batches
        if not keep_local and parts.replica.buckets is not None:
            parts.replica.buckets.begin()
        bad = [sample for batch in batches for sample in batch.bad]
        if bad and not parts.config.loop.continue_on_error:
            return Failure("sample", f"rank {rank} can't read sample {bad[0].name}: {bad[0].error}")
        micro_batches = split(batches, progress.most_samples)
        where = f"rank {rank}, step {progress.step}"
        self._seed(progress)
        watched = watch(parts.replica.module) if self.finite.is_close else nullcontext()
        problem = ""
        try:
            with watched as finder:
                self.passes.run(window, micro_batches, keep_local=keep_local)
        except LossNotFinite as error:
            problem = str(error)
        except Exception as error:  # WHY broad: whatever it is, the other ranks must hear of it
            if (lost := lost_peer(error, parts.group)) is not None:
                raise lost from error
            if not self._heals and not parts.config.loop.continue_on_error:
                raise
            log.debug("step %d failed", progress.step, exc_info=True)
            kind = "out of memory" if is_out_of_memory(error) else "error"
            text = f"{where}, {self.passes.phase}, samples {shown(micro_batches)}: "
            text += f"{describe(error)} ({where_of(error)})"
            return Failure(kind, text, max(batch.num_samples for batch in micro_batches))
        if problem or (keep_local and (problem := self.finite.own_problem(attempt.before))):
            text = f"samples {shown(micro_batches)}: {problem}"
            if finder is not None:
                text = finder.tell(problem, micro_batches)
            return Failure("not finite", f"{where}, {text}")
        looks = parts.replica.looks_for_unused
        if self._checks_unused and not looks and window.size >= parts.group.world_size:
            names = parts.replica.parameters_without_gradient()
            if names:
                some = f"{', '.join(names[:NUM_SHOWN])} ({len(names)} in all)"
                return Failure("unused", f"rank {rank}: no gradient came for {some}")
        return None

    def _end_overlapped(self, attempt: Attempt) -> bool:
        """Do the rest of this rank's part in the sums; say whether some rank failed. Collective.

        On a GPU that is known later: attempt gets a flag.
        """
        replica, failure = self.parts.replica, attempt.failure
        buckets, has_failed = replica.buckets, failure is not None
        is_alone = self.parts.group.world_size == 1
        if failure is not None and not is_alone and (buckets is None or not buckets.stand_in()):
            raise error_of(failure.kind, failure.text)
        if self._is_late and (buckets is None or not buckets.are_old):
            attempt.flag = Flag(replica.is_gradient_bad(has_failed))
            attempt.loss_after = self.passes.totals.loss_sum.clone()
            if has_failed and buckets is not None:
                buckets.disarm()
        if attempt.flag is not None or buckets is None:
            return False
        if buckets.some_rank_failed(has_failed):  # collective
            buckets.reset()
            return True
        buckets.renew()  # collective
        return False

    def _sum(self, attempt: Attempt) -> tuple[int, int]:
        """Add up the gradients, with the marks of failed ranks and the samples. Collective."""
        num_valid = sum(batch.num_samples for batch in attempt.batches)
        has_failed = float(attempt.failure is not None)
        marks = self.parts.replica.sum_gradients([has_failed, float(num_valid)])  # collective
        return int(marks[0]), int(marks[1])

    def _finish(self, attempt: Attempt, progress: Progress, num_valid: int) -> bool:
        """Weigh what is left if samples are missing; False: there is none left. Collective."""
        parts, size = self.parts, attempt.window.size
        if num_valid < size:
            self.left_out.add(attempt.batches, "", progress)  # collective
        if not num_valid:
            return False
        if num_valid < size:
            for parameter in parts.replica.trainable.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(size / num_valid)
        parts.replica.sync_buffers()  # collective
        self.finite.note_good(progress.step)
        return True

    def _adapt(self, causes: dict[int, Failure], progress: Progress) -> bool:
        """Change what is to be changed on all ranks; say whether that may help."""
        if not self._heals:
            return False
        kinds = {cause.kind for cause in causes.values()}
        if kinds == {"unused"} and self.parts.config.ddp.find_unused_parameters != "off":
            self.parts.replica.looks_for_unused = True
            _say(causes, progress, "find_unused_parameters is on from now, the window done again")
            return True
        sizes = [c.num_samples for c in causes.values() if c.kind == "out of memory"]
        if sizes and max(sizes) > 1:
            progress.most_samples = max(sizes) // 2
            _say(
                causes,
                progress,
                f"micro-batches have {progress.most_samples} samples at most from now on; the "
                "window is done again, for the same gradient",
            )
            return True
        return False

    def _stop_unless_useful(self, causes: dict[int, Failure], num_tries: int) -> None:
        """Raise one error, the same on all ranks, where another try is of no use."""
        if self.parts.config.loop.continue_on_error:
            return
        kinds = [cause.kind for cause in causes.values()]
        if self._heals and num_tries == 1 and not {"sample", "unused"} & set(kinds):
            return
        raise error_of(kinds[0], told(causes))

    def _without_bad(self, attempt: Attempt, progress: Progress) -> list[Batch]:
        """Run each sample alone; give the batches without those that fail again. Rank-local.

        WHY unless all fail: then it is not the samples (BatchNorm can't train on a single one).
        """
        found, num_good = [], 0
        for batch in attempt.batches:
            good, bad = [], list(batch.bad)
            for index in range(batch.num_samples):
                single = replace(attempt, batches=[take(batch, [index])])
                failure = self._try(single, progress)
                if failure is None or failure.kind == "unused":
                    good.append(index)
                else:
                    bad.append(BadSample(int(batch.indices[index]), failure.text))
                self._undo(attempt)
            num_good += len(good)
            found.append(replace(take(batch, good), bad=tuple(bad)))
        return found if num_good else list(attempt.batches)

    def _undo(self, attempt: Attempt) -> None:
        self.parts.replica.put_back_buffers(attempt.buffers)
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.passes.totals.go_back(attempt.before)

    def _seed(self, progress: Progress) -> None:
        seed, device = self.parts.config.device.seed, self.parts.device
        rank = self.parts.group.launch.rank
        seed_step(seed, step=progress.step, rank=rank, device_type=device.type)


def _say(causes: dict[int, Failure], progress: Progress, what: str) -> None:
    log.warning("step %d: %s: %s", progress.step, what, told(causes))
