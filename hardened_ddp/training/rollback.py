"""Numbers that went wrong for good: the run goes back, or a rank gets the right state again.

Owns what follows when doing the window again (retry.py) is not enough, within this process:

- windows without a finite loss or gradient, one after the other, under --continue_on_error: back to
  the last checkpoint from which a window was done well; if they come again, all ranks stop.
- replicas that are not equal any more (guard/divergence.py). Since the last comparison gradients of
  the odd rank went into everybody's weights. So all ranks go back to a checkpoint from before it,
  and end as if nothing was. If there is none, the state that most ranks have is given to the odd
  ones, which keeps these gradients; and if no state is that of most, all ranks stop.

To go back means for each part what a restart means, without a new process: a ledger begins anew,
the account of time counts what was lost, the loader starts at the checkpoint's cursor.
"""

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import NoReturn

from hardened_ddp.data.loader import Batch
from hardened_ddp.data.sampler import Window
from hardened_ddp.errors import DivergenceError, NonFiniteError
from hardened_ddp.guard.divergence import Divergence, compare_replicas
from hardened_ddp.ranks.heartbeat import STEP
from hardened_ddp.step.parts import Parts, Progress
from hardened_ddp.step.step import Stepper
from hardened_ddp.training.plan import is_due
from hardened_ddp.training.resume import Run, read_checkpoint
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


class Rollback:
    """Does steps, and takes back what went wrong in them."""

    def __init__(
        self, parts: Parts, run: Run, stepper: Stepper, saver: Saver, report: RunReport
    ) -> None:
        self.parts = parts
        self.run = run
        self.stepper = stepper
        self.saver = saver
        self.report = report
        loop = parts.config.loop
        self._heals = loop.step_retry == "on"
        self._rollback_after = loop.rollback_after if self._heals else 0
        self._compare_every = loop.check_replicas_every if parts.group.world_size > 1 else 0
        self._equal_at = -1
        """The last step after which replicas were known to be equal."""

        self._differed_until = -1
        """Replicas differed by this step, and were not yet found equal after it."""

        self._poisoned_until = -1
        self._is_back = False

    @property
    def is_in_doubt(self) -> bool:
        """The last windows had no finite loss or gradient: their state is not worth saving."""
        return bool(self.stepper.retry.finite.poisoned)

    def begin(self, progress: Progress) -> None:
        """Note where training begins: all ranks have just got the same state. Rank-local."""
        self._note_equal(progress)

    def do(self, window: Window, batches: Sequence[Batch], progress: Progress) -> bool:
        """Do a step, see stepper.do. False: it does not count, go on from progress. Collective."""
        self._is_back = not self._do(window, batches, progress)  # collective
        return not self._is_back

    def begins_anew(self) -> bool:
        """Say, once, that the last step did not count: another window comes than the next one."""
        is_back, self._is_back = self._is_back, False
        return is_back

    def _do(self, window: Window, batches: Sequence[Batch], progress: Progress) -> bool:
        try:
            self.stepper.do(window, batches, progress)  # collective
            if self._is_read_next(window, progress):
                self.stepper.settle(progress)  # collective
        except NonFiniteError as error:
            # WHY: a rank whose memory went bad may see it first as a loss that is no number. All
            # ranks raise this error, in the same state, unless nobody could stand in for a rank.
            replica = self.parts.replica
            is_raised_by_all = replica.can_stand_in or not replica.can_overlap
            if not self._compare_every or not is_raised_by_all:
                raise
            if not self._mend(progress, f": {error.message}"):  # collective
                raise
            return False
        poisoned = self.stepper.retry.finite.poisoned
        is_last = progress.step >= self.parts.total_steps
        is_due_now = is_last or len(poisoned) == 1 or is_due(progress.step, self._compare_every)
        step = progress.step
        if self._compare_every and is_due_now:
            self._mend(progress)  # collective
        if progress.step != step:
            return False
        if self._rollback_after and len(poisoned) >= self._rollback_after:
            self._leave_poisoned(progress, list(poisoned))  # collective
        return progress.step == step

    def _is_read_next(self, window: Window, progress: Progress) -> bool:
        """Say whether the loss or the weights of this step are looked at before the next one."""
        is_last = progress.step >= self.parts.total_steps or window.stop >= self.parts.sampler.end
        is_compared = bool(self._compare_every) and is_due(progress.step, self._compare_every)
        return self.stepper.looks_closely or is_last or is_compared

    def _leave_poisoned(self, progress: Progress, windows: list[str]) -> None:
        """Go back to before windows that had no finite loss or gradient. Collective."""
        finite = self.stepper.retry.finite
        what = f"{len(windows)} windows in a row had no finite loss or gradient"
        is_again = finite.last_good < self._poisoned_until - 1
        self._poisoned_until = progress.step
        # WHY that limit: from there, a window was done well. A later one holds the same weights as
        # these windows had, which may be to blame.
        step = progress.step
        if not is_again and self._go_back(progress, at_most=finite.last_good, why=what):
            entry = {"rank": 0, "step": step, "taken_back_to": progress.step, "error": what}
            self.stepper.left_out.entries.append(entry)
            return
        why = "again, after going back to a checkpoint" if is_again else "and no checkpoint is"
        why += "" if is_again else " from before them"
        raise NonFiniteError(
            f"{what}, {why}: {'; '.join(windows)}",
            fix="lower --learning_rate, set --clip_grad_norm 1, or --amp off; then --resume the "
            "run. --rollback_after 0 leaves such windows out without end",
        )

    def _mend(self, progress: Progress, why: str = "") -> bool:
        """Compare the replicas; if they differ, make them equal again; say whether. Collective."""
        found = compare_replicas(self.parts.group, replicated_tensors(self.parts))  # collective
        if found is None:
            self._note_equal(progress)
            return False
        step = progress.step
        log.error("[DDP-S05] step %d: the replicas are not equal: %s%s", step, found.text, why)
        self.report.num_diverged += 1
        is_again = self._differed_until >= 0
        self._differed_until = step + 1
        if not self._heals or is_again:
            self._stop(found, step, "again, after it was mended" if is_again else "")
        if self._go_back(progress, at_most=self._equal_at, why="the replicas differed"):
            self._differed_until = step
        elif found.source is not None:
            log.warning(
                "there is no checkpoint from before: gradients of rank %s since step %d stay in "
                "the weights",
                " and ".join(map(str, found.odd)),
                max(0, self._equal_at),
            )
            self._take_from(found.source, progress)  # collective
        else:
            self._stop(found, step, "and no checkpoint is from before")
        return True

    def _note_equal(self, progress: Progress) -> None:
        self._equal_at = progress.step
        if progress.step >= self._differed_until:
            self._differed_until = -1
        if self.parts.group.launch.is_main:
            steps = [step for step in self.run.store.steps() if step <= progress.step]
            self.run.store.kept_step = max(steps, default=None)

    def _stop(self, found: Divergence, step: int, why: str) -> NoReturn:
        self._discard_doubtful()
        raise DivergenceError(
            f"step {step}: the replicas are not equal{f', {why}' if why else ''}: {found.text}",
            fix="suspect the memory of the machine of that rank: start again without it, with "
            "--resume newest; what is saved is from before",
        )

    def _take_from(self, source: int, progress: Progress) -> None:
        """Give all ranks the state of one of them. Collective."""
        parts = self.parts
        self.saver.close()  # WHY: a write under way reads the tensors that change here
        tensors = {}
        if parts.group.launch.rank == source:
            tensors = {name: t.detach().cpu() for name, t in collect_tensors(parts).items()}
        mine = Saved(tensors, collect_meta(parts, progress))
        saved = share_state(parts.group, mine, source=source)  # collective
        with self.stepper.commit_lock:
            self.stepper.is_whole = False
            restore(parts, saved)
            self.stepper.is_whole = True
        self._discard_doubtful()
        self._equal_at = progress.step
        log.warning("step %d: all ranks go on with the state of rank %d", progress.step, source)

    def _discard_doubtful(self) -> None:
        """Set aside what was saved since the replicas were known to be equal. Rank-local.

        WHY: rank 0, which saves, may be the one that differs.
        """
        self.saver.close()
        if self.parts.group.launch.is_main:
            self.saver.forget(self.run.store.discard_newer(self._equal_at))

    def _go_back(self, progress: Progress, *, at_most: int, why: str) -> bool:
        """Go back to the newest valid checkpoint, of step at_most or before. Collective.

        False: there is none; then nothing has changed.
        """
        run, group, stepper = self.run, self.parts.group, self.stepper
        self.saver.close()  # WHY: the one on its way may be the one to take

        def choose() -> bool:
            run.checkpoint = run.store.find_valid(at_most=at_most)[0]
            return run.checkpoint is not None

        if not group.run_on_main(choose, what="looking for a checkpoint"):  # collective
            return False
        saved = read_checkpoint(run, group)  # collective
        assert saved is not None
        log.warning(
            "step %d: %s: going back to the checkpoint of step %d",
            progress.step,
            why,
            saved.meta["step"],
        )
        with stepper.commit_lock:
            stepper.is_whole = False
            earlier = restore(self.parts, saved)
            earlier.most_samples = progress.most_samples
            for field in fields(Progress):
                setattr(progress, field.name, getattr(earlier, field.name))
            stepper.forget()
            stepper.is_whole = True
        if stepper.ledger is not None:
            stepper.ledger.close()
            stepper.ledger = self.parts.open_ledger(run.folder, step=progress.step)  # collective
        self.saver.forget([])
        self.report.go_back(progress.step)
        stepper.retry.finite.forget()
        self._equal_at = progress.step
        group.heartbeat.words[STEP] = progress.step  # a hang from here on is one of this step
        return True
