"""The checkpoints of one run: complete or absent, and written while training continues.

Owns: CheckpointStore, which writes and removes the folders step-000000123 of a run, as .partial-...
first, the manifest last (what a crash leaves, such a one or .dropped-..., no reader takes, and the
next write removes); CheckpointWriter, its thread (one, one checkpoint in flight), and its copies of
live tensors. Who writes holds the lock.
Its submit copies the state, so that training may change it. From a GPU it is copied on a side
stream, beside the next forward and backward; before_update makes the update wait for that.
What goes wrong here: a crash between any two calls, a full disk; and with a GPU a change without
before_update: a load of other weights, buffers that a forward changes (name these in `volatile`:
their copies come before what follows in the stream of the caller).
"""

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hardened_ddp.checkpoint import folder
from hardened_ddp.checkpoint.disk import DISK_FULL_ERRORS, Disk, aside_path, is_real_folder
from hardened_ddp.checkpoint.tensors import Content, FilePlan, HostArena, live_content, plan_file
from hardened_ddp.errors import CheckpointError
from hardened_ddp.ranks.threads import HelperThread
from hardened_ddp.settings.typed_command import shell_command

log = logging.getLogger(__name__)

# Longer than a working disk needs for any state; a network disk that hangs never finishes.
_WAIT_S = 1800.0


class CheckpointStore:
    """The checkpoints under one folder. One thread writes at a time; of survivors, perhaps two."""

    def __init__(self, root: Path, *, keep_last: int, disk: Disk | None = None) -> None:
        self.root = root
        # Called before each commit; they raise OSError or CheckpointError to prevent it. The last
        # is the check that the lock is still held: others are inserted before it.
        self.before_commit: list[Callable[[], None]] = []
        # Called with the folder of each checkpoint that was written, in the thread that did.
        self.after_write: list[Callable[[Path], None]] = []
        self._keep_last, self.milestones = keep_last, 0  # and how many are kept of the whole run
        self._disk = Disk() if disk is None else disk
        self._kept_step: int | None = None

    def write(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor] | Content,
        meta: Mapping[str, folder.JSON],
        best: folder.Best | None = None,
    ) -> Path:
        """Write the checkpoint of step and return its folder. Rank-local: one rank calls it.

        tensors: or a copy of them. With best it also becomes the best one. A valid checkpoint of
        this step that is there already is kept as it is. Raises CheckpointError; then the older
        ones are unchanged, except that the oldest one may have been dropped to make room on a full
        disk.
        """
        content = tensors if isinstance(tensors, Content) else live_content(tensors)
        final = self.root / folder.step_folder_name(step)
        plain = folder.plain_meta(meta)
        try:
            self._prepare_root()
            if not isinstance(folder.verify_checkpoint(final), folder.Found):
                self._write_folder(final, content, step=step, meta=plain)
        # WHY RuntimeError: copying from a GPU can raise it
        except (OSError, RuntimeError) as error:
            raise self._write_error(step, error, content.plan.size_bytes) from error
        if best is not None:
            self.mark_best(step, best)
        self._prune(written=step)
        for call in self.after_write:
            call(final)
        return final

    def mark_best(self, step: int, best: folder.Best) -> None:
        """Make step's checkpoint the best one, which is never pruned. Raises CheckpointError."""
        content = json.dumps({"schema": folder.SCHEMA, "step": step, **best}) + "\n"
        try:
            self._disk.replace_file(self.root / folder.BEST_NAME, content.encode())
        except OSError as error:
            raise self._write_error(step, error, len(content)) from error

    def keep_newest(self, *, at_most: int) -> None:
        """Protect the newest checkpoint up to this step: a rollback would use it."""
        steps = [step for step in folder.list_steps(self.root) if step <= at_most]
        self._kept_step = max(steps, default=None)

    def _prepare_root(self) -> None:
        if not os.path.lexists(self.root):
            self._disk.make_folders(self.root)
        for place in (self.root, self.root.parent):
            if not is_real_folder(place):
                raise CheckpointError(
                    f"{place} is not a folder but a link or a file that somebody else made: "
                    "nothing is written through it",
                    fix=f"look at it: {shell_command('ls', '-ld', place)}",
                )
        self._disk.sweep(self.root)

    def _write_folder(
        self, final: Path, content: Content, *, step: int, meta: dict[str, folder.JSON]
    ) -> None:
        """Write a checkpoint; where the disk is full for it, drop an old one and try once more."""
        partial = aside_path(final, what="partial")
        try:
            try:
                self._fill(partial, content, step=step, meta=meta)
            except OSError as error:
                self._disk.sweep(self.root)
                if error.errno not in DISK_FULL_ERRORS or not self._make_room():
                    raise
                self._fill(partial, content, step=step, meta=meta)
            self._commit(partial, final)
        finally:
            # WHY here too: what a failed write leaves may fill the disk until the next one
            self._disk.sweep(self.root)

    def _fill(
        self, partial: Path, content: Content, *, step: int, meta: dict[str, folder.JSON]
    ) -> None:
        """Write the state, then the manifest, and sync both to the disk."""
        disk, plan = self._disk, content.plan
        disk.make_folder(partial)
        sha256 = disk.write_parts(partial / folder.STATE_NAME, content.parts())
        manifest = folder.Manifest(
            step=step, meta=meta, size_bytes=plan.size_bytes, sha256=sha256, tensors=plan.specs
        )
        disk.write_file(partial / folder.MANIFEST_NAME, folder.encode_manifest(manifest))
        disk.sync_folder(partial)

    def _commit(self, partial: Path, final: Path) -> None:
        """Rename a complete checkpoint into place; before that no reader sees it."""
        for call in self.before_commit:
            call()
        if os.path.lexists(final):
            log.warning("%s is not valid and is written again", final)
            self._disk.drop_folder(final)
        try:
            self._disk.rename(partial, final)
        except OSError:
            # WHY check: NFS can lose the reply to a rename that succeeded, and if two survivors
            # save the same step, the second one fails here
            if not isinstance(folder.verify_checkpoint(final), folder.Found):
                raise
        self._disk.sync_folder(self.root)

    def _prune(self, *, written: int) -> None:
        for step in self._drops(written, keep_last=self._keep_last, milestones=self.milestones):
            path = self.root / folder.step_folder_name(step)
            try:
                self._disk.drop_folder(path)
            except OSError as error:
                log.warning("%s, an old checkpoint, can't be removed: %s", path, error)

    def _drops(self, newest: int | None, **kept: int) -> list[int]:
        """Return the steps to drop, newest first: not this one, the best, or a rollback's."""
        protected = (newest, folder.read_best_step(self.root), self._kept_step)
        steps = folder.list_steps(self.root)
        return folder.choose_drops(steps, protected=protected, **kept)

    def _make_room(self) -> bool:
        newest, _ = folder.find_newest(self.root)
        drops = self._drops(newest.step if newest else None, keep_last=0)
        candidates = sorted(p for p in self.root.iterdir() if p.name.startswith(folder.DISCARDED))
        candidates += [self.root / folder.step_folder_name(step) for step in reversed(drops)]
        if not candidates:
            return False
        path = candidates[0]
        log.warning("the disk is full: %s, an old checkpoint, is dropped to make room", path)
        self._disk.drop_folder(path)
        return True

    def _write_error(self, step: int, error: Exception, needed_bytes: int) -> CheckpointError:
        why = f"{type(error).__name__}: {error}"
        fix = "check the folder and the disk; the run continues, older checkpoints are unchanged"
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
            why = f"{error.strerror}: {needed_bytes} bytes are needed"
            fix = f"free space under {self.root}, or lower keep_last; check quotas, ulimit -f too"
        return CheckpointError(
            f"the checkpoint of step {step} was not written to {self.root}: {why}", fix=fix
        )


@dataclass(frozen=True, slots=True)
class WriteCost:
    """What one write cost."""

    # How long training stood still; on the CPU also the writer's own CPU time, which training could
    # have used. WHY not what a GPU waits for copies: writing takes far longer, and is limited, too.
    training_s: float
    disk_s: float  # how long the disk was in use


class CheckpointWriter:
    """Writes checkpoints while training continues. Call all methods from the training thread."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._arena = HostArena()
        self._copy_stream: torch.cuda.Stream | None = None
        self._thread: HelperThread | None = None
        self._reserving: HelperThread | None = None
        self._copied: torch.cuda.Event | None = None  # after the copies from a GPU under way
        self._error: CheckpointError | None = None
        self._stall_s = 0.0
        self.cost: WriteCost | None = None  # of the last finished write; None: there is none

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, folder.JSON],
        volatile: Collection[str] = (),
        best: folder.Best | None = None,
    ) -> bool:
        """Start writing a checkpoint; False if one is still in flight.

        While is_copying, call before_update before tensors change that are not named in volatile.
        Raises CheckpointError if something can't be stored.
        """
        if self.is_busy:
            return False
        started_at = time.perf_counter()
        plain = folder.plain_meta(meta)
        plan = plan_file(tensors)
        try:
            copied = self._copied = self._copy(tensors, plan, volatile)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise CheckpointError(
                f"the state of step {step} is not saved: no memory to copy {plan.data_bytes} bytes",
                fix="give the job more memory; the run continues, older checkpoints are unchanged",
            ) from error
        # WHY one for each write: so there is none when nothing is written.
        write = partial(self._write, step, plan, copied, plain, best, tensors if copied else {})
        self._thread = HelperThread(write, name=f"checkpoint-{step}")
        self._stall_s = time.perf_counter() - started_at
        self._thread.start()
        return True

    def pin_ahead(self, size_bytes: int) -> None:
        """Pin memory for the copies from a GPU in a thread: 12 GB would hold a save up for 4 s."""

        def pin() -> None:
            with suppress(MemoryError):  # the first save tells that
                self._reserve(size_bytes, pinned=True)

        self._reserving = HelperThread(pin, name="pin-memory")
        self._reserving.start()

    @property
    def is_copying(self) -> bool:
        return self._copied is not None

    def before_update(self) -> None:
        """Let the current stream wait for the copies from a GPU, if there are some under way."""
        copied, self._copied = self._copied, None
        if copied is not None:
            # WHY no synchronize: the update waits on the GPU, and this thread continues
            torch.cuda.current_stream().wait_event(copied)

    def poll(self) -> CheckpointError | None:
        """Return the error of a write that failed since the last poll. Training can continue."""
        error, self._error = self._error, None
        return error

    def close(self, *, timeout_s: float = _WAIT_S) -> None:
        """Wait for the write in flight. Raises CheckpointError if it takes longer; poll after."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"the checkpoint in flight ({self._thread.name}) is not written after "
                f"{timeout_s:.0f} s: the disk under {self._store.root} hangs",
                fix="older checkpoints are unchanged; check the disk: "
                + shell_command("df", self._store.root),
            )
        self._thread = None

    def _write(
        self,
        step: int,
        plan: FilePlan,
        copied: torch.cuda.Event | None,
        meta: dict[str, folder.JSON],
        best: folder.Best | None,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """tensors: being copied. WHY given: memory that is freed meanwhile would be reused."""
        try:
            if copied is not None:
                copied.synchronize()
            began_at = time.perf_counter()
            content = Content(plan, partial(self._arena.read, plan.data_bytes))
            self._store.write(step, tensors=content, meta=meta, best=best)
            # WHY not with a GPU: there the writer's CPU core would be idle
            work_s = time.thread_time() if copied is None else 0.0
            self.cost = WriteCost(self._stall_s + work_s, time.perf_counter() - began_at)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # WHY broad: nothing else reports what a thread raises
            log.exception("the checkpoint of step %d failed", step)
            self._error = CheckpointError(f"the checkpoint of step {step} failed: {error!r}")
        finally:
            self._copied = None  # WHY: a failed write needs no copies

    def _copy(
        self, tensors: Mapping[str, Tensor], plan: FilePlan, volatile: Collection[str]
    ) -> torch.cuda.Event | None:
        """Copy tensors to the arena; those of a GPU at the latest when the event is reached."""
        if self._reserving is not None:
            self._reserving.join()
        on_gpu = {name for name, tensor in tensors.items() if tensor.is_cuda}
        self._reserve(plan.data_bytes, pinned=bool(on_gpu))
        # WHY volatile in the compute stream: these copies must come before the next forward; the
        # others run in parallel to it
        beside = on_gpu.difference(volatile)
        for name in tensors.keys() - beside:
            self._arena.copy(tensors[name], plan.spans[name][0])
        if not on_gpu:
            return None
        if self._copy_stream is None:
            # WHY a priority: those of 0 are also given to NCCL, which would wait for the copies
            self._copy_stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            for name in beside:
                self._arena.copy(tensors[name], plan.spans[name][0])
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return copied

    def _reserve(self, size_bytes: int, *, pinned: bool) -> None:
        try:
            self._arena.reserve(size_bytes, pinned=pinned)
        except RuntimeError as error:
            log.warning(
                "%d bytes of host memory can't be pinned (%s): ordinary memory is used, and "
                "training stops while a checkpoint is copied from the GPU",
                size_bytes,
                error,
            )
            self._arena.reserve(size_bytes, pinned=False)
