"""Checkpoints that changed after they were written: by a bad disk, or by a stranger."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hardened_ddp.checkpoint import folder as folder_module
from hardened_ddp.checkpoint.folder import (
    Found,
    Rejected,
    decode_manifest,
    find_newest,
    verify_checkpoint,
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


# --- changed bytes -------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_page_of_the_state_is_seen(store: CheckpointStore) -> None:
    path = write_step(store, 1, size=2**18) / "state.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in [*range(0, 400, 7), *range(0, size, 4096), size - 1]:
            flip(file, offset, bit=offset // 4096 % 8)
            assert "sha256 of state.safetensors differs" in reason_of(path.parent), offset
            flip(file, offset, bit=offset // 4096 % 8)
    assert isinstance(verify_checkpoint(path.parent), Found)


def flip(file: Any, offset: int, *, bit: int) -> None:
    file.seek(offset)
    byte = file.read(1)[0]
    file.seek(offset)
    file.write(bytes([byte ^ 1 << bit]))
    file.flush()


def test_a_flipped_bit_anywhere_in_the_manifest_is_seen(store: CheckpointStore) -> None:
    path = write_step(store, 1) / "manifest.json"
    raw = path.read_bytes()
    wanted = decode_manifest(raw)
    for offset in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[offset] ^= 1 << bit
            try:
                manifest = decode_manifest(bytes(changed))
            except ValueError:
                continue
            assert manifest == wanted, (offset, bit)
        path.write_bytes(bytes(changed))
        assert isinstance(verify_checkpoint(path.parent), Rejected)


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_file_cut_anywhere_is_seen(store: CheckpointStore, name: str) -> None:
    path = write_step(store, 1) / name
    raw = path.read_bytes()
    for cut in range(100):
        path.write_bytes(raw[: len(raw) * cut // 100])
        assert isinstance(verify_checkpoint(path.parent), Rejected)
    path.write_bytes(raw + b"x")
    assert isinstance(verify_checkpoint(path.parent), Rejected)


def test_a_missing_file_is_named(store: CheckpointStore) -> None:
    path = write_step(store, 1)
    (path / "state.safetensors").unlink()
    assert reason_of(path) == "state.safetensors is missing"
    (path / "manifest.json").unlink()
    assert reason_of(path) == "manifest.json is missing: its writing was not finished"


# --- strangers and links -------------------------------------------------------------------------


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
        (lambda path: path.chmod(0o777), "", "every user may write to the folder (mode 777)"),
        (lambda path: path.chmod(0o666), "state.safetensors", "every user may write to state"),
        (lambda path: path.chmod(0o646), "manifest.json", "every user may write to manifest"),
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
def test_what_belongs_to_somebody_else_is_rejected(store: CheckpointStore, name: str) -> None:
    path = write_step(store, 1)
    os.chown(path / name, 65534, 65534)
    assert "belongs to user 65534 and not to you (0)" in reason_of(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_run_of_a_colleague_is_read_but_not_what_a_third_one_put_there(
    store: CheckpointStore,
) -> None:
    path = write_step(store, 1)
    for each in (store.root.parent, store.root, path, *path.iterdir()):
        os.chown(each, 65534, 65534)
    assert isinstance(verify_checkpoint(path), Found)
    os.chown(path / "state.safetensors", 65533, 65533)
    assert "belongs to user 65533 and not to you (0)" in reason_of(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_mount_that_gives_all_files_one_owner_and_mode_does_not_lose_the_run(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_step(store, 1)
    for each in (path, *path.iterdir()):
        os.chown(each, 65534, 65534)
        each.chmod(0o777)
    odd = path.lstat()
    monkeypatch.setattr(folder_module, "_status_of_new_folder", lambda _: odd)
    assert isinstance(verify_checkpoint(path), Found)


def test_the_trial_of_a_mount_leaves_nothing(store: CheckpointStore) -> None:
    path = write_step(store, 1)
    path.chmod(0o777)
    reason_of(path)
    assert os.listdir(store.root) == [path.name]


@pytest.mark.parametrize("level", ["checkpoints", "run"])
def test_nothing_is_written_through_a_link_that_replaced_a_folder(
    store: CheckpointStore, tmp_path: Path, level: str
) -> None:
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
        found, rejected = find_newest(store.root)
        assert found is None
        assert [verdict.reason for verdict in rejected] == ["is a symbolic link"]


def test_a_folder_removed_during_the_run_is_made_again(store: CheckpointStore) -> None:
    write_step(store, 1)
    shutil.rmtree(store.root.parent)
    write_step(store, 2)
    assert store.steps() == [2]


def test_removing_a_checkpoint_does_not_follow_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    (write_step(store, 1) / "link").symlink_to(precious)
    (store.root / "step-000000002").symlink_to(precious)
    write_step(store, 3)
    assert store.steps() == [3]
    assert (precious / "thesis.txt").exists()
