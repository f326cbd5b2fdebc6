"""A state that is not right any more: the run goes back, or a rank gets the right one again.

Owns what follows when retrying a step (step/retry.py) is not enough, within this process:

- steps without a finite loss or gradient, one after the other, under --continue_on_error: back to
  the last checkpoint from which a step was done; if they come again, all ranks stop.
- replicas that are not equal any more (guard/divergence.py). Since the last comparison gradients of
  the odd rank went into everybody's weights. So all ranks go back to a checkpoint from before it,
  and end as if nothing was. If there is none, the state that most ranks have is given to the odd
  ones, which keeps these gradients; and if no state is that of most, all ranks stop.

To go back means for each part what a restart means, without a new process: a ledger begins anew,
the account of time counts what was lost, the loader starts at the checkpoint's cursor.
"""

import logging
from enum import Enum
from typing import NoReturn

from hardened_ddp.errors import DivergenceError, NonFiniteError
from hardened_ddp.guard.divergence import Divergence, compare_replicas
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.step.step import Stepper, is_due
from hardened_ddp.training.resume import RunFolder, read_newest
from hardened_ddp.training.run_report import RunReport
from hardened_ddp.training.saving import Saver
from hardened_ddp.training.state import (
    Saved,
    collect_meta,
    collect_tensors,
    replicated_tensors,
    restore,
    share_state,
)

log = logging.getLogger(__name__)


class Course(Enum):
    """Where training goes on."""

    NEXT_STEP = "next step"
    ANOTHER_STEP = "another step"
    """The state was replaced by an earlier one, or by that of another rank."""


class Rollback:
    """Looks whether the state of the run is right, and goes back if it is not."""

    def __init__(
        self, folder: RunFolder, stepper: Stepper, saver: Saver, report: RunReport
    ) -> None:
        self.folder = folder
        self.stepper = stepper
        self.parts, self.progress = stepper.parts, stepper.progress
        self.saver = saver
        self.report = report
        loop = self.parts.config.loop
        self._retries = loop.step_retry == "on"
        self._rollback_after = loop.rollback_after if self._retries else 0
        self._equal_at = -1
        """The last step after which replicas were known to be equal."""

        self._differed_until = -1
        """Replicas differed by this step, and were not yet found equal after it."""

        self._given_up_until = -1
        self._note_equal()  # all ranks have just got the same state

    def look(self) -> Course:
        """Compare the replicas, and count the steps given up for NaN or inf. Collective.

        Raises DivergenceError or NonFiniteError, on all ranks, if nothing helps.
        """
        given_up, step = self.stepper.retry.given_up, self.progress.step
        every = self.parts.compares_every
        is_last = step >= self.parts.total_steps
        if every and (is_last or len(given_up) == 1 or is_due(step, every)):
            self._mend()  # collective
        if self.progress.step != step:
            return Course.ANOTHER_STEP
        if self._rollback_after and len(given_up) >= self._rollback_after:
            return self._leave_given_up(list(given_up))  # collective
        return Course.NEXT_STEP

    def mend(self, error: NonFiniteError) -> None:
        """Make unequal replicas equal after a loss or gradient with NaN. Collective.

        WHY: a rank whose memory went bad may see it first so. Raises error if that was not it. All
        ranks have raised it, in the same state, unless nobody could stand in for a rank.
        """
        replica = self.parts.replica
        is_raised_by_all = replica.can_stand_in or not replica.can_overlap
        if not (self.parts.compares_every and is_raised_by_all):
            raise error
        if not self._mend(f": {error.message}"):  # collective
            raise error

    def _leave_given_up(self, steps: list[str]) -> Course:
        """Go back to before windows that had no finite loss or gradient. Collective."""
        what = f"{len(steps)} steps in a row had no finite loss or gradient"
        is_again = self.stepper.last_good < self._given_up_until - 1
        self._given_up_until = self.progress.step
        # WHY that limit: from there, a step was done. A later one holds the same weights as these
        # steps had, which may be to blame.
        step, last_good = self.progress.step, self.stepper.last_good
        if not is_again and self._go_back(at_most=last_good, why=what):  # collective
            self.stepper.retry.left_out.note_rollback(step, self.progress.step, what)
            return Course.ANOTHER_STEP
        why = "again, after going back to a checkpoint" if is_again else "and no checkpoint is"
        why += "" if is_again else " from before them"
        raise NonFiniteError(
            f"{what}, {why}: {'; '.join(steps)}",
            fix="lower --learning_rate, set --clip_grad_norm 1, or --amp off; then --resume the "
            "run. --rollback_after 0 leaves such steps out without end",
        )

    def _mend(self, why: str = "") -> bool:
        """Compare the replicas; if they differ, make them equal again; say whether. Collective."""
        found = compare_replicas(self.parts.group, replicated_tensors(self.parts))  # collective
        if found is None:
            self._note_equal()
            return False
        step = self.progress.step
        log.error("[DDP-S05] step %d: the replicas are not equal: %s%s", step, found.text, why)
        self.report.note_divergence()
        is_again = self._differed_until >= 0
        self._differed_until = step + 1
        if not self._retries or is_again:
            self._stop(found, step, "again, after it was mended" if is_again else "")
        if self._go_back(at_most=self._equal_at, why="the replicas differed"):
            self._differed_until = step
        elif found.source is not None:
            log.warning(
                "there is no checkpoint from before: gradients of rank %s since step %d stay in "
                "the weights",
                " and ".join(map(str, found.odd)),
                max(0, self._equal_at),
            )
            self._take_from(found.source)  # collective
        else:
            self._stop(found, step, "and no checkpoint is from before")
        return True

    def _note_equal(self) -> None:
        self._equal_at = self.progress.step
        if self._equal_at >= self._differed_until:
            self._differed_until = -1
        if self.parts.group.launch.is_main:
            self.folder.store.keep_newest(at_most=self._equal_at)

    def _stop(self, found: Divergence, step: int, why: str) -> NoReturn:
        self._discard_doubtful()
        raise DivergenceError(
            f"step {step}: the replicas are not equal{f', {why}' if why else ''}: {found.text}",
            fix="suspect the memory of the machine of that rank: start again without it, with "
            "--resume newest; what is saved is from before",
        )

    def _take_from(self, source: int) -> None:
        """Give all ranks the state of one of them. Collective."""
        parts = self.parts
        self.saver.close()  # WHY: a write under way reads the tensors that change here
        tensors = {}
        if parts.group.launch.rank == source:
            tensors = {name: t.detach().cpu() for name, t in collect_tensors(parts).items()}
        mine = Saved(tensors, collect_meta(parts, self.progress))
        saved = share_state(parts.group, mine, source=source)  # collective
        with self.stepper.changing_state():
            restore(parts, saved)
        self._discard_doubtful()
        self._equal_at = step = self.progress.step
        log.warning("step %d: all ranks go on with the state of rank %d", step, source)

    def _discard_doubtful(self) -> None:
        """Set aside what was saved since the replicas were known to be equal. Rank-local.

        WHY: rank 0, which saves, may be the one that differs.
        """
        self.saver.close()
        if self.parts.group.launch.is_main:
            self.saver.forget(self.folder.store.discard_newer(self._equal_at))

    def _go_back(self, *, at_most: int, why: str) -> bool:
        """Go back to the newest valid checkpoint, of step at_most or before. Collective.

        False: there is none; then nothing has changed.
        """
        group, stepper, progress = self.parts.group, self.stepper, self.progress
        with group.tracker.within(Phase.CHECKPOINT):
            self.saver.close()  # WHY: the one on its way may be the one to take
            saved = read_newest(self.folder, group, at_most=at_most)  # collective
            if saved is None:
                return False
            log.warning(
                "step %d: %s: going back to the checkpoint of step %d",
                progress.step,
                why,
                saved.meta["step"],
            )
            left_at = progress.step
            with stepper.changing_state():
                progress.go_back_to(restore(self.parts, saved))
                stepper.start_over()
            stepper.open_ledger(self.folder.folder)  # collective
            self.saver.forget([])
            self.report.go_back(left_at, progress.step)
            self._equal_at = progress.step
            group.tracker.start_at(progress.step)  # a hang from here on is one of this step
        return True
