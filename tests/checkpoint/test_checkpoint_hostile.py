"""Files made to do harm: they are rejected with a reason, and never executed."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.checkpoint import folder as folder_module
from hardened_ddp.checkpoint.folder import (
    MAX_MANIFEST_BYTES,
    Rejected,
    _digest,
    find_newest,
    load_checkpoint,
)
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError
from tests.checkpoint_states import write_step


def reason_of(path: Path) -> str:
    verdict = folder_module.verify_checkpoint(path)
    assert isinstance(verdict, Rejected)
    return verdict.reason


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=3)


class _Evil:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("name", ["state.safetensors", "state.pt", "manifest.json", "best.json"])
@pytest.mark.parametrize("as_archive", [False, True], ids=["pickle", "torch.save"])
def test_a_pickle_is_never_executed(
    store: CheckpointStore, tmp_path: Path, name: str, as_archive: bool
) -> None:
    marker = tmp_path / "executed"
    path = write_step(store, 1)
    target = store.root / name if name == "best.json" else path / name
    if as_archive:
        torch.save(_Evil(marker), target)
    else:
        target.write_bytes(pickle.dumps(_Evil(marker)))
    if name == "state.safetensors":  # with a manifest that vouches for it
        forge(path)
    found, rejected = find_newest(store.root)
    if found is not None:
        try:
            load_checkpoint(found)
            assert name in ("state.pt", "best.json")
        except CheckpointError:
            assert name == "state.safetensors"
    else:
        assert len(rejected) == 1
    store.best_step()
    write_step(store, 2)
    assert not marker.exists()
    pickle.loads(pickle.dumps(_Evil(marker)))
    assert marker.exists(), "the pickle of this test does nothing, so the test shows nothing"


def forge(path: Path, **changes: Any) -> None:
    """Rewrite a manifest so that its digest, and the state's size and sha256, are right."""
    target = path / "manifest.json"
    body = json.loads(target.read_bytes())
    content = (path / "state.safetensors").read_bytes()
    record = {
        "size_bytes": len(content),
        "sha256": folder_module.hashlib.sha256(content).hexdigest(),
    }
    body["files"] = {"state.safetensors": record}
    body |= changes
    body.pop("digest")
    body["digest"] = _digest(body)
    target.write_text(json.dumps(body))


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a newer schema": ({"schema": 2}, "schema 2, newer than 1"),
    "no schema": ({"schema": None}, "no usable schema"),
    "a schema of another type": ({"schema": True}, "no usable schema"),
    "a path that leads out": ({"files": {"../../etc/passwd": {}}}, "outside the checkpoint"),
    "an absolute path": ({"files": {"/etc/passwd": {}}}, "outside the checkpoint"),
    "a file too many": ({"files": {"state.safetensors": {}, "x": {}}}, "and not state"),
    "no files": ({"files": {}}, "and not state.safetensors"),
    "files of another type": ({"files": ["state.safetensors"]}, "no list of files"),
    "an absurd size": (
        {"files": {"state.safetensors": {"size_bytes": 2**70, "sha256": "0" * 64}}},
        "no usable size",
    ),
    "a negative size": (
        {"files": {"state.safetensors": {"size_bytes": -1, "sha256": "0" * 64}}},
        "no usable size",
    ),
    "no sha256": ({"files": {"state.safetensors": {"size_bytes": 1}}}, "no usable size and sha256"),
    "another step": ({"step": 2}, "belongs to step 2"),
    "a step of another type": ({"step": True}, "no usable step"),
    "a negative step": ({"step": -1}, "no usable step"),
    "meta of another type": ({"meta": []}, "no usable step or meta"),
    "an absurd shape": (
        {"tensors": {"w": {"shape": [2**70], "dtype": "float32"}}},
        "no usable shape and dtype for the tensor 'w'",
    ),
    "tensors of another type": ({"tensors": {"w": 1}}, "no usable shape"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_rejected_with_its_reason(store: CheckpointStore, kind: str) -> None:
    changes, reason = HOSTILE[kind]
    path = write_step(store, 1)
    forge(path, **changes)
    assert reason in reason_of(path)


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"{", b"\xff\xfe\x00", b"[" * 10**6, b'{"schema":' + b"9" * 10**5 + b"}"],
    ids=["empty", "list", "null", "cut", "no text", "deep", "digits"],
)
def test_a_manifest_that_is_no_manifest_is_rejected(store: CheckpointStore, raw: bytes) -> None:
    path = write_step(store, 1)
    (path / "manifest.json").write_bytes(raw)
    assert "manifest.json" in reason_of(path) or "recursion" in reason_of(path)


def test_a_manifest_of_absurd_size_is_not_read_into_memory(store: CheckpointStore) -> None:
    path = write_step(store, 1)
    os.truncate(path / "manifest.json", 2**40)  # sparse
    assert f"more than {MAX_MANIFEST_BYTES} bytes" in reason_of(path)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 66)
        + b'{"w":{"dtype":"F32","shape":[1048576],"data_offsets":[0,4194304]}}',
        struct.pack("<Q", 62) + b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}        ',
    ],
    ids=["endless header", "no object", "more than the file", "backwards"],
)
def test_a_hostile_state_that_its_manifest_vouches_for_is_an_error(
    store: CheckpointStore, header: bytes
) -> None:
    path = write_step(store, 1)
    (path / "state.safetensors").write_bytes(header + b"\0" * 8)
    forge(path)
    found, _ = find_newest(store.root)
    assert found is not None
    with pytest.raises(CheckpointError, match="can't be read as safetensors"):
        load_checkpoint(found)


def test_a_state_with_other_tensors_than_its_manifest_says_is_an_error(
    store: CheckpointStore,
) -> None:
    path = write_step(store, 1)
    forge(path, tensors={"w": {"shape": [2], "dtype": "float32"}})
    found, _ = find_newest(store.root)
    assert found is not None
    with pytest.raises(CheckpointError, match="missing in the checkpoint: w"):
        load_checkpoint(found)
