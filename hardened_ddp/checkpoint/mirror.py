"""A copy of a run on an object store or another disk, by fsspec: --mirror URL.

Below URL/RUN_NAME are data/ (each name is used once), manifests/ (what belongs to a checkpoint:
names, sizes, sha256), newest.json (the newest manifest), owner.json (which run this is) and
claims/ (one for each start; the last start writes). A checkpoint is sent in this order: data,
manifest, pointer; older ones are removed only after the manifest was read back. A start on an empty
machine fetches the newest one whose hashes are right.
Uploads run in a thread of their own. What fails is tried again, counted and told, never raised.
What goes wrong here: a server that accepts and stays silent, so each call has a limit; listings
that are stale, so none is cached; two writers, so claims are made by a conditional put.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.checkpoint.folder import BEST_NAME, find_newest, read_best_step, step_folder_name
from hardened_ddp.errors import CheckpointError, ConfigError, MissingPackageError, RunFolderError
from hardened_ddp.ranks.threads import call_within
from hardened_ddp.reporting.run_json import read_json
from hardened_ddp.reporting.sinks import ReportWriter, write_text, write_whole
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, MIRROR_STATUS, SAVED_SETTINGS
from hardened_ddp.settings.typed_command import pip_command

log = logging.getLogger(__name__)
T = TypeVar("T")
_remove = partial(shutil.rmtree, ignore_errors=True)  # what stays the next start removes

_MANIFEST_NAME = re.compile(r"\d{6}-\d+\.\d+-\d+-[0-9a-f]{8}\.json")
OWNER, CLAIMS, DATA, MANIFESTS, NEWEST = "owner.json", "claims", "data", "manifests", "newest.json"
ID_NAME = "mirror.json"
_ASIDE = ".mirror-"
# Of a run folder, besides the checkpoint.
_BESIDE = (SAVED_SETTINGS, f"{CHECKPOINTS_NAME}/{BEST_NAME}", "*.jsonl", "summary.json", "ledger/*")
_CALL_S, _BYTES_PER_S = 30.0, 1e6  # the limit of a call, and what a slow network sends
_TRIES, _PAUSE_S = 4, 1.0
FINISH_S = 600.0  # how long the end of a run waits for what is still to be sent


def check_mirror(url: str) -> None:
    """Raise ConfigError or MissingPackageError if fsspec can't open such URLs here."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        told = f"--mirror {url}: fsspec knows no {protocol}://"
        raise ConfigError(told, fix="choose one of: file, s3, gs, abfs, hf, sftp") from error
    except ImportError as error:
        package = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}.get(protocol)
        fix = pip_command("requirements-extras.txt", package or "fsspec")
        raise MissingPackageError(f"--mirror {url}: {error}", fix=fix) from error


class Objects:
    """The objects below a URL. Each call has a limit, and raises what the store raises."""

    def __init__(self, url: str) -> None:
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if url.startswith(("s3:", "s3a:")):
            # WHY: by default a refused connection takes 12 s
            options["config_kwargs"] = {"retries": {"max_attempts": 1}, "connect_timeout": 10}
        if url.startswith(("file:", "local:")):
            options["auto_mkdir"] = True
        self.url = url
        self._fs, self._root = fsspec.core.url_to_fs(url, **options)

    def _call(self, name: str, *given: Any, size_bytes: int = 0, **more: Any) -> Any:
        """Call a method of the file system within its limit. Any: as fsspec has no types."""
        limit_s = _CALL_S + size_bytes / _BYTES_PER_S
        if self._fs.async_impl:
            import fsspec.asyn

            # WHY not the method without _: s3fs waits for ever for a server that accepts a PUT and
            # stays silent; no timeout of botocore ends that
            call = getattr(self._fs, f"_{name}")
            return fsspec.asyn.sync(self._fs.loop, call, *given, timeout=limit_s, **more)
        call = partial(getattr(self._fs, name), *given, **more)
        return call_within(call, limit_s, uses_gpu=False)

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def put(self, path: Path, name: str) -> None:
        """Send a file. WHY not open(): that commits half of it if the body raises."""
        self._call("put_file", str(path), self._key(name), size_bytes=path.stat().st_size)

    def get(self, name: str, path: Path, size_bytes: int) -> None:
        self._call("get_file", self._key(name), str(path), size_bytes=size_bytes)

    def write(self, name: str, content: bytes) -> None:
        self._call("pipe_file", self._key(name), content)

    def create(self, name: str, content: bytes) -> None:
        """Write an object that is not there yet. Raises FileExistsError: somebody was first."""
        self._call("pipe_file", self._key(name), content, mode="create")

    def read(self, name: str) -> bytes:
        content: bytes = self._call("cat_file", self._key(name))
        return content

    def names(self, folder: str) -> list[str]:
        """List all objects below a folder, by their names in it."""
        try:
            found = self._call("find", self._key(folder))
        except FileNotFoundError:
            return []
        start = len(self._key(folder)) + 1
        return sorted(str(key)[start:] for key in found)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._call("rm_file", self._key(name))


@dataclass(slots=True)
class Mirror:
    """Sends the checkpoints of one start of a run. On each rank; the rank that writes one sends."""

    url: str
    folder: Path
    claim: str
    keep_last: int
    _objects: Objects | None = None
    _waiting: Path | None = None  # what is sent next: see _snapshot
    _newest: Path | None = None
    _is_closing: bool = False
    _is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sent: dict[str, dict[str, Any]] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=lambda: {"num_sent": 0, "num_failed": 0})
    _writer: ReportWriter = field(
        default_factory=lambda: ReportWriter(flush=lambda: True, name="mirror")
    )

    def take(self, checkpoint: Path) -> None:
        """Send a checkpoint, and what is beside it, in the background. Never raises."""
        if self._is_over:
            return
        self._newest = checkpoint
        try:
            snapshot = self._snapshot(checkpoint)
        except OSError as error:
            self._tell_failure(f"{checkpoint.name} can't be prepared", error)
            return
        with self._lock:  # WHY one: where sending is slower than saving, only the newest matters
            older, self._waiting = self._waiting, snapshot
        if older is not None:
            _remove(older)
        else:
            self._writer.do(self._send_waiting)

    def close(self, *, limit_s: float = FINISH_S) -> None:
        """Send what was written at the end of the run, too; wait for it. Never raises."""
        self._is_closing = True
        if self._newest is not None and self._newest.is_dir():
            self.take(self._newest)
        if not self._writer.close("the mirror to get the rest", limit_s=limit_s):
            log.warning("the newest state is not on the mirror %s", self.url)
        self._is_over = True
        if self.told["num_failed"]:
            log.warning("mirror: %(num_failed)d tries failed, %(num_sent)d sent", self.told)

    def _snapshot(self, checkpoint: Path) -> Path:
        """Link or copy the files of a run, as they are now, into a folder aside."""
        aside = self.folder / f"{_ASIDE}{checkpoint.name}-{uuid.uuid4().hex[:12]}"
        named = [path for pattern in _BESIDE for path in self.folder.glob(pattern)]
        beside = [path for path in named if path.is_file() and not path.is_symlink()]
        try:
            for path in (*checkpoint.iterdir(), *beside):
                target = aside / path.relative_to(self.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                if path.parent == checkpoint:
                    with suppress(OSError):
                        os.link(path, target)  # WHY: the run may drop it while it is sent
                if not target.exists():
                    shutil.copyfile(path, target)
        except OSError:
            _remove(aside)
            raise
        return aside

    def _send_waiting(self) -> None:
        with self._lock:
            aside, self._waiting = self._waiting, None
        assert aside is not None  # take put it there
        step = int(aside.name.split("-")[2])
        for number in range(_TRIES):
            try:
                self._send(step, aside)
                self._note("num_sent", sent_step=step, sent_at=round(time.time(), 3))
                break
            except FileExistsError as error:
                self._is_over = True
                self._tell_failure("another start of this run has taken over", error)
                break
            except Exception as error:  # WHY broad: a store raises what it likes
                self._tell_failure(f"step {step} was not sent", error)
                if self._is_closing:  # the end waits for each try
                    break
                time.sleep(_PAUSE_S * 2**number)
        _remove(aside)

    def _send(self, step: int, aside: Path) -> None:
        if self._objects is None:
            self._objects = Objects(self.url)
        objects = self._objects
        # WHY by claim and time, not by step: after a rollback the newest is of an earlier step
        name = f"{self.claim}-{time.time():017.6f}-{step}-{uuid.uuid4().hex[:8]}"
        files: dict[str, dict[str, Any]] = {}
        for path in sorted(path for path in aside.rglob("*") if path.is_file()):
            place = path.relative_to(aside).as_posix()
            files[place], before = _entry_of(path), self._sent.get(place, {})
            if before.items() >= files[place].items():
                files[place] = before
            else:
                files[place] |= {"object": f"{DATA}/{name}/{place}"}
                objects.put(path, f"{DATA}/{name}/{place}")
        if objects.names(CLAIMS)[-1:] != [self.claim]:
            raise FileExistsError(f"{self.url}/{CLAIMS}")
        manifest = json.dumps({"format": 1, "step": step, "files": files}).encode()
        objects.create(f"{MANIFESTS}/{name}.json", manifest)
        if objects.read(f"{MANIFESTS}/{name}.json") != manifest:
            raise OSError(f"{MANIFESTS}/{name}.json reads back differently")
        objects.write(NEWEST, json.dumps({"manifest": f"{name}.json"}).encode())
        self._sent = files  # WHY only these: a later removal keeps what the newest one names
        self._prune(objects)
        log.info("step %d is on the mirror %s", step, self.url)

    def _prune(self, objects: Objects) -> None:
        """Remove all but the newest and the best checkpoints, and what no manifest names."""
        best = read_best_step(self.folder / CHECKPOINTS_NAME)
        kept: dict[int, dict[str, dict[str, Any]]] = {}  # of each step the newest manifest
        dropped = []
        for name in _manifests_of(objects):
            step = _step_of(name)
            try:
                if step not in kept and (len(kept) < self.keep_last or step == best):
                    kept[step] = _read_manifest(objects, name)
                else:
                    dropped.append(name)
            except (ValueError, KeyError, TypeError):  # half of one: no checkpoint
                dropped.append(name)
        used = {entry["object"] for files in kept.values() for entry in files.values()}
        for name in dropped:
            objects.remove(f"{MANIFESTS}/{name}")
        for name in objects.names(DATA):
            if f"{DATA}/{name}" not in used:
                objects.remove(f"{DATA}/{name}")

    def _tell_failure(self, what: str, error: Exception) -> None:
        self._note("num_failed")
        log.warning("mirror %s: %s: %s: %s", self.url, what, type(error).__name__, error)

    def _note(self, counter: str, **sent: float) -> None:
        """Tell the commands watch and report; a full disk costs no more than that."""
        self.told |= {counter: self.told[counter] + 1, **sent}
        path = self.folder / MIRROR_STATUS
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            write_whole(path, json.dumps({"url": self.url, **self.told}) + "\n")


def mirror_url(mirror: str, run_name: str) -> str:
    """Return where the copy of a run is; empty: without --mirror there is none."""
    return mirror and f"{mirror.rstrip('/')}/{run_name}"


def open_mirror(url: str, folder: Path) -> str:
    """Take over the mirror of a run for this start; return the claim. On rank 0.

    Raises RunFolderError if it belongs to another run, which each one is for a new folder.
    """
    objects = Objects(url)
    for left in folder.glob(f"{_ASIDE}*"):
        _remove(left)
    mine, owner = _ids_of(folder, objects)
    try:
        if not owner:
            owner = mine = mine or uuid.uuid4().hex
            write_text(folder / ID_NAME, json.dumps({"id": mine}) + "\n")
            objects.create(OWNER, json.dumps({"id": mine}).encode())
        if mine != owner:
            raise FileExistsError
        number = 1 + max((int(name[:6]) for name in objects.names(CLAIMS)), default=0)
        objects.create(f"{CLAIMS}/{number:06d}", b"")
    except FileExistsError as error:
        raise RunFolderError(
            f"the mirror {url} belongs to another run, or one is starting there",
            fix="choose another --run_name, or another --mirror",
        ) from error
    return f"{number:06d}"


def fetch(url: str, folder: Path) -> None:
    """Fetch the newest valid checkpoint if the mirror has a newer one than the folder. On rank 0.

    Raises CheckpointError if there are some and none is valid, and what the store raises.
    """
    objects = Objects(url)
    mine, owner = _ids_of(folder, objects)
    here, _ = find_newest(folder / CHECKPOINTS_NAME)
    if not owner or ((mine or here) and mine != owner):
        return  # there is nothing, or it is not of this run, which open_mirror refuses
    newest = str(_read_json(objects, NEWEST).get("manifest", ""))
    # the one that the pointer names first, then by age
    names = sorted(_manifests_of(objects), key=lambda name: name != newest)
    at_least = -1 if here is None else here.step + 1
    rejected = 0
    for name in names:
        if (step := _step_of(name)) < at_least:
            break  # what is here is as new
        try:
            size_mb = _fetch_one(objects, name, folder) / 1e6
            log.info("fetched the checkpoint of step %d (%.1f MB) from %s", step, size_mb, url)
            break
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            log.warning("passed over the checkpoint %s of %s: %s", name, url, error)
            rejected += 1
    else:
        if rejected and here is None:
            raise CheckpointError(
                f"none of the {rejected} checkpoints of {url} is valid",
                fix="the log says what is wrong with each; start afresh: another --run_name",
            )
    Disk().make_folders(folder)
    write_text(folder / ID_NAME, json.dumps({"id": owner}) + "\n")


def _fetch_one(objects: Objects, name: str, folder: Path) -> int:
    """Fetch what a manifest names, and put it in place if all is right; return its size."""
    files = _read_manifest(objects, name)
    Disk().make_folders(folder / CHECKPOINTS_NAME)
    aside = folder / f"{_ASIDE}{uuid.uuid4().hex[:12]}"
    final = f"{CHECKPOINTS_NAME}/{step_folder_name(_step_of(name))}"
    try:
        for place, entry in files.items():
            target = aside / place
            target.parent.mkdir(parents=True, exist_ok=True)
            objects.get(entry["object"], target, entry["size_bytes"])
            if not (found := _entry_of(target)).items() <= entry.items():
                raise ValueError(f"{place} is not what its manifest says: {found}")
        if not (aside / final).is_dir():
            raise ValueError(f"it has no {final}")
        for place in files:
            if not place.startswith(f"{final}/"):
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                os.replace(aside / place, folder / place)
        if os.path.lexists(folder / final):  # one that is not valid
            Disk().drop_folder(folder / final)
        os.replace(aside / final, folder / final)  # WHY last: complete or absent
    finally:
        _remove(aside)
    return sum(entry["size_bytes"] for entry in files.values())


def _manifests_of(objects: Objects) -> list[str]:
    """List the manifests, newest first; names of others, such as .DS_Store, are none."""
    return [name for name in objects.names(MANIFESTS)[::-1] if _MANIFEST_NAME.fullmatch(name)]


def _step_of(manifest_name: str) -> int:
    return int(manifest_name.split("-")[2])


def _read_manifest(objects: Objects, name: str) -> dict[str, dict[str, Any]]:
    """Read which files belong to a checkpoint. Raises ValueError for what is none of ours."""
    content = json.loads(objects.read(f"{MANIFESTS}/{name}"))
    files: dict[str, dict[str, Any]] = content["files"]
    for place, entry in files.items():
        for path in (PurePosixPath(place), PurePosixPath(entry["object"])):
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"it names {path}, which is outside of the run")
    return files


def _read_json(objects: Objects, name: str) -> dict[str, Any]:
    """Read an object of JSON; empty if there is none, or half of one."""
    with suppress(FileNotFoundError, ValueError):
        value = json.loads(objects.read(name))
        return value if isinstance(value, dict) else {}
    return {}


def _ids_of(folder: Path, objects: Objects) -> tuple[str, str]:
    """Return the run's id as its folder has it, and that of the mirror's owner; empty: none."""
    mine = read_json(folder / ID_NAME, []).get("id", "")
    return mine, _read_json(objects, OWNER).get("id", "")


def _entry_of(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size_bytes": path.stat().st_size, "sha256": sha256}


def with_tries(call: Callable[[], T], *, url: str) -> T:
    """Call what reads a mirror at a start, again if it fails. Raises CheckpointError."""
    for number in range(_TRIES):
        try:
            return call()
        except (CheckpointError, RunFolderError):
            raise
        except Exception as error:  # WHY broad: a store raises what it likes
            log.warning("mirror %s: %s: %s", url, type(error).__name__, error)
            problem = error
            time.sleep(_PAUSE_S * number)
    raise CheckpointError(
        f"the mirror {url} can't be read: {type(problem).__name__}: {problem}",
        fix="check address, network and credentials; then the same command again",
    ) from problem
