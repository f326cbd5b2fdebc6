"""A checkpoint's folder: its manifest, its name, and the check that only we could have written it.

Owns: manifest.json and its own digest, so that every change of a byte is detected; the check of a
folder before anything in it is used (type, owner, mode, manifest, size and sha256), whose result is
Found, or Rejected with the reason; the choice of the newest valid one, and of what to drop.
Does not own: writing, and removing old ones (store.py).
What goes wrong here: the newest checkpoint can be broken; then the next older one is used. A
manifest may contain anything, so the type of each field is checked before it is used.
"""

import hashlib
import io
import json
import logging
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from torch import Tensor

from hardened_ddp.checkpoint.disk import Disk, is_real_folder
from hardened_ddp.checkpoint.tensors import TensorSpec, differences, read_tensors, specs_of
from hardened_ddp.errors import CheckpointError
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME, STEP_FOLDER

log = logging.getLogger(__name__)

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.safetensors"
BEST_NAME = "best.json"
DISCARDED = "discarded-"
_MAX_BEST_BYTES = 4096
# A manifest needs about 100 bytes per tensor: this is room for half a million of them.
MAX_MANIFEST_BYTES = 64 * 2**20
# More than any file system allows for one file, so a larger size can't be right.
_MAX_FILE_BYTES = 2**60

Best = Mapping[str, Any]  # what best.json says besides the step: metric, value, direction


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    meta: dict[str, JSON]  # the caller's data, such as the epoch and the cursor
    size_bytes: int
    sha256: str  # of state.safetensors, as is its size
    tensors: dict[str, TensorSpec]


def plain_meta(meta: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return a copy of meta as it will be read back. Raises CheckpointError if it is not JSON."""
    try:
        return cast(dict[str, JSON], json.loads(json.dumps(meta)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"meta can't be stored in a checkpoint: {error}") from error


def encode_manifest(manifest: Manifest) -> bytes:
    record = {"size_bytes": manifest.size_bytes, "sha256": manifest.sha256}
    body: dict[str, object] = {
        "schema": SCHEMA,
        "step": manifest.step,
        "meta": manifest.meta,
        "files": {STATE_NAME: record},
        "tensors": {n: {"shape": s.shape, "dtype": s.dtype} for n, s in manifest.tensors.items()},
    }
    body["digest"] = _digest(body)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def decode_manifest(raw: bytes) -> Manifest:
    """Read manifest.json. Raises ValueError that says what is wrong with it."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST_NAME} is not JSON: {error}") from error
    match body:
        case {"schema": int(schema)} if schema > SCHEMA:
            told = f"has schema {schema}, newer than {SCHEMA}, which this version reads: update it"
            raise ValueError(f"{MANIFEST_NAME} {told}")
        case {"digest": str(digest), **rest} if digest == _digest(rest):
            pass
        case _:
            raise ValueError(f"{MANIFEST_NAME} was changed after it was written")
    match body:
        case {
            "schema": int(schema),
            "step": int(step),
            "meta": dict(meta),
            "files": {"state.safetensors": {"size_bytes": int(size), "sha256": str(sha256)}},
            "tensors": dict(tensors),
        } if all(map(_is_count, (schema, step, size))):
            specs = {name: _read_spec(entry) for name, entry in tensors.items()}
            return Manifest(step=step, meta=meta, size_bytes=size, sha256=sha256, tensors=specs)
    raise ValueError(f"{MANIFEST_NAME} has no usable schema, step, meta, files or tensors")


def _read_spec(entry: object) -> TensorSpec:
    match entry:
        case {"shape": list(shape), "dtype": str(dtype)} if all(map(_is_count, shape)):
            return TensorSpec(tuple(shape), dtype)
    raise ValueError(f"{MANIFEST_NAME} has no usable shape and dtype for each tensor")


def step_folder_name(step: int) -> str:
    return f"step-{step:09d}"  # WHY fixed width: sorting by name is sorting by step


def list_steps(root: Path) -> list[int]:
    """Return the steps that have a folder under root, newest first, valid or not."""
    if not is_real_folder(root):
        return []
    matches = filter(None, (STEP_FOLDER.fullmatch(path.name) for path in root.iterdir()))
    return sorted((int(match[1]) for match in matches), reverse=True)


def read_best_step(root: Path) -> int | None:
    """Return the step that best.json names if it has a folder, else None."""
    try:
        with (root / BEST_NAME).open("rb") as file:
            step = json.loads(file.read(_MAX_BEST_BYTES))["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # WHY no warning: there is no best checkpoint yet, or the next better one replaces the file
        return None
    return step if type(step) is int and step in list_steps(root) else None


def choose_drops(
    steps: Sequence[int], *, keep_last: int, protected: Collection[int | None], milestones: int = 0
) -> list[int]:
    """Return which of the steps, newest first, to drop: not among the newest, not protected.

    Nor the first one of each of so many equal spans of the run. WHY a span grows by doubling: the
    first of two spans is the first of both, so what was dropped is never wanted again.
    """
    span = 1
    while steps and steps[0] // span >= milestones > 0:
        span *= 2
    first = {step // span: step for step in steps} if milestones else {}
    return [s for s in steps[keep_last:] if s not in protected and s != first.get(s // span)]


def discard_newer(root: Path, step: int) -> list[Path]:
    """Set aside the checkpoints of later steps, and return their paths.

    For a rollback, or a resume from an older checkpoint: otherwise the next start would find the
    newer ones. No start finds them any more, but a person can, and they are removed when the disk
    is full. Raises CheckpointError.
    """
    disk = Disk()
    newer = [root / step_folder_name(other) for other in list_steps(root) if other > step]
    try:
        for path in newer:
            target = path.with_name(f"{DISCARDED}{path.name}")
            if os.path.lexists(target):
                disk.drop_folder(target)
            disk.rename(path, target)
            disk.sync_folder(root)
    except OSError as error:
        raise CheckpointError(f"{path} can't be set aside: {error}") from error
    return newer


def _is_count(value: object) -> bool:
    # WHY type and not isinstance: True is an int, but not a size
    return type(value) is int and 0 <= value <= _MAX_FILE_BYTES


def _digest(body: Mapping[Any, object]) -> str:  # Any: keys of JSON
    # WHY sorted and compact: the digest covers the content, and not spaces and line ends
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A checkpoint that was verified: every byte is as it was written."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A folder that looks like a checkpoint but can't be used."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def verify_checkpoint(path: Path) -> Found | Rejected:
    """Check a checkpoint's folder and every byte in it. Rank-local; reads the whole state."""
    try:
        _check_trust(path, os.lstat(path), wants_folder=True)
        with _open_regular(path / MANIFEST_NAME) as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
        if len(raw) > MAX_MANIFEST_BYTES:
            raise ValueError(f"{MANIFEST_NAME} has more than {MAX_MANIFEST_BYTES} bytes")
        manifest = decode_manifest(raw)
        if path.name.startswith("step-") and path.name != step_folder_name(manifest.step):
            raise ValueError(f"{MANIFEST_NAME} belongs to step {manifest.step}")
        with _open_regular(path / STATE_NAME) as file:
            _check_content(file, manifest)
    except FileNotFoundError as error:
        name = Path(error.filename).name
        why = ": its writing was not finished" if name == MANIFEST_NAME else ""
        return Rejected(path=path, reason=f"{name} is missing{why}")
    except OSError as error:
        return Rejected(path=path, reason=f"can't be read: {error}")
    except (ValueError, RecursionError) as error:
        return Rejected(path=path, reason=str(error))
    return Found(path=path, manifest=manifest)


def find_newest(root: Path, *, at_most: int | None = None) -> tuple[Found | None, list[Rejected]]:
    """Return the newest valid checkpoint under root, and the newer ones that are not valid.

    at_most: ignore checkpoints of later steps.
    """
    rejected: list[Rejected] = []
    if root.is_symlink():
        return None, [Rejected(path=root, reason="is a symbolic link")]
    for step in list_steps(root):
        if at_most is not None and step > at_most:
            continue
        checked = verify_checkpoint(root / step_folder_name(step))
        if isinstance(checked, Found):
            return checked, rejected
        rejected.append(checked)
    return None, rejected


def open_checkpoint(path: Path, *, prefer_best: bool = False) -> Found:
    """Verify the checkpoint that a user's path means: the path of a checkpoint, or of a run.

    A run's folder means its newest valid checkpoint, or with prefer_best the best one if that is
    valid. Raises CheckpointError with the reason for each one that can't be used.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder, so it holds no checkpoint",
            fix="give the folder of a run, or of a checkpoint in its folder checkpoints",
        )
    if (path / MANIFEST_NAME).is_file() or STEP_FOLDER.fullmatch(path.name):
        checked = verify_checkpoint(path)
        if isinstance(checked, Found):
            return checked
        raise CheckpointError(
            f"the checkpoint can't be used. {checked}",
            fix=f"give the run's folder to use its newest valid one: {path.parent.parent}",
        )
    root = path if path.name == CHECKPOINTS_NAME else path / CHECKPOINTS_NAME
    best = read_best_step(root) if prefer_best else None
    if best is not None:
        checked = verify_checkpoint(root / step_folder_name(best))
        if isinstance(checked, Found):
            return checked
        log.warning("the best checkpoint can't be used (%s): the newest one is used", checked)
    found = newest_valid(root)
    if found is None:
        raise CheckpointError(
            f"{path} has no checkpoint that can be used: none was written",
            fix="give another run, or train without --resume",
        )
    return found


def newest_valid(root: Path) -> Found | None:
    """Return the newest valid checkpoint; None: there is none. Logs which are passed over.

    Raises CheckpointError if there are some, and none is valid.
    """
    found, rejected = find_newest(root)
    for checkpoint in rejected:
        log.warning("passed over the checkpoint %s", checkpoint)
    if found is None and rejected:
        raise CheckpointError(
            f"none of the {len(rejected)} checkpoints in {root.parent} is valid",
            fix="the log says what is wrong with each; give another run, or start afresh: "
            "--resume never and another --run_name",
        )
    return found


def load_checkpoint(
    found: Found, *, names: Sequence[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """Read a verified checkpoint: tensors that own their memory, and meta.

    names: only these tensors. Rank-local. Raises CheckpointError if it is none, or has others.
    """
    tensors = read_tensors(found.path / STATE_NAME, names=names)
    expected = found.manifest.tensors
    if names is not None:
        expected = {name: expected[name] for name in names}
    lines = differences(expected, specs_of(tensors))
    if lines:
        text = "\n  ".join(lines)
        raise CheckpointError(f"{found.path}: its file and its manifest differ\n  {text}")
    return tensors, found.manifest.meta


def _open_regular(path: Path) -> io.BufferedReader:
    # WHY O_NONBLOCK: opening a named pipe would wait forever for its writer
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_symlink():
        raise ValueError(f"{path.name} is a symbolic link")
    descriptor = os.open(path, flags)
    try:
        _check_trust(path, os.fstat(descriptor), wants_folder=False)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check_content(file: io.BufferedReader, manifest: Manifest) -> None:
    size_bytes, wanted = os.fstat(file.fileno()).st_size, manifest.size_bytes
    if size_bytes != wanted:
        what = "is truncated" if size_bytes < wanted else "is longer than its manifest says"
        raise ValueError(f"{STATE_NAME} {what}: {size_bytes} of {wanted} bytes")
    if hashlib.file_digest(file, "sha256").hexdigest() != manifest.sha256:
        raise ValueError(f"the sha256 of {STATE_NAME} differs: it changed after it was written")


def _check_trust(path: Path, status: os.stat_result, *, wants_folder: bool) -> None:
    """Raise ValueError if path has the wrong type, or belongs to another user."""
    if stat.S_ISLNK(status.st_mode):
        raise ValueError("is a symbolic link")
    if wants_folder and not stat.S_ISDIR(status.st_mode):
        raise ValueError("is not a folder")
    if not wants_folder and not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    run = (path if wants_folder else path.parent).absolute().parent.parent
    # WHY that owner too: whoever owns the run may have written what is in it
    if status.st_uid not in (0, os.geteuid(), run.stat().st_uid):
        what = "the folder" if wants_folder else path.name
        raise ValueError(
            f"{what} belongs to user {status.st_uid} and not to you ({os.geteuid()}): "
            "copy the checkpoint if you trust it"
        )
