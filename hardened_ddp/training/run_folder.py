"""The folder of a run: found or made, locked, and the checkpoint in it to start from.

Owns the meaning of --resume, which rank 0 decides and all follow. A fresh start by hand makes a new
run folder; a restart by the launcher, the same --run_name, or --resume PATH continues the old one
from its newest checkpoint that proves valid. What is passed over is named with its reason.
Does not own: verification and the lock (checkpoint/), loading into the parts (state.py).
"""

import hashlib
import itertools
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from hardened_ddp.checkpoint.disk import Disk, RunLock, check_held, refuse_links, unusable_folder
from hardened_ddp.checkpoint.folder import (
    Found,
    discard_newer,
    find_newest,
    load_checkpoint,
    newest_valid,
    open_checkpoint,
)
from hardened_ddp.checkpoint.mirror import Mirror, fetch, mirror_url, open_mirror, with_tries
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError, RunFolderError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch, environment
from hardened_ddp.reporting.ending import RUN
from hardened_ddp.reporting.events import Events
from hardened_ddp.reporting.log import add_log_file
from hardened_ddp.reporting.summary import finished_at
from hardened_ddp.settings.config import Config, RunConfig
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, SAVED_SETTINGS
from hardened_ddp.settings.layers import Resolved
from hardened_ddp.settings.record import dump
from hardened_ddp.training.state import Saved, share_state

log = logging.getLogger(__name__)

Choose = Callable[[], Found | None]  # On rank 0: the checkpoint to start from; None: there is none.

_JOBS = ".jobs"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.]+")


@dataclass
class RunFolder:
    """The folder of a run, and what rank 0 holds of it."""

    folder: Path
    store: CheckpointStore  # its checkpoints; on all ranks: any of them may save
    checkpoint: Found | None  # What to start from; None: from the beginning. Rank 0 only.
    lock: RunLock | None  # rank 0 only: no second run writes here
    mirror: Mirror | None  # where the checkpoints are copied to
    events: Events  # tells the user's command what happens in this run

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: object, error: BaseException | None, *where: object) -> None:
        """Tell how the run ended, and release the folder."""
        self.events.close(error)
        if self.lock is not None:
            self.lock.close()

    @property
    def step(self) -> int:
        """Of the checkpoint to start from. Rank 0 only."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def is_finished(self, group: Group, step: int) -> bool:
        """Whether the run came to its end at this step: tested, summed up. Collective."""
        at = group.run_on_main(lambda: finished_at(self.folder), what="the summary")  # collective
        if at == step:
            log.info("%s is finished: %d steps are done", self.folder, step)
        return bool(at == step)

    def begin(self, settings: Resolved, saved: Saved | None) -> None:
        """Say what is resumed; of a new run, write the settings at once."""
        if saved is None:
            self.write_settings(settings)
        else:
            log.info("resuming %s from step %d", self.folder, saved.meta["step"])

    def write_settings(self, settings: Resolved) -> None:
        """Write the settings beside the run, on rank 0; a resume takes them up.

        WHY replace: the next resume needs the earlier ones if the disk is full, or we die here.
        """
        if self.lock is None:
            return
        text = dump(settings.config, settings.sources)
        try:
            Disk().replace_file(self.folder / SAVED_SETTINGS, text.encode())
        except OSError as error:
            raise RunFolderError(
                f"the settings can't be written to {self.folder}: {error}",
                fix="check the disk, or choose another --output_dir",
            ) from error


def open_run(settings: Resolved, group: Group) -> RunFolder:
    """Find or make the run folder, lock it, and choose the checkpoint. Collective: all ranks.

    Raises MainRankError on every rank if rank 0 can't use the folder or found nothing to resume.
    """
    run = settings.config.run
    output = Path(run.output_dir)
    # WHY all ranks: with elastic nodes, the node of rank 0 may be a new one.
    notes = group.gather_json(_noted_folder(output, group.launch))  # collective

    def find() -> tuple[Path, Choose, str]:
        earlier = next(filter(Path.is_dir, map(Path, filter(None, notes))), None)
        is_new = run.resume == "never" and earlier is None
        url = "" if is_new else _fetch(settings)
        folder, choose = find_place(settings, earlier)
        return folder, choose, mirror_url(run.mirror, folder.name) if is_new else url

    opened = _open(group, find, run)  # collective
    if group.is_local_main:
        _note_folder(output, group.launch, opened.folder)
    return opened


def open_folder(folder: Path, group: Group, *, keep_last: int) -> RunFolder:
    """Make and lock the folder of a user's own loop; find its newest checkpoint. Collective.

    Raises as open_run does.
    """
    path = folder.absolute()

    def find() -> tuple[Path, Choose, str]:
        try:
            Disk().make_folders(path)
        except OSError as error:
            raise unusable_folder(path, error) from error
        return path, partial(newest_valid, path / CHECKPOINTS_NAME), ""

    return _open(group, find, RunConfig(keep_last=keep_last))  # collective


def _open(group: Group, find: Callable[[], tuple[Path, Choose, str]], run: RunConfig) -> RunFolder:
    """Open the folder that find gives on rank 0, with its mirror's URL. Collective: all ranks."""
    chosen: list[tuple[Found | None, RunLock]] = []  # on rank 0
    jobs = _jobs_of(group)  # collective

    def open_it() -> list[str]:
        folder, choose, url = find()
        refuse_links(folder)
        lock = RunLock.acquire(folder, jobs=jobs, restart=group.launch.attempt)
        try:
            chosen.append((choose(), lock))
            claim = with_tries(partial(open_mirror, url, folder), url=url) if url else ""
        except (RunFolderError, CheckpointError):
            lock.close()
            raise
        return [str(folder), lock.token, url, claim]

    opened = group.run_on_main(open_it, what="opening the run folder")  # collective
    name, token, url, claim = opened
    folder = Path(name)
    environment()[RUN] = name
    add_log_file(folder / "logs", rank=group.launch.rank)
    store = CheckpointStore(folder / CHECKPOINTS_NAME, keep_last=run.keep_last)
    store.milestones = run.keep_milestones
    # who saves proves by the lock's token that the run is still ours
    store.before_commit.append(partial(check_held, folder, token))
    mirror = Mirror(url, folder, claim, run.keep_last) if claim else None
    if mirror is not None:
        store.after_write.append(mirror.take)
    checkpoint, lock = chosen[0] if chosen else (None, None)
    return RunFolder(folder, store, checkpoint, lock, mirror, Events(run.on_event, group.launch))


def _fetch(settings: Resolved) -> str:
    """Fetch from the mirror what is newer than here; return its URL, empty if there is none.

    Raises CheckpointError if it can't be read, and there is nothing here to go on from.
    """
    run = settings.config.run
    if not run.mirror:
        return ""
    folder = settings.run_folder or Path(run.output_dir) / run.run_name
    url = mirror_url(run.mirror, folder.name)
    try:
        with_tries(partial(fetch, url, folder), url=url)
    except CheckpointError:
        if not (folder / CHECKPOINTS_NAME).is_dir():
            raise
        log.warning("this start goes on without the mirror %s", url)
        return ""
    return url


def read_checkpoint(run: RunFolder, group: Group, *, at_most: int | None = None) -> Saved | None:
    """Tell all ranks of the checkpoint to load, which rank 0 reads later. Collective: all ranks.

    It is the one chosen at the start; with at_most the newest valid one, of that step or before.
    Returns None if there is none.
    """

    def choose() -> Found | None:
        root, found = run.folder / CHECKPOINTS_NAME, run.checkpoint
        if at_most is not None:
            found = find_newest(root, at_most=at_most)[0]
        # WHY: newer ones, passed over or not wanted, would be taken by the next start.
        for path in discard_newer(root, found.step) if found else ():
            log.warning("set aside %s, which is newer than the checkpoint resumed from", path)
        return found

    return share_checkpoint(group, choose)  # collective


def share_checkpoint(group: Group, choose: Choose) -> Saved | None:
    """Tell all ranks of the checkpoint that rank 0 chooses; None: there is none. Collective."""
    chosen: list[Saved] = []  # on rank 0

    def find() -> bool:
        if found := choose():
            tensors, meta = found.manifest.tensors, found.manifest.meta
            chosen.append(
                Saved(tensors, meta, read=lambda names: load_checkpoint(found, names=names)[0])
            )
        return bool(chosen)

    if not group.run_on_main(find, what="looking at the checkpoint"):  # collective
        return None
    return share_state(group, chosen[0] if chosen else None)  # collective


def find_place(settings: Resolved, earlier: Path | None) -> tuple[Path, Choose]:
    """Decide the run folder, and how to choose the checkpoint in it. On rank 0 only.

    earlier: the folder of this job's earlier attempts. It goes on there, whatever --resume says:
    that was for the first attempt.
    Raises RunFolderError if the folder can't be used. To choose raises CheckpointError if a resume
    was asked for and no checkpoint there is valid.
    """
    config, continued = settings.config, settings.run_folder
    output, wanted = Path(config.run.output_dir), config.run.resume
    if earlier is not None:
        return earlier, partial(newest_valid, earlier / CHECKPOINTS_NAME)
    if wanted not in ("auto", "never"):
        assert continued is not None  # else the settings were refused
        named_one = continued if wanted == "newest" else Path(wanted)
        return continued, partial(open_checkpoint, named_one)
    named = output / config.run.run_name if config.run.run_name else None
    if wanted == "never" and named is not None and (named / CHECKPOINTS_NAME).exists():
        raise RunFolderError(
            f"{named} holds a run already; with --resume never it is not continued",
            fix="choose another --run_name, or --resume auto",
        )
    if wanted == "auto" and named is not None and named.is_dir():
        return named, partial(newest_valid, named / CHECKPOINTS_NAME)
    return create_run_folder(config), lambda: None


def _note_folder(output: Path, launch: Launch, folder: Path) -> None:
    """Leave a note by which later attempts of this job find its folder again."""
    if not output.is_dir():  # --resume PATH to a run elsewhere: later attempts are told the same
        return
    try:
        Disk().make_folders(output / _JOBS)
        for key in {launch.job_key, launch.agent_key} - {""}:
            note = output / _JOBS / key
            note.unlink(missing_ok=True)
            with suppress(FileExistsError):  # another node of this job has just written the same
                Disk().write_file(note, f"{folder.resolve()}\n".encode())
    except OSError as error:
        log.warning("a restart by the launcher will not find this run by itself: %s", error)


def _noted_folder(output: Path, launch: Launch) -> str:
    """Name the folder of this job's earlier attempts; empty if there was none.

    WHY the restart count: a Slurm job may train one model after the other; an agent starts one.
    """
    keys = [launch.agent_key, launch.job_key if launch.attempt > 0 else ""]
    for note in (output / _JOBS / key for key in keys if key):
        if note.is_file():
            return note.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _jobs_of(group: Group) -> set[str]:
    """Return short marks of this job: two attempts of it share one, two jobs none. Collective.

    WHY several: after a node was lost, the new attempt may have only some agents in common with
    the one before. The run id is the user's, who may use it twice.
    """
    launch = group.launch
    keys = (launch.job_key, launch.agent_key, launch.run_id and f"run-id-{launch.run_id}")
    mine = [hashlib.sha256(key.encode()).hexdigest()[:12] for key in keys if key]
    return {mark for marks in group.gather_json(mine) for mark in marks}  # collective


def create_run_folder(config: Config, *, now: datetime | None = None) -> Path:
    """Create a new folder for a run and return its path. Rank-local: one rank calls it.

    Without run_name the name consists of the time, the model and the dataset; a name that is taken
    gets a number. Raises RunFolderError.
    """
    output_dir, run_name = Path(config.run.output_dir), config.run.run_name
    if not run_name:
        started = (datetime.now() if now is None else now).strftime("%Y%m%d-%H%M%S")
        run_name = f"{started}-{_as_name(config.model.model)}-{_as_name(config.data.dataset)}"
    disk = Disk()
    try:
        disk.make_folders(output_dir)
        # WHY resolved: the output folder may be a link to a bigger disk; a run folder may not
        root = output_dir.resolve(strict=True)
        for number in itertools.count(1):
            folder = root / (run_name if number == 1 else f"{run_name}-{number}")
            try:
                disk.make_folder(folder)
            except FileExistsError:
                continue
            disk.sync_folder(root)
            break
    except OSError as error:
        raise unusable_folder(output_dir, error) from error
    return folder


def _as_name(text: str) -> str:
    """Turn a model's or dataset's name or import path into a part of a folder's name."""
    return _NOT_IN_NAMES.sub("-", text).strip("-.")[:30] or "run"
