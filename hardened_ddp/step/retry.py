"""Retry of a step in which a rank failed: all ranks try it again, or give it up.

A rank that failed still takes part in the sums (with NaN in those of DDP's hooks, see
gradients/buckets.py; with a mark beside those after backward), so all ranks know. Then all ranks
undo the step, exchange their failures, and try again with local gradients: with the same random
numbers and the same order of additions, so that the weights are those of a run without the fault.

What a retry changes depends on the cause. Out of memory: smaller micro-batches, with the same
gradient. A parameter without a gradient: find_unused_parameters is on from now. Anything else: no
change; after NaN or inf, each module is searched for them (nonfinite.py). If it fails again: with
--continue_on_error the samples that fail alone are left out, or else the whole step; without it all
ranks stop with that one cause.

With PowerSGD, or collectives in the model's forward such as SyncBatchNorm's, a failed rank can't
take part in the sums: an exception there ends the attempt.
"""

import logging
import math
from collections import Counter
from dataclasses import asdict, replace
from typing import NoReturn

from hardened_ddp.data.batches.batch import BadSample, Batch, take
from hardened_ddp.errors import StepError
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.attempt import Attempt, Outcome
from hardened_ddp.step.failure import (
    BAD_SUM,
    NUM_SHOWN,
    Failure,
    error_of,
    format_samples,
    join_causes,
)
from hardened_ddp.step.gradient import INPUTS, Gradient

log = logging.getLogger(__name__)


class StepRetry:
    """Retries steps in which a rank failed."""

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self.parts, self.progress = gradient.parts, gradient.progress
        self.given_up: list[str] = []
        """Steps given up for NaN or inf since the last completed one. The same on all ranks."""

        self._retries = gradient.retries
        self._known_unused: set[str] = set()

    def until_done(self, attempt: Attempt) -> None:
        """Retry a step, in which some rank failed, until it is done or given up. Collective.

        attempt.outcome says which. Raises the same error on all ranks if neither is possible.
        """
        num_failures = Counter[int]()  # by rank
        try:
            while not self._is_given_up(attempt, num_failures):  # collective
                attempt.failure = self.gradient.run(attempt, is_retry=True)
                if self.gradient.reduce(attempt, is_retry=True):  # collective
                    return
            attempt.outcome = Outcome.LEFT_OUT
        finally:
            self.gradient.searches_for_nan = False

    def do_again(self, attempt: Attempt) -> None:
        """Retry a step whose flag is up; its outcome is then final. Collective: all ranks."""
        attempt.flag = None
        self.parts.gradients.start_over()
        if attempt.failure is None and not math.isfinite(loss := attempt.loss()):
            text = f"{self.gradient.where()}, samples {format_samples(attempt.batches)}: "
            attempt.failure = Failure("not finite", f"{text}the loss is {loss}")
        self.until_done(attempt)  # collective

    def name_unused(self) -> None:
        """Log which parameters get no gradient any more: they don't change. Rank-local."""
        new = set(self.parts.gradients.local.missing()) - self._known_unused
        if new:
            self._known_unused |= new
            log.warning("no gradient comes any more for: %s", ", ".join(sorted(new)))

    def _is_given_up(self, attempt: Attempt, num_failures: Counter[int]) -> bool:
        """Undo a failed try, and decide with all ranks what follows. Collective: all ranks.

        True: the step is given up. Raises one error, the same on all ranks, if nothing helps.
        num_failures: by rank, so far; this call adds to it.
        """
        group, step = self.parts.group, self.progress.step
        failure = attempt.failure
        self.gradient.undo(attempt)
        mine = [failure and asdict(failure), self.gradient.lost()]
        everyone = group.gather_json(mine)  # collective
        causes = {rank: Failure(**cause) for rank, (cause, _) in enumerate(everyone) if cause}
        if lost := sorted({name for _, names in everyone for name in names}):
            self._stop_undone(causes, lost)
        if not causes and self.parts.precision.scaler is not None:
            return False  # an overflow of fp16: now its scaler may skip the step for good
        if not causes:  # no rank failed, so the sum that DDP made is not finite
            causes = {0: Failure("not finite", BAD_SUM)}
        is_not_finite = any(cause.kind == "not finite" for cause in causes.values())
        self.gradient.searches_for_nan = is_not_finite
        if self._adapt(causes):
            return False
        num_failures.update(causes.keys())
        # WHY per rank: the first failure of another rank gets a second try of its own
        num_tries = max(num_failures[rank] for rank in causes)
        self._stop_unless_useful(causes, num_tries)
        if num_tries == 1 and self._retries:
            log.warning("retrying step %d: %s", step, join_causes(causes), extra=ON_EVERY_RANK)
            return False
        if num_tries == 2 and self._retries:
            log.warning(
                "step %d: looking for the samples that fail alone: %s",
                step,
                join_causes(causes),
                extra=ON_EVERY_RANK,
            )
            if failure is not None:
                attempt.batches = self._without_bad(attempt)
            return False
        if is_not_finite:
            self.given_up.append(f"step {step}: {join_causes(causes)}")
        text = failure.text if failure else ""
        self.gradient.left_out.add(attempt.batches, text, self.progress)  # collective
        return True

    def _stop_undone(self, causes: dict[int, Failure], lost: list[str]) -> NoReturn:
        """Raise one error, the same on all ranks: what forward changed can't be put back."""
        self.parts.replica.buffers.add(name for name in lost if name != INPUTS)
        what = join_causes(causes) if causes else BAD_SUM
        raise StepError(
            f"step {self.progress.step} can't be done again, since its forward changed what no "
            f"step before had changed: {', '.join(lost[:NUM_SHOWN])}; it failed with: {what}",
            fix="start the same command again: it continues at the last checkpoint",
            is_undone=False,
        )

    def _adapt(self, causes: dict[int, Failure]) -> bool:
        """Adapt all ranks to the cause; return whether that may help."""
        if not self._retries:
            return False
        step, kinds = self.progress.step, {cause.kind for cause in causes.values()}
        if kinds == {"unused"} and self.parts.config.ddp.find_unused_parameters != "off":
            self.parts.gradients.allow_unused()
            log.warning(
                "find_unused_parameters is on from now; retrying step %d: %s",
                step,
                join_causes(causes),
                extra=ON_EVERY_RANK,
            )
            return True
        sizes = [c.num_samples for c in causes.values() if c.kind == "out of memory"]
        if sizes and max(sizes) > 1:
            self.progress.limit_micro_batches(max(sizes) // 2)
            log.warning(
                "micro-batches have %d samples at most from now on; retrying step %d, for the same "
                "gradient: %s",
                self.progress.max_micro_batch,
                step,
                join_causes(causes),
                extra=ON_EVERY_RANK,
            )
            return True
        return False

    def _stop_unless_useful(self, causes: dict[int, Failure], num_tries: int) -> None:
        """Raise one error, the same on all ranks, if another try can't help."""
        if self.parts.config.loop.continue_on_error:
            return
        kinds = [cause.kind for cause in causes.values()]
        if self._retries and num_tries == 1 and not {"sample", "unused"} & set(kinds):
            return
        raise error_of(kinds[0], join_causes(causes))

    def _without_bad(self, attempt: Attempt) -> list[Batch]:
        """Run each sample alone; return the batches without those that fail. Rank-local.

        If all fail, all are kept. WHY: then the samples are not the cause (BatchNorm can't train
        on a single one).
        """
        found, num_good = [], 0
        for batch in attempt.batches:
            good, bad = [], list(batch.bad)
            for index in range(len(batch.indices)):
                single = replace(attempt, batches=[take(batch, [index])])
                failure = self.gradient.run(single, is_retry=True)
                if failure is None or failure.kind == "unused":
                    good.append(index)
                else:
                    bad.append(BadSample(int(batch.indices[index]), failure.text))
                self.gradient.undo(attempt)
            num_good += len(good)
            found.append(replace(take(batch, good), bad=tuple(bad)))
        return found if num_good else list(attempt.batches)
