"""Rollback of a wrong state: to a checkpoint, or to the state of the majority of ranks.

What happens when retrying a step (step/retry.py) is not enough, within this process:

- several steps in a row without a finite loss or gradient, under --continue_on_error: all ranks go
  back to the last checkpoint after which a step succeeded; if it happens again, all ranks stop.
- replicas that are no longer equal (guard/divergence.py). Since the last comparison, gradients of
  the rank that differs went into the weights of all. So all ranks go back to a checkpoint from
  before it. If there is none, the ranks that differ get the state of the majority, which keeps
  these gradients; without a majority all ranks stop.
"""

import logging
from typing import NoReturn

from hardened_ddp.checkpoint.folder import discard_newer
from hardened_ddp.checkpoint.tensors import specs_of
from hardened_ddp.errors import DivergenceError, NonFiniteError, StepError
from hardened_ddp.guard.divergence import Divergence, compare_replicas, differing_on_many
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.step import Stepper, is_due
from hardened_ddp.training import state
from hardened_ddp.training.run_folder import RunFolder, read_checkpoint
from hardened_ddp.training.run_report import RunReport

log = logging.getLogger(__name__)


class Rollback:
    """Checks whether the state of the run is right, and goes back if it is not.

    compare_or_roll_back says whether it was replaced: by an earlier one, or by another rank's.
    """

    def __init__(
        self, folder: RunFolder, stepper: Stepper, saver: state.Saver, report: RunReport
    ) -> None:
        self.folder = folder
        self.stepper = stepper
        self.parts, self.progress = stepper.parts, stepper.progress
        self.saver = saver
        self.report = report
        loop = self.parts.config.loop
        self._retries = loop.step_retry == "on"
        self._rollback_after = loop.rollback_after if self._retries else 0
        self._equal_at = -1  # the last step after which replicas were known to be equal
        # Replicas differed at or before this step, and were not found equal after it yet.
        self._differed_until = -1
        self._given_up_until = -1
        self._note_equal()  # all ranks have just got the same state

    def compare_or_roll_back(self) -> bool:
        """Compare replicas; go back if they differ, or after many steps with NaN. Collective."""
        given_up, step = self.stepper.retry.given_up, self.progress.step
        every = self.parts.compares_every
        is_last = step >= self.parts.length.total
        if every and (is_last or len(given_up) == 1 or is_due(step, every)):
            self._equalize()  # collective
        if self.progress.step != step:
            return True
        if self._rollback_after and len(given_up) >= self._rollback_after:
            self._leave_given_up(list(given_up))  # collective
            return True
        return False

    def repair_or_raise(self, error: NonFiniteError | StepError) -> None:
        """Make the state good after an error that all ranks raised, or raise it. Collective."""
        if isinstance(error, NonFiniteError):
            # WHY: NaN may be the first sign of a rank with bad memory.
            can_differ = self.parts.compares_every and self.parts.gradients.tells_of_failures
            is_repaired = can_differ and self._equalize(f": {error.message}")  # collective
        else:
            why, step = "what a forward has changed can't be put back", self.progress.step
            is_repaired = not error.is_undone
            is_repaired = is_repaired and self._go_back(at_most=step, why=why)  # collective
        if not is_repaired:
            raise error

    def _leave_given_up(self, steps: list[str]) -> None:
        """Go back to before the steps that had no finite loss or gradient. Collective."""
        what = f"{len(steps)} steps in a row had no finite loss or gradient"
        is_again = self.stepper.last_good < self._given_up_until - 1
        self._given_up_until = self.progress.step
        # WHY that limit: after such a checkpoint a step succeeded. A later one holds the weights of
        # the steps that failed, which may be the cause.
        step, last_good = self.progress.step, self.stepper.last_good
        if not is_again and self._go_back(at_most=last_good, why=what):  # collective
            self.stepper.gradient.left_out.note_rollback(step, self.progress.step, what)
            return
        why = "and no checkpoint is from before them"
        why = "again, after going back to a checkpoint" if is_again else why
        raise NonFiniteError(
            f"{what}, {why}: {'; '.join(steps)}",
            fix="lower --learning_rate, set --clip_grad_norm 1, or --amp off; then --resume the "
            "run. --rollback_after 0 leaves such steps out without limit",
        )

    def _equalize(self, why: str = "") -> bool:
        """Compare the replicas; make them equal if they differ; return whether. Collective."""
        self._take_up_late_buffers()  # collective
        replicas = state.replicated_tensors(self.parts)
        found = compare_replicas(self.parts.group, replicas)  # collective
        if found is None:
            self._note_equal()
            return False
        step = self.progress.step
        log.error("[DDP-S05] step %d: the replicas are not equal: %s%s", step, found.text, why)
        self.report.num_diverged += 1
        is_again = self._differed_until >= 0
        self._differed_until = step + 1
        if not self._retries or is_again:
            self._stop(found, step, "again, after they were made equal" if is_again else "")
        if self._go_back(at_most=self._equal_at, why="the replicas differed"):  # collective
            self._differed_until = step
        elif found.source is not None:
            log.warning(
                "there is no earlier checkpoint with equal replicas: gradients of rank %s since "
                "step %d stay in the weights",
                " and ".join(map(str, found.odd)),
                max(0, self._equal_at),
            )
            self._take_from(found.source)  # collective
        else:
            self._stop(found, step, "and no checkpoint is from before")
        return True

    def _take_up_late_buffers(self) -> None:
        """Make buffers equal from now on that began to move after the first steps. Collective."""
        parts = self.parts
        attributes = parts.replica.attributes
        attributes.agree(parts.group.gather_json(attributes.changes()))  # collective
        buffers = parts.replica.buffers
        late = differing_on_many(parts.group, buffers.still())  # collective
        if not late:
            return
        text = (
            "step %d: buffers began to change in forward, and differ between the ranks: %s. From "
        )
        text += "now on they are made equal after each step, like the statistics of a BatchNorm"
        log.warning(text, self.progress.step, ", ".join(late), extra=ON_EVERY_RANK)
        self.saver.close()  # WHY: a write under way reads the tensors that change here
        with self.stepper.live.changing():
            buffers.add(late)
            buffers.equalize(parts.group)  # collective

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
            fix="suspect the memory of that rank's machine: start again without it, with "
            "--resume newest; the saved checkpoints are from before",
        )

    def _take_from(self, source: int) -> None:
        """Give all ranks the state of one of them. Collective."""
        parts = self.parts
        self.saver.close()  # WHY: a write under way reads the tensors that change here
        tensors = state.collect_tensors(parts, with_base=True)
        mine = None
        if parts.group.launch.rank == source:
            mine = state.Saved(
                specs_of(tensors),
                state.collect_meta(parts, self.progress),
                read=lambda names: {name: tensors[name].detach() for name in names},
            )
        saved = state.share_state(parts.group, mine)  # collective
        if mine is None:
            tensors.clear()  # WHY: the state that is replaced would stay beside the new one
        with self.stepper.live.changing():
            state.restore(parts, saved)  # collective
        self._discard_doubtful()
        self._equal_at = step = self.progress.step
        text = "step %d: all ranks continue with the state of rank %d"
        log.warning(text, step, source, extra=ON_EVERY_RANK)

    def _discard_doubtful(self) -> None:
        """Set aside what was saved since the replicas were known to be equal. Rank-local.

        WHY: rank 0, which saves, may be the one that differs.
        """
        self.saver.close()
        if self.parts.group.launch.is_main:
            root = self.folder.store.root
            self.saver.forget(discard_newer(root, self._equal_at))

    def _go_back(self, *, at_most: int, why: str) -> bool:
        """Go back to the newest valid checkpoint up to at_most; False: none. Collective."""
        group, stepper, progress = self.parts.group, self.stepper, self.progress
        with group.tracker.within(Phase.CHECKPOINT):
            self.saver.close()  # WHY: the checkpoint being written may be the one to take
            saved = read_checkpoint(self.folder, group, at_most=at_most)  # collective
            if saved is None or not state.has_all_that_moves(self.parts, saved):
                return False
            left_at = progress.step
            text = "step %d: %s: going back to the checkpoint of step %d"
            log.warning(text, left_at, why, saved.meta["step"], extra=ON_EVERY_RANK)
            with stepper.live.changing():
                progress.go_back_to(state.restore(self.parts, saved))  # collective
                stepper.start_over()
            stepper.records.open(self.folder.folder)  # collective
            self.saver.forget([])
            self.report.go_back(left_at, progress.step)
            self._equal_at = progress.step
            group.tracker.start_at(progress.step)  # hangs are now reported for this step
        return True
