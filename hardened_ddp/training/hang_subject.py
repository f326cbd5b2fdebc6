"""What the watch for hangs needs from a run: its progress, and how to save its state.

Owns finding the samples that are processed in a phase. Called from another thread while the main
thread may be stuck: so nothing here waits, and a short inconsistency does no harm.
Does not own: when a rank counts as hung, and what follows (guard/hang.py).
"""

from collections.abc import Sequence
from pathlib import Path

from hardened_ddp.errors import HangError
from hardened_ddp.guard.hang import HangWatch, Subject
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.heartbeat import SAMPLE
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.settings.config import Config
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.step import Stepper
from hardened_ddp.training.run_report import RunReport
from hardened_ddp.training.saving import Saver
from hardened_ddp.training.survivor_save import save_while_stuck

COMPILE_LIMIT_S = 600.0
"""A batch of another shape makes a compiled model compile again, in the middle of a run."""

NO_LIMIT_S = 10 * 365 * 86400.0

MARGIN_S = 30.0
"""Time for the loader to find out by itself in which sample its workers hang."""


def watch_for_hangs(config: Config, group: Group, folder: Path) -> HangWatch:
    """Create the watch of this run. Entering it is collective: all ranks."""
    return HangWatch(
        group,
        folder,
        hang_after_s=config.loop.hang_after_s,
        timeout_s=config.device.timeout_s,
    )


def hang_subject(stepper: Stepper, saver: Saver, folder: Path, report: RunReport) -> Subject:
    """Start to publish the progress of this run; return what the watch needs. Main thread."""
    parts, progress = stepper.parts, stepper.progress
    tracker = parts.group.tracker
    tracker.start_at(progress.step)
    parts.train_loader.stream.show_reading(tracker.words[SAMPLE : SAMPLE + 1])

    def save(error: HangError | None = None) -> None:
        save_while_stuck(stepper, saver, folder, error=error)
        report.goodput.note(progress.step, is_last=True)  # the process ends after this

    def samples(phase: int) -> Sequence[int]:
        batch = stepper.gradient.batch
        if phase == Phase.DATA:
            return parts.train_loader.stream.being_read()
        if phase == Phase.EVALUATION and parts.eval_loader is not None:
            return parts.eval_loader.stream.being_read()
        if phase in (Phase.FORWARD, Phase.BACKWARD) and batch is not None:
            return [int(index) for index in batch.indices]
        return ()

    def worker_stacks() -> dict[int, str]:
        found = parts.train_loader.stream.stacks()
        if parts.eval_loader is not None:
            found |= parts.eval_loader.stream.stacks()
        return found

    return Subject(
        save=save,
        samples=samples,
        worker_stacks=worker_stacks,
        split=report.splits.newest,
        least_s=_least_s(parts),
    )


def _least_s(parts: Parts) -> dict[int, float]:
    """Return the phases of this run that may take longer than usual, with their limits."""
    found: dict[int, float] = {}
    stream, config = parts.train_loader.stream, parts.config
    limit_s = config.data.loader_timeout_s
    if not limit_s:  # to wait for ever was asked for
        found[Phase.DATA] = found[Phase.EVALUATION] = NO_LIMIT_S
    elif stream.num_workers == 0:
        found[Phase.DATA] = limit_s
    else:
        # WHY: workers that hang are replaced, and their sample is named, without any restart
        found[Phase.DATA] = limit_s + MARGIN_S
    if config.model.compile:
        found[Phase.FORWARD] = found[Phase.BACKWARD] = COMPILE_LIMIT_S
    return found
