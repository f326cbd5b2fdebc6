"""Retry of a step in which a rank failed: all ranks try it again, or give it up.

A rank that failed still takes part in the sums: with NaN where DDP's hooks send them
(gradients/by_ddp.py), with a mark where they are made after backward. So all ranks know. Then all
ranks undo the step, exchange their failures, and try again with local gradients: with the same
random numbers and the same order of additions, so that the weights are those of a run without the
fault.

What a retry changes depends on the cause. Out of memory: smaller micro-batches, with the same
gradient. A parameter without a gradient: find_unused_parameters from now on. Anything else: no
change; after NaN or inf, each module is searched for them (nonfinite.py); a sample that can't be
read was retried when it was read, and is not again. If the step fails again: with
--continue_on_error the samples that fail alone are left out, or else the whole step; without it all
ranks stop with that one cause.

With collectives in the model's forward, such as SyncBatchNorm's, a failed rank can't take part in
the sums: an exception there ends the attempt.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace

from hardened_ddp.data.batches.batch import BadSample, Batch, take
from hardened_ddp.errors import StepError
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.failure import (
    BAD_SUM,
    NUM_SHOWN,
    Failure,
    error_of,
    format_samples,
    join_causes,
)
from hardened_ddp.step.gradient import INPUTS, Attempt, Gradient, Outcome

log = logging.getLogger(__name__)


class StepRetry:
    """Retries steps in which a rank failed."""

    def __init__(self, gradient: Gradient) -> None:
        self.gradient = gradient
        self.parts, self.progress = gradient.parts, gradient.progress
        # Steps given up for NaN or inf since the last completed one. The same on all ranks.
        self.given_up: list[str] = []

    def until_done(self, attempt: Attempt) -> None:
        """Retry a step, in which some rank failed, until it is done or given up. Collective.

        attempt.outcome says which. Raises the same error on all ranks if neither is possible.
        """
        num_failures = Counter[int]()  # by rank
        attempt.searches_for_nan = False
        while True:
            causes = self._undo(attempt)  # collective
            if causes and not self._prepare(attempt, causes, num_failures):
                self._give_up(attempt, causes)  # collective
                return
            attempt.failure = self.gradient.run(attempt, is_retry=True)
            if self.gradient.reduce(attempt, on_device=False) is not None:  # collective
                return

    def do_again(self, attempt: Attempt, *, loss: float) -> None:
        """Retry a step that the device found to be bad; its outcome is then final. Collective.

        loss: this rank's in it.
        """
        self.parts.gradients.start_over()
        if attempt.failure is None and not math.isfinite(loss):
            text = f"{self.gradient.where()}, samples {format_samples(attempt.batches)}: "
            attempt.failure = Failure("not finite", f"{text}the loss is {loss}")
        self.until_done(attempt)  # collective

    def _undo(self, attempt: Attempt) -> dict[int, Failure]:
        """Undo a failed try; return how ranks failed in it, by rank. The same on all. Collective.

        Empty if fp16's scaler may skip the step. Raises StepError if what forward changed can't be
        put back.
        """
        self.gradient.undo(attempt)
        mine = [attempt.failure and asdict(attempt.failure), self.gradient.lost()]
        everyone = self.parts.group.gather_json(mine)  # collective
        causes = {rank: Failure(**cause) for rank, (cause, _) in enumerate(everyone) if cause}
        if lost := sorted({name for _, names in everyone for name in names}):
            self.parts.replica.buffers.add(name for name in lost if name != INPUTS)
            what = join_causes(causes) if causes else BAD_SUM
            raise StepError(
                f"step {self.progress.step} can't be retried, since its forward changed what no "
                f"step before had changed: {', '.join(lost[:NUM_SHOWN])}; it failed with: {what}",
                fix="start the same command again: it continues at the last checkpoint",
                is_undone=False,
            )
        if not causes and self.parts.precision.scaler is None:
            causes = {0: Failure("not finite", BAD_SUM)}  # no rank failed, so it is their sum
        return causes

    def _prepare(
        self, attempt: Attempt, causes: dict[int, Failure], num_failures: Counter[int]
    ) -> bool:
        """Change for the next try what the failures call for. The same on all ranks.

        Returns False if the step is given up; raises the error of causes if all ranks stop.
        num_failures: by rank, in the earlier tries of this step with the same settings.
        """
        loop, step, retries = self.parts.config.loop, self.progress.step, self.gradient.retries
        kinds = {cause.kind for cause in causes.values()}
        sizes = [c.num_samples for c in causes.values() if c.kind == "out of memory"]
        limit = max(sizes, default=0) // 2
        may_allow = self.parts.config.ddp.find_unused_parameters != "off"
        # WHY per rank: the first failure of another rank gets a second try of its own
        num_tries = 1 + max(num_failures[rank] for rank in causes) if retries else math.inf
        text, is_stop, looks_for_bad = f"retrying step {step}", False, False
        if retries and kinds == {"unused"} and may_allow:
            self.parts.gradients.allows_unused = True
            text = f"find_unused_parameters is on from now; {text}"
        elif retries and limit > 0:
            self.progress.max_micro_batch = limit
            text = f"micro-batches have {limit} samples at most from now on; {text}, for the "
            text += "same gradient"
        elif loop.continue_on_error:
            if num_tries > 2:
                return False
            num_failures.update(causes.keys())
            if looks_for_bad := num_tries == 2:
                text = f"step {step}: looking for the samples that fail alone"
        else:
            is_stop = num_tries > 1 or bool(kinds & {"sample", "unused"})
            num_failures.update(causes.keys())
        attempt.searches_for_nan = _has_nan(causes)
        self.parts.events.tell("fault", step=step, cause=join_causes(causes))
        if is_stop:
            raise error_of(next(iter(causes.values())).kind, join_causes(causes))
        log.warning("%s: %s", text, join_causes(causes), extra=ON_EVERY_RANK)
        self.parts.events.tell("retry", step=step, how=text)
        if looks_for_bad and attempt.failure is not None:
            attempt.batches = self._without_bad(attempt)
        return True

    def _give_up(self, attempt: Attempt, causes: dict[int, Failure]) -> None:
        """Leave a step out, and record it. Collective: all ranks."""
        if _has_nan(causes):
            self.given_up.append(f"step {self.progress.step}: {join_causes(causes)}")
        text = attempt.failure.text if attempt.failure else ""
        self.gradient.left_out.add(attempt.batches, text, self.progress)  # collective
        attempt.outcome = Outcome.LEFT_OUT

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


def _has_nan(causes: Mapping[int, Failure]) -> bool:
    return any(cause.kind == "not finite" for cause in causes.values())
