"""Checkpoints of one run: complete or absent, verified, never executed.

Owns: CheckpointStore, which writes, finds and removes the folders step-000000123 of a run.
Does not own: the check of one folder (verify.py), the background write (snapshot.py), what the
tensors mean (training/). It has no lock: whoever writes holds the run's lock (run_lock.py).
What goes wrong here: a crash between any two calls, and a full disk. So everything is written under
a temporary name, the manifest last, then renamed into place; what is removed is renamed first.
Read next: verify.py, then stream.py.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from hardened_ddp.checkpoint.disk import (
    DISK_FULL_ERRORS,
    Disk,
    Retry,
    aside_path,
    drop_folder,
    is_real_folder,
    make_folders,
    remove_aside,
    replace_file,
    sweep_leftovers,
    write_file,
)
from hardened_ddp.checkpoint.manifest import (
    BEST_NAME,
    JSON,
    MANIFEST_NAME,
    SCHEMA,
    STATE_NAME,
    Best,
    FileRecord,
    Manifest,
    choose_drops,
    discard_newer,
    encode_manifest,
    list_discarded,
    list_steps,
    plain_meta,
    read_best_step,
    step_folder_name,
)
from hardened_ddp.checkpoint.stream import TensorStream, write_stream_to
from hardened_ddp.checkpoint.tensors import plan_file
from hardened_ddp.checkpoint.verify import (
    Found,
    Rejected,
    find_newest,
    verify_checkpoint,
)
from hardened_ddp.errors import CheckpointError
from hardened_ddp.settings.typed_command import shell_command

log = logging.getLogger(__name__)
T = TypeVar("T")


class CheckpointStore:
    """The checkpoints under one folder. One thread of one process writes at a time."""

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int,
        disk: Disk | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """before_commit: raises CheckpointError if this process may no longer write here."""
        self.root = root
        self._before_commit = [before_commit]
        self._keep_last = keep_last
        self._disk = Disk() if disk is None else disk
        self._kept_step: int | None = None

    def call_before_commit(self, call: Callable[[], None]) -> None:
        """Call this too before each commit; it raises OSError or CheckpointError to prevent it."""
        self._before_commit.insert(0, call)

    def write(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, JSON],
        best: Best | None = None,
    ) -> Path:
        """Write the checkpoint of step and return its folder. Rank-local: one rank calls it.

        With best it also becomes the best one. A valid checkpoint of this step that is there
        already is kept as it is. Raises CheckpointError; then the older ones are unchanged, except
        that the oldest one may have been dropped to make room on a full disk.
        """
        stream = TensorStream(tensors, plan=plan_file(tensors))
        return self.write_stream(step, stream=stream, meta=meta, best=best)

    def write_stream(
        self,
        step: int,
        *,
        stream: TensorStream,
        meta: Mapping[str, JSON],
        best: Best | None = None,
    ) -> Path:
        """Do what write does, with tensors that another thread may freeze meanwhile."""
        final = self.root / step_folder_name(step)
        plain = plain_meta(meta)
        try:
            self._prepare_root()
            is_there = os.path.lexists(final) and isinstance(self.verify(final), Found)
            if not is_there:
                self._write_folder(final, step=step, stream=stream, meta=plain)
        # WHY RuntimeError: copying from a GPU can raise it
        except (OSError, RuntimeError) as error:
            raise self._write_error(step, error, stream.plan.size_bytes) from error
        if best is not None:
            self.mark_best(step, best)
        self._prune(written=step)
        return final

    def mark_best(self, step: int, best: Best) -> None:
        """Make step's checkpoint the best one, which is never pruned. Raises CheckpointError."""
        if step not in list_steps(self.root):
            raise CheckpointError(f"step {step} has no checkpoint under {self.root}")
        content = json.dumps({"schema": SCHEMA, "step": step, **best}) + "\n"
        try:
            replace_file(self.root / BEST_NAME, content.encode(), disk=self._disk)
        except OSError as error:
            raise self._write_error(step, error, len(content)) from error

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint, or None."""
        return read_best_step(self.root)

    def steps(self) -> list[int]:
        """Return the steps that have a folder, newest first, valid or not."""
        return list_steps(self.root)

    def keep_newest(self, *, at_most: int) -> None:
        """Protect the newest checkpoint up to this step: a rollback would use it."""
        self._kept_step = max([s for s in self.steps() if s <= at_most], default=None)

    def find_valid(self) -> tuple[Found | None, list[Rejected]]:
        """Return the newest valid checkpoint, and the newer ones that were rejected."""
        return find_newest(self.root)

    def verify(self, path: Path) -> Found | Rejected:
        """Check one checkpoint's folder and every byte in it."""
        return verify_checkpoint(path)

    def discard_newer(self, step: int) -> list[Path]:
        """Set aside the checkpoints of later steps. Raises CheckpointError."""
        return discard_newer(self.root, step, disk=self._disk)

    def _prepare_root(self) -> None:
        if not os.path.lexists(self.root):
            make_folders(self.root, disk=self._disk)
        for folder in (self.root, self.root.parent):
            if not is_real_folder(folder):
                raise CheckpointError(
                    f"{folder} is not a folder but a link or a file that somebody else made: "
                    "nothing is written through it",
                    fix=f"look at it: {shell_command('ls', '-ld', folder)}",
                )
        sweep_leftovers(self.root, disk=self._disk)

    def _write_folder(
        self, final: Path, *, step: int, stream: TensorStream, meta: dict[str, JSON]
    ) -> None:
        partial = aside_path(final, what="partial")
        try:
            self._fill(partial, step=step, stream=stream, meta=meta)
            self._commit(partial, final)
        finally:
            self._abandon(partial)

    def _fill(
        self, partial: Path, *, step: int, stream: TensorStream, meta: dict[str, JSON]
    ) -> None:
        """Write the state, then the manifest, and sync both to the disk."""
        disk, retry = self._disk, self._retry_with_room()
        retry(lambda: disk.make_folder(partial))
        sha256 = write_stream_to(partial / STATE_NAME, stream, disk=disk, retry=retry)
        state = FileRecord(size_bytes=stream.plan.size_bytes, sha256=sha256)
        manifest = Manifest(step=step, meta=meta, state=state, tensors=stream.plan.specs)
        content = encode_manifest(manifest)
        write_file(partial / MANIFEST_NAME, content, disk=disk, retry=retry)
        disk.sync_folder(partial)

    def _commit(self, partial: Path, final: Path) -> None:
        """Rename a complete checkpoint into place; before that no reader sees it."""
        for call in self._before_commit:
            call()
        if os.path.lexists(final):
            log.warning("%s is not valid and is written again", final)
            drop_folder(final, disk=self._disk)
        try:
            self._disk.rename(partial, final)
        except OSError:
            # WHY check: NFS can lose the reply to a rename that succeeded, and if two survivors
            # save the same step, the second one fails here
            is_there = os.path.lexists(final) and isinstance(self.verify(final), Found)
            if not is_there:
                raise
        self._disk.sync_folder(self.root)

    def _abandon(self, partial: Path) -> None:
        if not os.path.lexists(partial):
            return
        try:
            remove_aside(partial, disk=self._disk)
        except OSError as error:
            log.warning("%s, an unfinished checkpoint, can't be removed: %s", partial, error)

    def _prune(self, *, written: int) -> None:
        protected = (written, self.best_step(), self._kept_step)
        for step in choose_drops(self.steps(), keep_last=self._keep_last, protected=protected):
            path = self.root / step_folder_name(step)
            try:
                drop_folder(path, disk=self._disk)
            except OSError as error:
                log.warning("%s, an old checkpoint, can't be removed: %s", path, error)

    def _retry_with_room(self) -> Retry:
        """Return a Retry that drops the oldest checkpoint, once, if the disk is full."""
        is_used = False

        def retry(act: Callable[[], T], /) -> T:
            nonlocal is_used
            try:
                return act()
            except OSError as error:
                if is_used or error.errno not in DISK_FULL_ERRORS:
                    raise
                is_used = True
                if not self._make_room():
                    raise
                return act()

        return retry

    def _make_room(self) -> bool:
        newest, _ = self.find_valid()
        protected = (newest.step if newest else None, self.best_step(), self._kept_step)
        drops = choose_drops(self.steps(), keep_last=0, protected=protected)
        candidates = list_discarded(self.root)
        candidates += [self.root / step_folder_name(step) for step in reversed(drops)]
        if not candidates:
            return False
        path = candidates[0]
        log.warning("the disk is full: %s, an old checkpoint, is dropped to make room", path)
        drop_folder(path, disk=self._disk)
        return True

    def _write_error(self, step: int, error: Exception, needed_bytes: int) -> CheckpointError:
        why = f"{type(error).__name__}: {error}"
        fix = "check the folder and the disk; the run continues, older checkpoints are unchanged"
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRORS:
            free_bytes = self._free_bytes()
            why = f"{error.strerror}: {needed_bytes} bytes are needed, and {free_bytes} are free"
            if free_bytes >= needed_bytes:
                why += " now: another program gave them back, or a quota or limit is below that"
            fix = (
                f"free space under {self.root}, or lower keep_last; check quotas and ulimit -f too"
            )
        return CheckpointError(
            f"the checkpoint of step {step} was not written to {self.root}: {why}", fix=fix
        )

    def _free_bytes(self) -> int:
        try:
            status = os.statvfs(self.root)
        except OSError:
            return 0
        return status.f_bavail * status.f_frsize
