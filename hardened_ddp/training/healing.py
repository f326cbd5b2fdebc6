"""The safe form of a window: gradients stay local until it is known that every rank has its own.

Owns what happens when one rank fails inside of a step. Each rank adds a mark to the sum of the
gradients, so the good path has no vote; a rank that failed takes part in that sum with zeros and a
mark, so nobody waits for it. Then all ranks put back what the window has changed, tell each other
what happened, and do the window again: with the same random numbers, so that the weights are those
of a run without the fault.

What is done about a cause: out of memory: smaller micro-batches, the same gradient; a parameter
that gets no gradient any more: from now on such are looked for; anything else: once more, as it
was, and a number that is none is then watched for, to name the module (blame.py). What fails again
is no accident: with --continue_on_error the samples that fail alone are left out, or else the whole
window; without it all ranks stop with that one cause.

Does not own: the form in which DDP's hooks average during backward (step.py); there an exception
ends the attempt.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from hardened_ddp.data.fetch import BadSample, describe, split, take
from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.errors import (
    HardenedError,
    NonFiniteError,
    OutOfMemoryError,
    SampleError,
    StepError,
    UnusedParameterError,
)
from hardened_ddp.ranks.lost import lost_peer
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.training.blame import shown, watch
from hardened_ddp.training.failure import is_out_of_memory, where_of
from hardened_ddp.training.finite import FiniteCheck
from hardened_ddp.training.left_out import LeftOut
from hardened_ddp.training.parts import Parts, Progress
from hardened_ddp.training.passes import Passes
from hardened_ddp.training.totals import Mark

log = logging.getLogger(__name__)

_SHOWN = 8
_BAD_SUM = "the gradient over all ranks is not finite, though every loss is"
_FIXES = {
    "error": "the traceback is in that rank's log file",
    "out of memory": "a smaller --batch_size with more --accumulation_steps; one sample alone did "
    "not fit",
    "not finite": "lower --learning_rate, set --clip_grad_norm 1, or --amp off; then --resume the "
    "run. --continue_on_error leaves such windows out",
    "sample": "mend it, or leave such samples out with --continue_on_error",
    "unused": "--find_unused_parameters, or use them in every forward, or freeze them",
}
_CLASSES: dict[str, Callable[..., HardenedError]] = {
    "error": StepError,
    "out of memory": OutOfMemoryError,
    "not finite": partial(NonFiniteError, reached_weights=False),
    "sample": SampleError,
    "unused": UnusedParameterError,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank failed in a window."""

    kind: str
    text: str
    num_samples: int = 0
    """Of its largest micro-batch."""


class SafeForm:
    """Does windows whose gradients are summed after backward."""

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
        while True:
            failure = self._try(window, batches, progress, before)
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

    def _try(
        self, window: Window, batches: Sequence[Batch], progress: Progress, before: Mark
    ) -> Failure | None:
        """Run forward and backward on what can be read; say how it failed. Rank-local."""
        parts, rank = self.parts, self.parts.group.launch.rank
        bad = [sample for batch in batches for sample in batch.bad]
        if bad and not parts.config.loop.continue_on_error:
            return Failure(
                "sample", f"rank {rank} can't read sample {bad[0].index}: {bad[0].error}"
            )
        micro_batches = split(batches, progress.most_samples)
        where = f"rank {rank}, step {progress.step}"
        self._seed(progress)
        watched = watch(parts.replica.module) if self.finite.is_close else nullcontext()
        try:
            with watched as witness:
                self.passes.run(window, micro_batches, keep_local=True)
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
        if what := self.finite.own_problem(before):
            samples = f"samples {shown(micro_batches)}: {what}"
            text = samples if witness is None else witness.tell(what, micro_batches)
            return Failure("not finite", f"{where}, {text}")
        looks = parts.replica.looks_for_unused
        if self._checks_unused and not looks and window.size >= parts.group.world_size:
            names = parts.replica.parameters_without_gradient()
            if names:
                some = f"{', '.join(names[:_SHOWN])} ({len(names)} in all)"
                return Failure("unused", f"rank {rank}: no gradient came for {some}")
        return None

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
        raise _CLASSES[kinds[0]](_texts(causes), fix=_FIXES[kinds[0]])

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
