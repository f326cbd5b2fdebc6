"""Checkpoints that a bad disk, a stranger or an attacker changed: rejected, and never executed."""

import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.checkpoint import folder
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError
from tests.checkpoint_states import found_in, reason_of, write_step


def test_a_flipped_bit_in_any_page_of_the_state_is_seen(store: CheckpointStore) -> None:
    path = write_step(store, 1, size=2**18) / "state.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in [*range(0, 400, 7), *range(0, size, 4096), size - 1]:
            flip(file, offset, bit=offset // 4096 % 8)
            assert "sha256 of state.safetensors differs" in reason_of(path.parent), offset
            flip(file, offset, bit=offset // 4096 % 8)
    assert isinstance(folder.verify_checkpoint(path.parent), folder.Found)


def flip(file: Any, offset: int, *, bit: int) -> None:
    file.seek(offset)
    byte = file.read(1)[0]
    file.seek(offset)
    file.write(bytes([byte ^ 1 << bit]))
    file.flush()


def test_a_flipped_bit_anywhere_in_the_manifest_is_seen(store: CheckpointStore) -> None:
    path = write_step(store, 1) / "manifest.json"
    raw = path.read_bytes()
    wanted = folder.decode_manifest(raw)
    for offset in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[offset] ^= 1 << bit
            try:
                manifest = folder.decode_manifest(bytes(changed))
            except ValueError:
                continue
            assert manifest == wanted, (offset, bit)
        path.write_bytes(bytes(changed))
        assert isinstance(folder.verify_checkpoint(path.parent), folder.Rejected)


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_file_cut_anywhere_is_seen(store: CheckpointStore, name: str) -> None:
    path = write_step(store, 1) / name
    raw = path.read_bytes()
    for cut in range(100):
        path.write_bytes(raw[: len(raw) * cut // 100])
        assert isinstance(folder.verify_checkpoint(path.parent), folder.Rejected)
    path.write_bytes(raw + b"x")
    assert isinstance(folder.verify_checkpoint(path.parent), folder.Rejected)


def link_away(path: Path) -> None:
    """Replace a path by a link to what it was."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "name", "reason"),
    [
        (link_away, "", "is a symbolic link"),
        (link_away, "state.safetensors", "state.safetensors is a symbolic link"),
        (link_away, "manifest.json", "manifest.json is a symbolic link"),
        (make_pipe, "manifest.json", "manifest.json is not a regular file"),
        (make_folder, "state.safetensors", "state.safetensors is not a regular file"),
    ],
)
def test_what_a_stranger_could_have_put_there_is_rejected(
    store: CheckpointStore, spoil: Callable[[Path], None], name: str, reason: str
) -> None:
    path = write_step(store, 1)
    spoil(path / name)
    assert reason in reason_of(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "state.safetensors", "manifest.json"])
def test_a_colleagues_run_is_read_and_no_strangers_file(store: CheckpointStore, name: str) -> None:
    path = write_step(store, 1)
    os.chown(path / name, 65534, 65534)
    assert "belongs to user 65534 and not to you (0)" in reason_of(path)
    everything = (store.root.parent, store.root, path, *path.iterdir())
    for each in everything:
        os.chown(each, 65534, 65534)
    assert isinstance(folder.verify_checkpoint(path), folder.Found)
    os.chown(path / name, 65533, 65533)
    assert "belongs to user 65533 and not to you (0)" in reason_of(path)


@pytest.mark.parametrize("level", ["checkpoints", "run"])
def test_no_write_goes_through_a_link(store: CheckpointStore, tmp_path: Path, level: str) -> None:
    write_step(store, 1)
    victim = store.root if level == "checkpoints" else store.root.parent
    outside = tmp_path / "outside"
    victim.rename(outside)
    victim.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with pytest.raises(CheckpointError, match="a link or a file"):
        write_step(store, 2)
    assert sorted(outside.rglob("*")) == before
    if level == "checkpoints":
        found, rejected = folder.find_newest(store.root)
        assert found is None
        assert [verdict.reason for verdict in rejected] == ["is a symbolic link"]


def test_a_folder_removed_during_the_run_is_made_again(store: CheckpointStore) -> None:
    write_step(store, 1)
    shutil.rmtree(store.root.parent)
    write_step(store, 2)
    assert folder.list_steps(store.root) == [2]


def test_removing_a_checkpoint_does_not_follow_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    (write_step(store, 1) / "link").symlink_to(precious)
    (store.root / "step-000000002").symlink_to(precious)
    write_step(store, 3)
    assert os.listdir(store.root) == ["step-000000003"]
    assert (precious / "thesis.txt").exists()


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
        with pytest.raises(CheckpointError):
            folder.load_checkpoint(found_in(store))
    elif name != "manifest.json":
        folder.load_checkpoint(found_in(store))
    else:
        assert folder.find_newest(store.root)[0] is None
    folder.read_best_step(store.root)
    write_step(store, 2)
    assert not marker.exists()
    pickle.loads(pickle.dumps(_Evil(marker)))
    assert marker.exists(), "the pickle of this test does nothing, so the test shows nothing"


def forge(path: Path, **changes: Any) -> None:
    """Rewrite a manifest so that its digest, and the state's size and sha256, are right."""
    target = path / "manifest.json"
    body = json.loads(target.read_bytes())
    content = (path / "state.safetensors").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    body["files"] = {"state.safetensors": {"size_bytes": len(content), "sha256": digest}}
    body |= changes
    body.pop("digest")
    body["digest"] = folder._digest(body)
    target.write_text(json.dumps(body))


NO_USE = "has no usable schema, step, meta, files or tensors"
STATE, NO_SHAPE = "state.safetensors", "no usable shape and dtype"
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a newer schema": ({"schema": 2}, "schema 2, newer than 1"),
    "another step": ({"step": 2}, "belongs to step 2"),
    "no schema": ({"schema": None}, NO_USE),
    "a schema of another type": ({"schema": True}, NO_USE),
    "a path that leads out": ({"files": {"../../etc/passwd": {}}}, NO_USE),
    "files of another type": ({"files": [STATE]}, NO_USE),
    "an absurd size": ({"files": {STATE: {"size_bytes": 2**70, "sha256": "0" * 64}}}, NO_USE),
    "no sha256": ({"files": {STATE: {"size_bytes": 1}}}, NO_USE),
    "a step of another type": ({"step": True}, NO_USE),
    "a negative step": ({"step": -1}, NO_USE),
    "meta of another type": ({"meta": []}, NO_USE),
    "an absurd shape": ({"tensors": {"w": {"shape": [2**70], "dtype": "float32"}}}, NO_SHAPE),
    "tensors of another type": ({"tensors": {"w": 1}}, NO_SHAPE),
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
    os.truncate(path / "manifest.json", 2**40)  # sparse: it is not read into memory
    assert f"more than {folder.MAX_MANIFEST_BYTES} bytes" in reason_of(path)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 66)
        + b'{"w":{"dtype":"F32","shape":[1048576],"data_offsets":[0,4194304]}}',
        struct.pack("<Q", 62) + b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}        ',
        b"",
    ],
    ids=["endless header", "no object", "more than the file", "backwards", "other tensors"],
)
def test_a_hostile_state_with_manifest_is_an_error(store: CheckpointStore, content: bytes) -> None:
    path, problem = write_step(store, 1), "missing in the checkpoint: w"
    if content:
        (path / "state.safetensors").write_bytes(content + b"\0" * 8)
        problem = "can't be read as safetensors"
    forge(path, tensors={"w": {"shape": [2], "dtype": "float32"}})
    with pytest.raises(CheckpointError, match=problem):
        folder.load_checkpoint(found_in(store))
