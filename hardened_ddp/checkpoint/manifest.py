"""The manifest of a checkpoint, and the names in a run's folder of checkpoints.

Owns: the manifest, its JSON, and its own digest, so that every change of a byte is detected; the
folders step-000000123, discarded-step-... and best.json, and the choice of what to drop.
Does not own: comparing a manifest with the files it names (verify.py), when something is dropped
(files.py).
What goes wrong here: the file may contain anything, because a disk or somebody changed it. So the
type of each field is checked before it is used, and a problem is a ValueError that names it;
verify.py turns that into the reason why a checkpoint is rejected.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

from hardened_ddp.checkpoint.disk import Disk, drop_folder, is_real_folder
from hardened_ddp.checkpoint.tensors import TensorSpec
from hardened_ddp.errors import CheckpointError
from hardened_ddp.settings.earlier_run import STEP_FOLDER

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

SCHEMA = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.safetensors"
BEST_NAME = "best.json"
_MAX_BEST_BYTES = 4096
_DISCARDED = "discarded-"
# A manifest needs about 100 bytes per tensor: this is room for half a million of them.
MAX_MANIFEST_BYTES = 64 * 2**20
# More than any file system allows for one file, so a larger size can't be right.
_MAX_FILE_BYTES = 2**60
_SHA256 = re.compile(r"[0-9a-f]{64}")

Best = Mapping[str, Any]
"""What best.json says besides the step: metric, value, direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What a file of the checkpoint must look like."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    meta: dict[str, JSON]
    """The caller's data, such as the epoch and the cursor."""
    state: FileRecord
    tensors: dict[str, TensorSpec]


def plain_meta(meta: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return a copy of meta as it will be read back. Raises CheckpointError if it is not JSON."""
    try:
        return cast(dict[str, JSON], json.loads(json.dumps(meta)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"meta can't be stored in a checkpoint: {error}") from error


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json."""
    body: dict[str, object] = {
        "schema": SCHEMA,
        "step": manifest.step,
        "meta": manifest.meta,
        "files": {
            STATE_NAME: {
                "size_bytes": manifest.state.size_bytes,
                "sha256": manifest.state.sha256,
            }
        },
        "tensors": {
            name: {"shape": list(spec.shape), "dtype": spec.dtype}
            for name, spec in manifest.tensors.items()
        },
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
    if not isinstance(body, dict):
        _refuse(f"holds a {type(body).__name__} and not an object")
    schema = body.get("schema")
    if type(schema) is not int or schema < 1:
        _refuse(f"has no usable schema number ({schema!r:.40})")
    if schema > SCHEMA:
        _refuse(f"has schema {schema}, newer than {SCHEMA}, which this version reads: update it")
    digest = body.pop("digest", None)
    if digest != _digest(body):
        _refuse("was changed after it was written (its digest differs)")
    step, meta = body.get("step"), body.get("meta")
    if not _is_count(step) or not isinstance(meta, dict):
        _refuse("has no usable step or meta")
    return Manifest(
        step=cast(int, step),
        meta=meta,
        state=_read_files(body.get("files")),
        tensors=_read_tensors(body.get("tensors")),
    )


def step_folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:09d}"  # WHY fixed width: sorting by name is sorting by step


def list_steps(root: Path) -> list[int]:
    """Return the steps that have a folder under root, newest first, valid or not."""
    if not is_real_folder(root):
        return []
    matches = [STEP_FOLDER.fullmatch(path.name) for path in root.iterdir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


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
    steps: Sequence[int], *, keep_last: int, protected: Collection[int | None]
) -> list[int]:
    """Return which of the steps, newest first, to drop: not among the newest, not protected."""
    return [step for step in steps[keep_last:] if step not in protected]


def discard_newer(root: Path, step: int, *, disk: Disk) -> list[Path]:
    """Set aside the checkpoints of later steps, and return their paths.

    For a rollback, or a resume from an older checkpoint: otherwise the next start would find the
    newer ones. They are renamed to discarded-step-..., and removed when the disk is full. Raises
    CheckpointError.
    """
    newer = [root / step_folder_name(other) for other in list_steps(root) if other > step]
    try:
        for path in newer:
            discard_folder(path, disk=disk)
    except OSError as error:
        raise CheckpointError(f"{path} can't be set aside: {error}") from error
    return newer


def discard_folder(path: Path, *, disk: Disk) -> None:
    """Rename a checkpoint's folder so that no start finds it, but a person can. Raises OSError."""
    target = path.with_name(f"{_DISCARDED}{path.name}")
    if os.path.lexists(target):
        drop_folder(target, disk=disk)
    disk.rename(path, target)
    disk.sync_folder(path.parent)


def list_discarded(root: Path) -> list[Path]:
    """Return what discard_folder left under root, oldest step first."""
    return sorted(path for path in root.iterdir() if path.name.startswith(_DISCARDED))


def _read_files(files: object) -> FileRecord:
    if not isinstance(files, dict):
        _refuse("has no list of files")
    for name in files:
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            _refuse(f"names the file {name!r:.80}, outside the checkpoint's folder")
    if set(files) != {STATE_NAME}:
        _refuse(f"names the files {sorted(files)!r:.80} and not {STATE_NAME}")
    record = files[STATE_NAME]
    size_bytes = record.get("size_bytes") if isinstance(record, dict) else None
    sha256 = record.get("sha256") if isinstance(record, dict) else None
    if not _is_count(size_bytes) or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        _refuse(f"has no usable size and sha256 for {STATE_NAME}")
    return FileRecord(size_bytes=cast(int, size_bytes), sha256=sha256)


def _read_tensors(tensors: object) -> dict[str, TensorSpec]:
    if not isinstance(tensors, dict):
        _refuse("has no list of tensors")
    specs = {}
    for name, entry in tensors.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if (
            not isinstance(shape, list)
            or not all(map(_is_count, shape))
            or not isinstance(dtype, str)
        ):
            _refuse(f"has no usable shape and dtype for the tensor {name!r:.80}")
        specs[name] = TensorSpec(tuple(shape), dtype)
    return specs


def _is_count(value: object) -> bool:
    # WHY type and not isinstance: True is an int, but not a size
    return type(value) is int and 0 <= value <= _MAX_FILE_BYTES


def _digest(body: Mapping[str, object]) -> str:
    # WHY sorted and compact: the digest covers the content, and not spaces and line ends
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _refuse(problem: str) -> NoReturn:
    raise ValueError(f"{MANIFEST_NAME} {problem}")
