"""Checkpoints on the disk: what is written comes back, bit for bit, and the right ones are kept."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hardened_ddp.checkpoint import folder
from hardened_ddp.checkpoint import tensors as tensors_module
from hardened_ddp.checkpoint.store import CheckpointStore, CheckpointWriter
from hardened_ddp.checkpoint.tensors import differences, plan_file, specs_of
from hardened_ddp.errors import CheckpointError
from hardened_ddp.ranks.process import this_process
from tests import checkpoint_states
from tests.checkpoint_states import assert_same, every_kind, found_in, small_state, write_step


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    for step in range(1, 8):
        write_step(store, step, best={"value": 0.5} if step == 2 else None)
    assert folder.list_steps(store.root) == [7, 6, 5, 2]
    assert folder.read_best_step(store.root) == 2
    store.mark_best(6, {"value": 0.9})
    write_step(store, 8)
    assert folder.list_steps(store.root) == [8, 7, 6]
    assert json.loads((store.root / "best.json").read_text())["value"] == 0.9
    # 8 is of a course that was left without folder.discard_newer: the one just written is kept.
    one = CheckpointStore(store.root, keep_last=1)
    write_step(one, 7)
    assert folder.list_steps(one.root) == [8, 7, 6]


def test_a_best_that_is_not_there_is_none(store: CheckpointStore) -> None:
    write_step(store, 1)
    for garbage in (b"", b"[1]", b'{"step": "1"}', b'{"step": 77}', b"\xff", b"[" * 4000):
        (store.root / "best.json").write_bytes(garbage)
        assert folder.read_best_step(store.root) is None
    store.mark_best(1, {"value": float("nan")})
    assert folder.read_best_step(store.root) == 1


def test_a_valid_checkpoint_of_the_same_step_is_kept(store: CheckpointStore) -> None:
    first = store.write(1, tensors=small_state(1), meta={"n": 1})
    inode = (first / "state.safetensors").stat().st_ino
    assert store.write(1, tensors=small_state(1), meta={"n": 2}, best={"value": 1.0}) == first
    assert (first / "state.safetensors").stat().st_ino == inode
    assert found_in(store).manifest.meta == {"n": 1}
    assert folder.read_best_step(store.root) == 1


def test_the_newest_valid_one_is_found_and_the_others_are_named(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        write_step(store, step)
    (store.root / "step-000000003" / "manifest.json").unlink()
    os.truncate(store.root / "step-000000002" / "state.safetensors", 50)
    (store.root / "step-x").mkdir()
    found, rejected = folder.find_newest(store.root)
    assert found.step == 1
    assert [verdict.path.name for verdict in rejected] == ["step-000000003", "step-000000002"]
    assert "manifest.json is missing" in rejected[0].reason
    assert "truncated: 50 of" in str(rejected[1])


def test_newer_checkpoints_of_a_course_that_was_left_are_set_aside(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        write_step(store, step)
    newer = [store.root / "step-000000003", store.root / "step-000000002"]
    assert folder.discard_newer(store.root, 1) == newer
    assert found_in(store).step == 1
    kept = folder.verify_checkpoint(store.root / "discarded-step-000000003")
    assert isinstance(kept, folder.Found)
    for step in (2, 3):
        store.write(step, tensors=small_state(step + 10), meta={})
    folder.discard_newer(store.root, 1)
    discarded = ["discarded-step-000000002", "discarded-step-000000003"]
    assert sorted(os.listdir(store.root)) == [*discarded, "step-000000001"]


def test_what_dead_writers_left_is_removed_but_not_of_live_ones(store: CheckpointStore) -> None:
    write_step(store, 1)
    here = this_process()
    parent_started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    old, young = "0" * 12, "1" * 12
    names = {
        f".partial-step-000000002-{here.place}-{2**22 + 1}-5": False,  # above any pid
        f".partial-step-000000002-{here.place}-{os.getpid()}-{here.started}": False,
        f".dropped-step-000000002-{here.place}-{os.getppid()}-1": False,  # pid used again
        f".partial-step-000000002-{here.place}-{os.getppid()}-{parent_started}": True,
        f".partial-step-000000002-{old}-1-1": False,
        f".partial-step-000000002-{young}-1-1": True,
        ".partial-of-another-program": True,
    }
    for name in names:
        (store.root / name).mkdir()
        (store.root / name / "state.safetensors").write_bytes(b"half")
        if old in name:
            os.utime(store.root / name / "state.safetensors", (1, 1))
            os.utime(store.root / name, (1, 1))
    write_step(store, 2)
    for name, stays in names.items():
        assert (store.root / name).exists() == stays, name


def recording_disk(calls: list[str]) -> Any:
    """Make a disk that notes the calls that change it."""
    names: dict[int, str] = {}

    def around(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = call(*args)
        if name == "create":
            names[result] = args[0].name
        paths = [argument.name for argument in args if isinstance(argument, Path)]
        target = paths[-1] if paths else names[args[0]]
        calls.append(f"{name} {target.split('-step')[0]}")
        return result

    return checkpoint_states.disk_with(around)


def test_the_manifest_comes_after_the_state_and_the_name_after_both(tmp_path: Path) -> None:
    calls: list[str] = []
    store = CheckpointStore(tmp_path, keep_last=1, disk=recording_disk(calls))
    write_step(store, 1)
    assert calls == [
        "make_folder .partial",
        "create state.safetensors",
        *["write state.safetensors"] * (1 + len(small_state(1))),
        "sync state.safetensors",
        "close state.safetensors",
        "create manifest.json",
        "write manifest.json",
        "sync manifest.json",
        "close manifest.json",
        "sync_folder .partial",
        "rename step-000000001",
        f"sync_folder {tmp_path.name}",
    ]


def test_a_small_file_is_whole_on_the_disk_before_it_replaces_the_old_one(tmp_path: Path) -> None:
    calls: list[str] = []
    recording_disk(calls).replace_file(tmp_path / "best.json", b"{}")
    aside = ".best.json.new"
    assert calls == [
        *(f"{call} {aside}" for call in ("create", "write", "sync", "close")),
        "rename best.json",
        f"sync_folder {tmp_path.name}",
    ]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_checkpoint_follows_the_umask_and_is_not_open_to_all(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = CheckpointStore(tmp_path, keep_last=1)
        path = store.write(1, tensors=small_state(1), meta={})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o775 & ~umask
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o664 & ~umask}
    assert isinstance(folder.verify_checkpoint(path), folder.Found)


META = {"epoch": 3, "names": ["a", "b"], "loss": 0.1, "none": None, "deep": {"x": 1}}


def test_every_dtype_and_layout_comes_back_bit_for_bit_also_from_a_copy(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors_module, "_BLOCK_BYTES", 256)
    kinds = every_kind()
    path = store.write(123, tensors=kinds, meta=META)
    assert path.name == "step-000000123"
    tensors, meta = folder.load_checkpoint(found_in(store))
    assert_same(tensors, kinds)
    assert meta == META
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert_same(load_file(path / "state.safetensors"), kinds)  # by the library of the format
    writer = CheckpointWriter(store)
    assert writer.submit(124, tensors=kinds, meta=META)
    writer.close(timeout_s=60)
    copied = store.root / "step-000000124" / "state.safetensors"
    assert copied.read_bytes() == (path / "state.safetensors").read_bytes()


def test_each_tensor_begins_where_readers_that_map_the_file_want_it() -> None:
    kinds = every_kind()
    plan = plan_file(kinds)
    assert len(plan.header) % 8 == 0
    spans = plan.spans.items()
    assert all(begin % kinds[name].element_size() == 0 for name, (begin, _) in spans)


def test_a_state_without_tensors_is_a_state(store: CheckpointStore) -> None:
    path = store.write(1, tensors={}, meta=META)
    assert folder.load_checkpoint(found_in(store)) == ({}, META)
    assert load_file(path / "state.safetensors") == {}


def test_loaded_tensors_outlive_their_file(store: CheckpointStore) -> None:
    kinds = every_kind()
    store.write(1, tensors=kinds, meta={})
    found = found_in(store)
    tensors, _ = folder.load_checkpoint(found)
    # a mapped tensor would now end the process with SIGBUS
    os.truncate(found.path / folder.STATE_NAME, 0)
    assert_same(tensors, kinds)
    assert str(found.path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.complex128), torch.eye(3).to_sparse(), torch.ones(3, device="meta")],
    ids=["dtype", "sparse", "meta"],
)
def test_a_tensor_that_has_no_place_is_named(store: CheckpointStore, tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"model\.odd"):
        store.write(1, tensors={"model.odd": tensor}, meta={})
    assert folder.find_newest(store.root) == (None, [])


def test_differences_are_listed_by_kind_and_capped() -> None:
    expected = specs_of({"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(1)})
    found = specs_of({"a": torch.zeros(2, 4), "c": torch.zeros(1).half(), "d": torch.tensor(1)})
    assert differences(expected, expected) == []
    assert differences(expected, found) == [
        "missing in the checkpoint: b (4 float32)",
        "only in the checkpoint: d (scalar int64)",
        "differs: a is 2x4 float32 in the checkpoint, 2x3 float32 in this run",
        "differs: c is 1 float16 in the checkpoint, 1 float32 in this run",
    ]
    many = specs_of({f"w{index}": torch.zeros(1) for index in range(50)})
    lines = differences(many, {})
    assert len(lines) == 11
    assert lines[-1] == "and 40 more"
