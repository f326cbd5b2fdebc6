"""Checkpoints on the disk: what is written comes back, and the right ones are kept and found."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hardened_ddp.checkpoint import stream as stream_module
from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.checkpoint.export import export_safetensors
from hardened_ddp.checkpoint.files import CheckpointStore
from hardened_ddp.checkpoint.listing import open_checkpoint
from hardened_ddp.checkpoint.process import this_process
from hardened_ddp.checkpoint.stream import TensorStream, flat_bytes
from hardened_ddp.checkpoint.tensors import differences, plan_file, specs_of
from hardened_ddp.checkpoint.verify import Found, Rejected
from hardened_ddp.errors import CheckpointError

META = {
    "epoch": 3,
    "cursor": 4096,
    "names": ["a", "b"],
    "loss": 0.1,
    "none": None,
    "deep": {"x": 1},
}
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)


def every_kind() -> dict[str, torch.Tensor]:
    """Make a tensor of every dtype and every layout that a state can hold."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    raw = torch.randint(0, 255, (3, 5, 8), dtype=torch.uint8, generator=generator)
    kinds = {
        f"dtype.{dtype}": raw.ne(0) if dtype is torch.bool else raw.view(dtype) for dtype in DTYPES
    }
    tied = torch.nn.Parameter(noise(7, 3))
    wide = noise(6, 10)
    return kinds | {
        "model.conv.weight": noise(8, 3, 3, 3).to(memory_format=torch.channels_last),
        "model.conv.half": noise(8, 3, 3, 3).bfloat16().to(memory_format=torch.channels_last),
        "model.transposed": wide.t(),
        "model.columns": wide[:, ::3],
        "model.expanded": noise(4, 1).expand(4, 6),
        "model.scalar": torch.tensor(2.5),
        "model.count": torch.tensor(17),
        "model.flag": torch.tensor(True),
        "model.half_scalar": torch.tensor(0.3).bfloat16(),
        "model.empty": torch.empty(0, 3),
        "model.no_columns": torch.empty(5, 0, dtype=torch.int64),
        "model.tied_in": tied,
        "model.tied_out": tied,
        "model.nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "model.conjugate": torch.complex(noise(2, 3), noise(2, 3)).conj(),
        "model.negative": torch.complex(noise(2, 3), noise(2, 3)).conj().imag,
        "optimizer.state.0.exp_avg": noise(1000),
        'odd "name" \\ \u00e9': noise(3),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare bit for bit: NaN equals NaN, and 0.0 is not -0.0."""
    assert specs_of(found) == specs_of(expected)
    for name in expected:
        assert np.array_equal(flat_bytes(found[name]), flat_bytes(expected[name])), name


def small_state(step: int) -> dict[str, torch.Tensor]:
    return {"model.w": torch.arange(100.0) + step, "optimizer.step": torch.tensor(step)}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=3)


def found_in(store: CheckpointStore) -> Found:
    found, rejected = store.find_valid()
    assert found is not None, rejected
    return found


def test_every_dtype_and_layout_comes_back_bit_for_bit(store: CheckpointStore) -> None:
    kinds = every_kind()
    path = store.write(123, tensors=kinds, meta=META)
    assert path.name == "step-000000123"
    tensors, meta = store.load(found_in(store))
    assert_same(tensors, kinds)
    assert meta == META
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_the_library_of_the_format_reads_our_file(store: CheckpointStore) -> None:
    kinds = every_kind()
    path = store.write(1, tensors=kinds, meta={})
    assert_same(load_file(path / "state.safetensors"), kinds)


def test_a_state_without_tensors_is_a_state(store: CheckpointStore) -> None:
    path = store.write(1, tensors={}, meta=META)
    assert store.load(found_in(store)) == ({}, META)
    assert load_file(path / "state.safetensors") == {}


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1000])
def test_chunks_and_blocks_of_any_size_give_the_same_file(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    kinds = every_kind()
    whole = store.write(1, tensors=kinds, meta={}) / "state.safetensors"
    monkeypatch.setattr(stream_module, "CHUNK_BYTES", chunk_bytes)
    pieces = store.write(2, tensors=kinds, meta={}) / "state.safetensors"
    assert pieces.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("frozen_after", range(0, 4000, 97))
def test_a_stream_frozen_anywhere_gives_the_state_before_the_change(
    monkeypatch: pytest.MonkeyPatch, frozen_after: int
) -> None:
    monkeypatch.setattr(stream_module, "_BLOCK_BYTES", 256)
    kinds = {
        name: tensor.detach().clone(memory_format=torch.preserve_format)
        for name, tensor in every_kind().items()
    }
    expected = read_all(TensorStream(kinds, plan=plan_file(kinds)), chunk_bytes=50)
    stream = TensorStream(kinds, plan=plan_file(kinds))
    head = read_all(stream, chunk_bytes=50, at_most=frozen_after)
    stream.freeze()
    for tensor in kinds.values():
        tensor.zero_()
    assert head + read_all(stream, chunk_bytes=50) == expected


def read_all(stream: TensorStream, *, chunk_bytes: int, at_most: int = 10**9) -> bytes:
    parts = []
    buffer = np.empty(chunk_bytes, dtype=np.uint8)
    while at_most > 0 and (size := stream.read_into(buffer[:at_most])):
        parts.append(buffer[:size].tobytes())
        at_most -= size
    return b"".join(parts)


def test_loaded_tensors_outlive_their_file(store: CheckpointStore) -> None:
    kinds = every_kind()
    store.write(1, tensors=kinds, meta={})
    found = found_in(store)
    tensors, _ = store.load(found)
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
    assert store.find_valid() == (None, [])


def test_meta_that_is_no_json_is_refused_and_leaves_nothing(store: CheckpointStore) -> None:
    store.write(1, tensors=small_state(1), meta={})
    odd: Any = {"path": Path("x")}
    with pytest.raises(CheckpointError, match="PosixPath"):
        store.write(2, tensors=small_state(2), meta=odd)
    assert os.listdir(store.root) == ["step-000000001"]


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    for step in range(1, 8):
        store.write(
            step, tensors=small_state(step), meta={}, best_metric=0.5 if step == 2 else None
        )
    assert store.steps() == [7, 6, 5, 2]
    assert store.best_step() == 2
    store.mark_best(6, 0.9)
    store.write(8, tensors=small_state(8), meta={})
    assert store.steps() == [8, 7, 6]
    assert json.loads((store.root / "best.json").read_text())["metric"] == 0.9


def test_one_kept_checkpoint_is_the_one_just_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    for step in (500, 450):  # 500 is of a course that was left without discard_newer
        store.write(step, tensors=small_state(step), meta={})
    assert store.steps() == [500, 450]


def test_best_must_be_there(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="step 9"):
        store.mark_best(9, 1.0)
    store.write(1, tensors=small_state(1), meta={})
    for garbage in (b"", b"[1]", b'{"step": "1"}', b'{"step": 77}', b"\xff", b"[" * 4000):
        (store.root / "best.json").write_bytes(garbage)
        assert store.best_step() is None
    store.mark_best(1, float("nan"))
    assert store.best_step() == 1


def test_a_valid_checkpoint_of_the_same_step_is_kept(store: CheckpointStore) -> None:
    first = store.write(1, tensors=small_state(1), meta={"n": 1})
    inode = (first / "state.safetensors").stat().st_ino
    assert store.write(1, tensors=small_state(1), meta={"n": 2}, best_metric=1.0) == first
    assert (first / "state.safetensors").stat().st_ino == inode
    assert found_in(store).manifest.meta == {"n": 1}
    assert store.best_step() == 1


def test_a_broken_checkpoint_of_the_same_step_is_written_again(store: CheckpointStore) -> None:
    path = store.write(1, tensors=small_state(1), meta={})
    (path / "manifest.json").unlink()
    store.write(1, tensors=small_state(1), meta={})
    assert_same(store.load(found_in(store))[0], small_state(1))
    assert os.listdir(store.root) == ["step-000000001"]


def test_the_newest_valid_one_is_found_and_the_others_are_named(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.write(step, tensors=small_state(step), meta={})
    (store.root / "step-000000003" / "manifest.json").unlink()
    os.truncate(store.root / "step-000000002" / "state.safetensors", 50)
    (store.root / "step-x").mkdir()
    found, rejected = store.find_valid()
    assert found is not None
    assert found.step == 1
    assert [verdict.path.name for verdict in rejected] == ["step-000000003", "step-000000002"]
    assert "manifest.json is missing" in rejected[0].reason
    assert "truncated: 50 of" in str(rejected[1])


def test_no_checkpoint_yet_is_no_error(store: CheckpointStore) -> None:
    assert store.find_valid() == (None, [])
    assert store.steps() == []
    assert store.best_step() is None


def test_a_file_exchanged_after_it_was_verified_is_not_loaded(store: CheckpointStore) -> None:
    store.write(1, tensors=small_state(1), meta={})
    found = found_in(store)
    content = found.state_path.read_bytes()
    found.state_path.unlink()
    found.state_path.write_bytes(content[::-1])
    with pytest.raises(CheckpointError, match="changed since"):
        store.load(found)


def test_newer_checkpoints_of_a_course_that_was_left_are_set_aside(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        store.write(step, tensors=small_state(step), meta={})
    assert [path.name for path in store.discard_newer(1)] == ["step-000000003", "step-000000002"]
    assert found_in(store).step == 1
    kept = store.verify(store.root / "discarded-step-000000003")
    assert isinstance(kept, Found)
    for step in (2, 3):
        store.write(step, tensors=small_state(step + 10), meta={})
    store.discard_newer(1)
    assert sorted(os.listdir(store.root)) == [
        "discarded-step-000000002",
        "discarded-step-000000003",
        "step-000000001",
    ]


def test_what_dead_writers_left_is_removed_and_what_live_ones_write_is_not(
    store: CheckpointStore,
) -> None:
    store.write(1, tensors=small_state(1), meta={})
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
    store.write(2, tensors=small_state(2), meta={})
    for name, stays in names.items():
        assert (store.root / name).exists() == stays, name


class RecordingDisk:
    """A disk that notes the calls that change it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._names: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            result = getattr(Disk(), name)(*args)
            if name == "create":
                self._names[result] = args[0].name
            paths = [argument.name for argument in args if isinstance(argument, Path)]
            target = paths[-1] if paths else self._names[args[0]]
            self.calls.append(f"{name} {target.split('-step')[0]}")
            return result

        return call


def test_the_manifest_comes_after_the_state_and_the_name_after_both(tmp_path: Path) -> None:
    disk: Any = RecordingDisk()
    CheckpointStore(tmp_path, keep_last=1, disk=disk).write(1, tensors=small_state(1), meta={})
    assert disk.calls == [
        "make_folder .partial",
        "create state.safetensors",
        "write state.safetensors",
        "write state.safetensors",
        "flush_early state.safetensors",
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


def test_a_folder_under_way_is_private(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, keep_last=1).write(1, tensors=small_state(1), meta={})
    assert path.stat().st_mode & 0o777 == 0o700


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


@pytest.fixture
def trained_run(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "mine"
    store = CheckpointStore(run / "checkpoints", keep_last=5)
    model = {"model": "simple_cnn", "num_classes": 10, "input_shape": [1, 8, 8], "epoch": 1}
    for step in (1, 2):
        store.write(step, tensors=every_kind() | small_state(step), meta=model)
    return run


def test_an_export_holds_the_model_without_prefix_and_how_to_load_it(
    trained_run: Path, tmp_path: Path
) -> None:
    output = export_safetensors(trained_run, output=tmp_path / "exports" / "mine")
    weights = load_file(output / "model.safetensors")
    wanted = every_kind() | small_state(2)
    assert_same(
        weights,
        {
            name.removeprefix("model."): tensor
            for name, tensor in wanted.items()
            if name.startswith("model.")
        },
    )
    config = json.loads((output / "config.json").read_text())
    assert config["model"] == "simple_cnn"
    assert config["input_shape"] == [1, 8, 8]
    assert config["class_names"] is None
    assert config["step"] == 2
    assert "load_file" in (output / "README.md").read_text()
    assert os.listdir(output.parent) == ["mine"]


def test_an_export_prefers_the_best_checkpoint_and_passes_over_a_broken_one(
    trained_run: Path, tmp_path: Path
) -> None:
    CheckpointStore(trained_run / "checkpoints", keep_last=5).mark_best(1, 0.9)
    first = export_safetensors(trained_run, output=tmp_path / "first")
    assert json.loads((first / "config.json").read_text())["step"] == 1
    one = trained_run / "checkpoints" / "step-000000001"
    os.truncate(one / "state.safetensors", 10)
    second = export_safetensors(trained_run, output=tmp_path / "second")
    assert json.loads((second / "config.json").read_text())["step"] == 2
    with pytest.raises(CheckpointError, match="truncated"):
        export_safetensors(one, output=tmp_path / "third")


def test_an_export_says_why_it_cannot_be_made(trained_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="exists"):
        export_safetensors(trained_run, output=output)
    assert os.listdir(output) == ["mine.txt"]
    with pytest.raises(CheckpointError, match="is no folder"):
        export_safetensors(tmp_path / "nowhere", output=tmp_path / "x")
    with pytest.raises(CheckpointError, match="none was written"):
        export_safetensors(output, output=tmp_path / "x")
    bare = CheckpointStore(tmp_path / "bare" / "checkpoints", keep_last=1)
    bare.write(1, tensors={"optimizer.x": torch.zeros(1)}, meta={})
    with pytest.raises(CheckpointError, match="no tensor named model"):
        export_safetensors(tmp_path / "bare", output=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_path_means_a_run_its_checkpoints_or_one_of_them(trained_run: Path) -> None:
    root = trained_run / "checkpoints"
    assert open_checkpoint(trained_run).step == 2
    assert open_checkpoint(root).step == 2
    assert open_checkpoint(root / "step-000000001").step == 1
    renamed = trained_run / "my-favourite"
    (root / "step-000000001").rename(renamed)
    assert open_checkpoint(renamed).step == 1
    (root / "step-000000002").rename(root / "step-000000007")
    verdict = CheckpointStore(root, keep_last=1).verify(root / "step-000000007")
    assert isinstance(verdict, Rejected)
    assert "belongs to step 2" in verdict.reason
