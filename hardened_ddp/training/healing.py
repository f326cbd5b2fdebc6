"""A window's gradient on all ranks, also when one of them fails on the way.

Owns what happens when a rank fails inside of a step. There are two forms of a window.
Overlapped: DDP's hook sends gradients while backward still runs; a rank that failed sends NaN for
what it owes (model/buckets.py). Safe: gradients stay local, and are summed after it; each rank adds
a mark to that sum, and one that failed takes part with zeros. Either way the good path has no vote
and nobody waits for a rank that failed. For CPU ranks of one machine the safe form is the faster
one; it also serves windows in which some rank has no sample, and --continue_on_error.

After a failure all ranks put back what the window has changed, tell each other what happened, and
do the window again in the safe form: with the same random numbers and the same order of additions,
so that the weights are those of a run without the fault.

What is done about a cause: out of memory: smaller micro-batches, the same gradient; a parameter
that gets no gradient any more: from now on such are looked for; anything else: once more, as it
was, and a number that is none is then watched for, to name the module (blame.py). What fails again
is no accident: with --continue_on_error the samples that fail alone are left out, or else the whole
window; without it all ranks stop with that one cause.

With SyncBatchNorm or PowerSGD nobody can stand in for a rank: there an exception in the overlapped
form ends the attempt.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace

import torch

from hardened_ddp.data.fetch import BadSample, describe, split, take
from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.ranks.lost import lost_peer
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.training.blame import watch
from hardened_ddp.training.failure import NUM_SHOWN, Failure, error_of, shown, where_of
from hardened_ddp.training.finite import FiniteCheck
from hardened_ddp.training.left_out import LeftOut
from hardened_ddp.training.memory import is_out_of_memory
from hardened_ddp.training.parts import Parts, Progress
from hardened_ddp.training.passes import LossNotFinite, Passes
from hardened_ddp.training.totals import Mark

log = logging.getLogger(__name__)

_BAD_SUM = "the gradient over all ranks is not finite, though every loss is"


class Healer:
    """Does forward and backward of windows, again if need be."""

    def __init__(self, parts: Parts, passes: Passes, left_out: LeftOut) -> None:
        self.parts = parts
        self.passes = passes
        self.left_out = left_out
        self._checks_unused = parts.replica.ddp is not None
        self._heals = parts.config.loop.recovery == "on"
        self.finite = FiniteCheck(parts, passes)

    def do(
        self,
        window: Window,
        batches: Sequence[Batch],
        progress: Progress,
        buffers: Sequence[torch.Tensor],
    ) -> bool:
        """Bring the gradient of window to all ranks; False: it was given up. Collective: all ranks.

        Raises the same error on all ranks if it can't be had.
        """
        before = self.passes.totals.mark()
        num_failures: Counter[int] = Counter()  # by rank
        self.finite.is_close = False
        is_overlapped = self._overlaps(window)
        while True:
            keep_local = not is_overlapped
            failure = self._try(window, batches, progress, before, keep_local=keep_local)
            if is_overlapped:
                num_failed = int(self._end_overlapped(failure))  # collective
                num_valid = window.size
                is_overlapped = False
            else:
                num_failed, num_valid = self._sum(batches, failure)  # collective
            if not num_failed and self.finite.accepts_sum():
                if self._finish(window, batches, progress, num_valid):  # collective
                    self.finite.note_good(progress.step)
                    return True
                self._undo(buffers, before)
                return False
            if not num_failed:
                failure = Failure("not finite", _BAD_SUM)
            self._undo(buffers, before)
            everyone = self.parts.group.gather_json(failure and asdict(failure))  # collective
            causes = {rank: Failure(**cause) for rank, cause in enumerate(everyone) if cause}
            self.finite.is_close = any(cause.kind == "not finite" for cause in causes.values())
            if not causes:  # nobody failed, so the sum that DDP made is no number
                self.finite.is_close = True
                continue
            if self._adapt(causes, progress):
                continue
            num_failures.update(causes.keys())
            # WHY so: the first failure of another rank is another accident, with its own second try
            num_tries = max(num_failures[rank] for rank in causes)
            self._stop_unless_useful(causes, num_tries)
            if num_tries == 1 and self._heals:
                _say(causes, progress, "the window is done again")
            elif num_tries == 2 and self._heals:
                _say(causes, progress, "looking for the samples that fail alone")
                if failure is not None:
                    batches = self._without_bad(window, batches, progress, before)
                    self._undo(buffers, before)
            else:
                if self.finite.is_close:
                    self.finite.poisoned.append(f"step {progress.step}: {_texts(causes)}")
                self.left_out.add(batches, failure.text if failure else "", progress)  # collective
                return False

    def _overlaps(self, window: Window) -> bool:
        """Say whether gradients are sent within backward: the same on all ranks."""
        parts = self.parts
        can_weigh = not parts.config.loop.continue_on_error  # the number of samples is then known
        has_empty_share = window.size < parts.group.world_size
        return parts.replica.can_overlap and can_weigh and not has_empty_share

    def _try(
        self,
        window: Window,
        batches: Sequence[Batch],
        progress: Progress,
        before: Mark,
        *,
        keep_local: bool = True,
    ) -> Failure | None:
        """Run forward and backward on what can be read; say how it failed.

        Rank-local, but for a backward that does not keep_local: that is collective.
        """
        parts, rank = self.parts, self.parts.group.launch.rank
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
            with watched as witness:
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
        if problem or (keep_local and (problem := self.finite.own_problem(before))):
            text = f"samples {shown(micro_batches)}: {problem}"
            if witness is not None:
                text = witness.tell(problem, micro_batches)
            return Failure("not finite", f"{where}, {text}")
        looks = parts.replica.looks_for_unused
        if self._checks_unused and not looks and window.size >= parts.group.world_size:
            names = parts.replica.parameters_without_gradient()
            if names:
                some = f"{', '.join(names[:NUM_SHOWN])} ({len(names)} in all)"
                return Failure("unused", f"rank {rank}: no gradient came for {some}")
        return None

    def _end_overlapped(self, failure: Failure | None) -> bool:
        """Do the rest of this rank's part in the sums; say whether some rank failed. Collective."""
        buckets = self.parts.replica.buckets
        if failure is not None and (buckets is None or not buckets.stand_in()):
            raise error_of(failure.kind, failure.text)
        if buckets is None or not buckets.some_rank_failed(failure is not None):
            return False
        buckets.reset()
        return True

    def _sum(self, batches: Sequence[Batch], failure: Failure | None) -> tuple[int, int]:
        """Add up the gradients, with the marks of failed ranks and the samples. Collective."""
        num_valid = sum(batch.num_samples for batch in batches)
        marks = self.parts.replica.sum_gradients([float(failure is not None), float(num_valid)])
        return int(marks[0]), int(marks[1])

    def _finish(
        self,
        window: Window,
        batches: Sequence[Batch],
        progress: Progress,
        num_valid: int,
    ) -> bool:
        """Weigh what is left if samples are missing; False: there is none left. Collective."""
        parts = self.parts
        if num_valid < window.size:
            self.left_out.add(batches, "", progress)  # collective
        if not num_valid:
            return False
        if num_valid < window.size:
            for parameter in parts.replica.trainable.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(window.size / num_valid)
        parts.replica.sync_buffers()  # collective
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
        raise error_of(kinds[0], _texts(causes))

    def _without_bad(
        self, window: Window, batches: Sequence[Batch], progress: Progress, before: Mark
    ) -> list[Batch]:
        """Run each sample alone; give the batches without those that fail again. Rank-local.

        WHY unless all fail: then it is not the samples (BatchNorm can't train on a single one).
        """
        found, num_good = [], 0
        for batch in batches:
            good, bad = [], list(batch.bad)
            for index in range(batch.num_samples):
                single = take(batch, [index])
                failure = self._try(window, [single], progress, before)
                if failure is None or failure.kind == "unused":
                    good.append(index)
                else:
                    bad.append(BadSample(int(batch.indices[index]), failure.text))
                self._forget(before)
            num_good += len(good)
            found.append(replace(take(batch, good), bad=tuple(bad)))
        return found if num_good else list(batches)

    def _undo(self, buffers: Sequence[torch.Tensor], before: Mark) -> None:
        self.parts.replica.put_back_buffers(buffers)
        self._forget(before)

    def _forget(self, before: Mark) -> None:
        self.parts.optimizer.zero_grad(set_to_none=True)
        self.passes.totals.go_back(before)

    def _seed(self, progress: Progress) -> None:
        seed_step(
            self.parts.config.device.seed,
            step=progress.step,
            rank=self.parts.group.launch.rank,
            device_type=self.parts.device.type,
        )


def _say(causes: dict[int, Failure], progress: Progress, what: str) -> None:
    log.warning("step %d: %s: %s", progress.step, what, _texts(causes))


def _texts(causes: dict[int, Failure]) -> str:
    return "; ".join(dict.fromkeys(cause.text for cause in causes.values()))
