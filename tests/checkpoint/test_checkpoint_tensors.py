"""The file of tensors: what is written comes back bit for bit, whatever it is."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hardened_ddp.checkpoint import tensors as tensors_module
from hardened_ddp.checkpoint.folder import find_newest, load_checkpoint
from hardened_ddp.checkpoint.store import CheckpointStore, CheckpointWriter
from hardened_ddp.checkpoint.tensors import differences, plan_file, specs_of
from hardened_ddp.errors import CheckpointError
from tests.checkpoint_states import assert_same, every_kind, found_in

META = {"epoch": 3, "names": ["a", "b"], "loss": 0.1, "none": None, "deep": {"x": 1}}


def test_every_dtype_and_layout_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    kinds = every_kind()
    path = store.write(123, tensors=kinds, meta=META)
    assert path.name == "step-000000123"
    tensors, meta = load_checkpoint(found_in(store))
    assert_same(tensors, kinds)
    assert meta == META
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    assert_same(load_file(path / "state.safetensors"), kinds)  # by the library of the format


def test_a_copy_of_every_dtype_and_layout_is_the_same_file(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors_module, "_PART_BYTES", 256)
    path = store.write(1, tensors=every_kind(), meta=META) / "state.safetensors"
    writer = CheckpointWriter(store)
    assert writer.submit(2, tensors=every_kind(), meta=META)
    writer.close(timeout_s=60)
    copied = store.root / "step-000000002" / "state.safetensors"
    assert copied.read_bytes() == path.read_bytes()


def test_each_tensor_begins_where_readers_that_map_the_file_want_it() -> None:
    kinds = every_kind()
    plan = plan_file(kinds)
    assert len(plan.header) % 8 == 0
    spans = plan.spans.items()
    assert all(begin % kinds[name].element_size() == 0 for name, (begin, _) in spans)


def test_a_state_without_tensors_is_a_state(store: CheckpointStore) -> None:
    path = store.write(1, tensors={}, meta=META)
    assert load_checkpoint(found_in(store)) == ({}, META)
    assert load_file(path / "state.safetensors") == {}


def test_loaded_tensors_outlive_their_file(store: CheckpointStore) -> None:
    kinds = every_kind()
    store.write(1, tensors=kinds, meta={})
    found = found_in(store)
    tensors, _ = load_checkpoint(found)
    os.truncate(found.state_path, 0)  # a mapped tensor would now end the process with SIGBUS
    assert_same(tensors, kinds)
    assert str(found.path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
    ],
    ids=["dtype", "sparse", "meta"],
)
def test_a_tensor_that_has_no_place_is_named(store: CheckpointStore, tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"model\.odd"):
        store.write(1, tensors={"model.odd": tensor}, meta={})
    assert find_newest(store.root) == (None, [])


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
