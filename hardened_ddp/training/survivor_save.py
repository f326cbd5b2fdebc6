"""The survivor save: what is saved when training ends by an error, and by which rank.

Every rank holds the whole state of the last completed step, so as long as one rank lives, nothing
is lost: one surviving rank writes it, and a restart continues with the next step. Which one: rank 0
if it can, else the first to claim it in the store, and the next one if it fails; the others wait
for that. Without a store each survivor tries; the second finds the checkpoint already written
(checkpoint/store.py).
A half updated state (Stepper.live) is not saved, and after some errors none is (_NOT_SAVED). Of a
GPU that is stuck in an all-reduce, what it has finished is saved (step/async_device.py).
No collective here: some rank may be dead.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hardened_ddp.errors import (
    CheckpointError,
    CrashLoopError,
    DivergenceError,
    HardenedError,
    NonFiniteError,
    PeerLostError,
)
from hardened_ddp.model.moving_buffers import NO_COPIES
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.store import do_once
from hardened_ddp.ranks.threads import call_within
from hardened_ddp.reporting.run_json import Json, read_lines
from hardened_ddp.reporting.sinks import write_text
from hardened_ddp.step.async_device import Boundary, beside, copy_beside
from hardened_ddp.step.step import Stepper
from hardened_ddp.training.state import Saver, Tensors, collect_tensors

log = logging.getLogger(__name__)

FAILURES_NAME = "failures.jsonl"
NUM_ATTEMPTS = 3  # failures in a row at one step that end a run's automatic restarts
HEAD_START_S = 1.0  # how long the other ranks wait for rank 0, which normally writes checkpoints

# How long to wait for a GPU, which may be within a step; torchrun kills after 30 s.
DEVICE_LIMIT_S = 15.0
COPY_LIMIT_S = 60.0  # how long to wait for the copy of a state from a GPU; 10 GB take a few seconds
NOTHING = -1  # instead of a step: nothing was to be saved, and that is told
LOCK_LIMIT_S = 3.0  # how long to wait for an update of the weights under way

# WHY: weights with NaN, or wrong ones, would replace good ones; and if the disk or the checkpoints
# are the problem, another checkpoint does not help.
_NOT_SAVED = (NonFiniteError, DivergenceError, CheckpointError, CrashLoopError)


def save_as_survivor(error: Exception, stepper: Stepper, saver: Saver, folder: Path) -> None:
    """Write the state of the last completed step if this rank is the one to do it. Rank-local.

    Never raises: the error that ended training is the one to report.
    """
    if not is_saved_after(error):
        return
    # WHY first: the other ranks wait for this one, and one of them may be the one that saves
    stepper.parts.group.leave()
    _save(stepper, saver, folder, error=error, limit_s=DEVICE_LIMIT_S)


def is_saved_after(error: Exception) -> bool:
    """Return whether the last state is good, and can be written, after this error."""
    is_seen_early = isinstance(error, NonFiniteError) and not error.reached_weights
    return is_seen_early or not isinstance(error, _NOT_SAVED)


def save_while_stuck(
    stepper: Stepper,
    saver: Saver,
    folder: Path,
    *,
    error: HardenedError | None = None,
    gone: Sequence[int] = (),
) -> None:
    """Save the last completed step beside a main thread that waits for another rank. Rank-local.

    error: the reason, for the list of failures. gone: ranks whose process ended. Runs on its own
    thread; the process ends after it. Never raises.
    """
    # WHY no release: if the main thread's wait ends after all, the weights must not change.
    if not stepper.live.lock.acquire(timeout=LOCK_LIMIT_S):
        log.warning("weights are being updated: they are not saved, the last checkpoint stays")
        return
    _save(stepper, saver, folder, error=error, limit_s=LOCK_LIMIT_S, gone=gone)


def refuse_crash_loop(
    group: Group, step_here: int, folder: Path, *, next_samples: Callable[[], list[int]] = list
) -> None:
    """Raise CrashLoopError if the last attempts all failed at a step still to be done. Rank-local.

    Only in a restart by the launcher: a person who starts the run again may have fixed the cause.
    """
    failures = read_failures(folder)[-NUM_ATTEMPTS:] if group.launch.attempt else []
    steps = {failure["step"] for failure in failures}
    # WHY may the run stand before it: where nothing can be saved, it resumes from a checkpoint
    if len(failures) < NUM_ATTEMPTS or len(steps) > 1 or step_here > (step := steps.pop()):
        return
    causes = sorted({str(failure["error"]) for failure in failures})
    found = next_samples() if step_here == step else []
    samples = f". Its samples: {found}" if found else ""
    raise CrashLoopError(
        f"{NUM_ATTEMPTS} attempts failed at step {step}, one after the other: "
        f"{'; '.join(causes)}{samples}",
        fix=f"fix the cause; then: {group.launch.command('--resume', folder)}",
    )


def read_failures(folder: Path) -> list[Json]:
    """Read the failure of each attempt, oldest first; what can't be read is left out."""
    lines = [
        line for line in read_lines(folder / FAILURES_NAME, []) if {"step", "error"} <= {*line}
    ]
    # WHY the last of an attempt: where the store is gone with rank 0, several ranks note theirs
    attempts = [line.get("attempt", -n) for n, line in enumerate(lines, start=1)] + [None]
    return [line for n, line in enumerate(lines) if attempts[n] != attempts[n + 1]]


def _save(
    stepper: Stepper,
    saver: Saver,
    folder: Path,
    *,
    error: Exception | None,
    limit_s: float,
    gone: Sequence[int] = (),
) -> None:
    """Save the last step boundary, while no other thread commits a step. See save_once.

    limit_s: how long to wait for a device that runs behind the host.
    """

    where = Rescue(stepper.progress.step, None)

    def find() -> Rescue:
        boundary = _find(stepper, limit_s)
        if boundary is None:
            return where
        write = partial(_write, stepper, saver, boundary, limit_s)
        return Rescue(boundary.progress.step, None if _warn_if_lost(stepper) else write)

    save_once(stepper.parts.group, folder, find, where=where, error=error, gone=gone)


@dataclass(frozen=True, slots=True)
class Rescue:
    """A state that this rank can save."""

    step: int
    # Write it; return the step if it is another one by then. None: it can't be saved.
    write: Callable[[], int | None] | None


def save_once(
    group: Group,
    folder: Path,
    find: Callable[[], Rescue],
    *,
    where: Rescue,
    error: Exception | None,
    gone: Sequence[int] = (),
) -> None:
    """Save what find finds, here or on another rank; return when it is. Rank-local; never raises.

    where: the step to note as failed if find raises. error: the reason, for the list of failures.
    gone: ranks whose process ended.
    """

    def write() -> bool:
        """Return False if another rank should try it."""
        assert where.write is not None
        try:
            step = where.write() or where.step
        except Exception:  # WHY broad: whatever it is, another rank may be able to save
            log.warning("the last state could not be saved by this rank", exc_info=True)
            return False
        if step > 0:
            resume = group.launch.command("--resume", folder)
            log.warning("the state after step %d is saved; to resume: %s", step, resume)
        return True

    try:
        try:
            where = find()
        finally:  # WHY also if it raises: a GPU with an error answers nothing; restarts must end
            if error is not None:
                _note_failure(folder, where.step, error, group)
        if where.write is None or where.step == 0:
            return
        shared = None if group.is_main else group.shared
        has_left = 0 in gone or (shared is not None and shared.has_left(0))
        do_once(
            group.store,
            f"survivor_save/{where.step}",
            write,
            rank=group.launch.rank,
            world_size=group.world_size,
            head_start_s=0.0 if has_left else HEAD_START_S,
        )
    except Exception:  # WHY broad: the error that ended training must be the one that is reported
        log.warning("the last state could not be saved", exc_info=True)


def _find(stepper: Stepper, limit_s: float) -> Boundary | None:
    """Return the last step boundary whose state this rank has, if it may be saved. Rank-local."""
    live, progress = stepper.live, replace(stepper.progress)
    if not live.is_at_boundary:
        return None
    if stepper.device is None:
        # WHY is_finite: the loss is checked when it is reported, which may be some steps ago
        is_good = progress.step == 0 or stepper.is_finite()
        return Boundary(progress, live.buffers_before or NO_COPIES, 0.0) if is_good else None
    boundary = None
    with suppress(TimeoutError):  # a driver that is stuck answers nothing
        boundary = call_within(partial(stepper.device.find, limit_s), limit_s + COPY_LIMIT_S)
    if boundary is None:
        log.warning("the device does not answer: nothing is saved, the last checkpoint stays")
    return boundary


def _write(stepper: Stepper, saver: Saver, boundary: Boundary, limit_s: float) -> int:
    """Write the state of a boundary; return its step. Rank-local; raises if it can't."""
    parts, device, tensors = stepper.parts, stepper.device, None
    if device is None and boundary.buffers:  # a forward is under way
        tensors = collect_tensors(parts, buffers=boundary.buffers)
    while device is not None:
        tensors = call_within(partial(_copy, stepper, boundary), COPY_LIMIT_S)
        if tensors is None:
            log.warning("the loss is not finite: nothing is saved, the last checkpoint stays")
            return NOTHING
        if boundary.still_holds():
            break
        # the device went on after all: its next state is good, too
        if (found := device.find(limit_s)) is None:
            raise TimeoutError("the device does not answer")
        boundary = found
    with beside(parts.group.device):
        if boundary.next is not None:
            stepper.take_back_on_host(boundary.next.attempt)
        saver.save_in_need(boundary.progress, tensors=tensors)
    return boundary.progress.step


def _copy(stepper: Stepper, boundary: Boundary) -> Tensors | None:
    """Copy the state of a boundary to the host; None: its losses are not finite. Rank-local."""
    parts = stepper.parts
    with beside(parts.device):
        if not math.isfinite(float(boundary.loss)):
            return None
    return copy_beside(collect_tensors(parts, buffers=boundary.buffers), parts.device)


def _warn_if_lost(stepper: Stepper) -> bool:
    """Warn if a forward under way changed what nobody has as it was; return whether. Rank-local."""
    lost = stepper.gradient.lost(
        is_under_way=stepper.live.buffers_before is not None, reads_bits=stepper.device is None
    )
    if lost:
        log.warning(
            "the forward under way changed %s for the first time: nothing is saved, the last "
            "checkpoint stays",
            ", ".join(lost[:8]),
        )
    return bool(lost)


def _note_failure(folder: Path, step: int, error: Exception, group: Group) -> None:
    """Note why this attempt ends, unless another rank has. Rank-local."""
    mine = str(group.launch.rank)
    if group.store.claim("survivor_save/noted", mine) != mine:
        return
    text = error.message if isinstance(error, HardenedError) else f"{type(error).__name__}: {error}"
    entry = {"step": step, "is_peer": isinstance(error, PeerLostError), "error": text}
    entry["attempt"] = group.launch.attempt
    write_text(folder / FAILURES_NAME, json.dumps(entry) + "\n", mode="a")
