"""One run on this rank: its parts, its progress, and the work between its steps.

It puts these together, and calls each between steps: some times a second, at a report, at the end.
"""

import logging
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import chain, islice

from hardened_ddp.checkpoint.mirror import FINISH_S
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.data.batches.worker_pool import START_S
from hardened_ddp.errors import HardenedError, NonFiniteError
from hardened_ddp.guard.hang import Subject
from hardened_ddp.guard.stop import LastResort, StopRequest
from hardened_ddp.model.replica import refuse_new_parameters
from hardened_ddp.ranks.phase import SAMPLE, Phase
from hardened_ddp.ranks.resources import collect_as_usual
from hardened_ddp.reporting.goodput import Goodput
from hardened_ddp.reporting.status_writer import Work
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress
from hardened_ddp.step.step import Stepper
from hardened_ddp.training.evaluation import evaluate, note_evaluation, stops_early
from hardened_ddp.training.rollback import Rollback
from hardened_ddp.training.run_folder import RunFolder
from hardened_ddp.training.run_report import RunReport
from hardened_ddp.training.state import Saver, contents_of
from hardened_ddp.training.survivor_save import save_while_stuck

log = logging.getLogger(__name__)


# A batch of another shape makes a compiled model compile again, in the middle of a run.
COMPILE_LIMIT_S = 600.0
NO_LIMIT_S = 10 * 365 * 86400.0

MARGIN_S = 30.0  # time for the loader to find out by itself in which sample its workers hang


class Ending(StrEnum):
    """How training ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class Run:
    """One run on this rank."""

    def __init__(
        self,
        parts: Parts,
        progress: Progress,
        folder: RunFolder,
        goodput: Goodput,
        stop: StopRequest,
    ) -> None:
        """Put the parts together, and attach stop to the run. Collective: all ranks."""
        parts.group.tracker.begin("opening the reports of the run")
        self.parts = parts
        self.progress = progress
        self.folder = folder.folder
        self._mirror = folder.mirror
        self.stop = stop
        self.compares_every = parts.compares_every
        left_out = LeftOut(parts, self.folder)
        self.report = RunReport(parts, folder, goodput, left_out, step=progress.step)
        contents, config = contents_of(parts), parts.config.run
        self.saver = Saver(contents, folder.store, group=parts.group, config=config)
        self.stepper = Stepper(parts, progress, left_out=left_out, saver=self.saver)
        self.stepper.records.open(self.folder)  # collective
        folder.store.before_commit.insert(0, self.stepper.records.sync)
        if parts.config.run.on_event:
            folder.store.after_write.append(lambda at: parts.events.tell("checkpoint", path=at))
        parts.train_loader.open_folder(self.folder)
        self.rollback = Rollback(folder, self.stepper, self.saver, self.report)
        stop.watch(self.folder)
        self.subject = hang_subject(self)  # for the watch for hangs
        stop.last_resort = LastResort(self.subject.save, grace_s=parts.config.loop.stop_grace_s)
        parts.call_after_workers_start(stop.leave_children_alone)
        collect_as_usual()  # from here on garbage may hold large tensors
        parts.group.tracker.begin("reading the first batch")

    def windows(self) -> Iterator[tuple[Window | None, list[Batch]]]:
        """Iterate over the windows from where the run stands to its end, with their batches.

        A window is the samples of one optimizer step over all ranks; the batches are this rank's
        share of it, in micro-batches. (None, []) follows the last window of each epoch: of one
        whose evaluation was cut short, it comes alone. The caller advances progress by each window.
        """
        # WHY a chain: it adds no call of ours to a step.
        return chain.from_iterable(self._epochs())

    def _epochs(self) -> Iterator[Iterable[tuple[Window | None, list[Batch]]]]:
        """Give the windows of each epoch, until the run is over or was stopped in an evaluation."""
        parts, progress = self.parts, self.progress
        while not (self.stop.reason or stops_early(parts, progress)):
            found = parts.train_loader.windows(progress.epoch, progress.cursor, progress.step)
            found = islice(found, max(0, parts.length.total - progress.step))
            yield chain(found, [(None, [])])
            if progress.step >= parts.length.total:
                return

    def do_periodic_work(self) -> None:
        """Give a sign of life, and note the time; save if it is time to. Rank-local."""
        self.report.tick(self.progress.step)
        self.saver.tell_errors()
        if self.progress.step > 0 and self.saver.is_time():
            self.save()

    def save(self) -> None:
        """Start writing a checkpoint, unless its weights may be bad. Rank-local: on rank 0."""
        if not self.parts.group.is_main:  # WHY first: is_finite waits for the device
            return
        if self.stepper.is_finite() and not self.stepper.retry.given_up:
            self.saver.save(self.progress)

    def measure(self) -> bool:
        """Measure the test set, and save if it is the best so far; say whether. Collective.

        A stop meanwhile leaves it undone: stop.reason says so, and the next start does it.
        """
        progress = self.progress
        self.stepper.confirm_last_step()  # collective
        with self.stop.another_pace():
            lock = self.stepper.live.lock
            found = evaluate(self.parts, lock, should_stop=self.stop.poll)  # collective
        if found is None:
            log.warning(
                "%s: stopping in the evaluation after step %d", self.stop.reason, progress.step
            )
            return False
        self.report.log_evaluation(progress, found)
        best = note_evaluation(self.parts, progress, found)
        if best is not None:
            self.saver.save(progress, best=best)
        return best is not None

    def report_losses(self) -> None:
        sums = self.stepper.read_totals()  # collective
        refuse_new_parameters(self.parts.replica.module, self.parts.gradients.local.by_name)
        # WHY before saving: a checkpoint of poisoned weights would push out the good ones.
        if not math.isfinite(sums["loss"]):
            raise NonFiniteError(
                f"the training loss became {sums['loss']} by step {self.progress.step}; the "
                "checkpoints before it are kept",
                fix="lower --learning_rate, set --clip_grad_norm 1, or --amp off; then --resume "
                "the run. --continue_on_error leaves such steps out",
            )
        rate = float(self.parts.optimizer.param_groups[0]["lr"])
        self.report.log_training(self.progress, sums, rate, self.stepper.gradient.totals.grad_norm)

    def work(self) -> Work:
        parts, progress = self.parts, self.progress
        return Work(
            global_batch=parts.global_batch,
            epochs=parts.config.loop.epochs,
            split=lambda: self.report.split,
            epoch=lambda: progress.epoch,
            gpu_mib=lambda: self.report.gpu_mib,
            steps=lambda: parts.length.total if parts.length.is_known else None,
        )

    def close(self, status: Ending) -> None:
        """Finish the last write; close loaders and reports. Rank-local."""
        self.saver.close()
        self.stepper.records.close(is_failed=status is Ending.FAILED)
        self.parts.close()
        self.report.close(self.progress, status=status)
        self.send_rest(status)

    def send_rest(self, status: Ending) -> None:
        """Wait until the mirror has the last state; not for long where a launcher waits."""
        if self._mirror is not None:
            hurried_s = self.parts.config.loop.stop_grace_s / 3
            limit_s = FINISH_S if status is Ending.FINISHED else hurried_s
            self._mirror.close(limit_s=limit_s)


def hang_subject(run: Run) -> Subject:
    """Start to publish the progress of a run; return what the watch for hangs needs. Main thread.

    The watch calls it from another thread while the main thread may be stuck: so nothing here
    waits, and a short inconsistency does no harm.
    """
    parts, progress, stepper = run.parts, run.progress, run.stepper
    tracker = parts.group.tracker
    tracker.start_at(progress.step)
    parts.train_loader.reader.show_reading(tracker.words[SAMPLE : SAMPLE + 1])

    ending = threading.Lock()

    def save(error: HardenedError | None = None, gone: Sequence[int] = ()) -> None:
        # WHY no release: whoever saves first ends the process, and nobody else does so meanwhile
        ending.acquire()
        save_while_stuck(stepper, run.saver, run.folder, error=error, gone=gone)
        run.report.goodput.note(progress.step, is_last=True)  # the process ends after this
        run.send_rest(Ending.FAILED)
        parts.events.close(error)

    def samples(phase: int) -> Sequence[int]:
        batch = stepper.gradient.batch
        if phase == Phase.DATA:
            return parts.train_loader.reader.being_read()
        if phase == Phase.EVALUATION and parts.eval_loader is not None:
            return parts.eval_loader.reader.being_read()
        if phase in (Phase.FORWARD, Phase.BACKWARD) and batch is not None:
            return [int(index) for index in batch.indices]
        return ()

    def worker_stacks() -> dict[int, str]:
        others = {} if parts.eval_loader is None else parts.eval_loader.reader.stacks()
        return parts.train_loader.reader.stacks() | others

    return Subject(
        save=save,
        phase=None if stepper.device is None else stepper.device.phase_of,
        samples=samples,
        worker_stacks=worker_stacks,
        split=lambda: run.report.split,
        least_s=_least_s(parts),
    )


def _least_s(parts: Parts) -> dict[int, float]:
    """Return the phases of this run that may take longer than usual, with their limits."""
    found: dict[int, float] = {}
    limit_s = parts.config.data.loader_timeout_s
    if not limit_s:  # to wait for ever was asked for
        found[Phase.DATA] = found[Phase.EVALUATION] = NO_LIMIT_S
    else:
        # WHY more with workers: those that hang are replaced, and their sample is named
        has_workers = parts.train_loader.reader.num_workers > 0
        found[Phase.DATA] = max(limit_s, START_S) + MARGIN_S if has_workers else limit_s
    if parts.config.model.compile:
        found[Phase.FORWARD] = found[Phase.BACKWARD] = COMPILE_LIMIT_S
    return found
