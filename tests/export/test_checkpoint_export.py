"""The model for those who use it: what an export holds, and what a user's path means."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.checkpoint.folder import open_checkpoint
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError
from hardened_ddp.export.export import export_model
from tests.checkpoint_states import assert_same, every_kind, small_state


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
    output = export_model(trained_run, output=tmp_path / "exports" / "mine")
    weights = load_file(output / "model.safetensors")
    wanted = every_kind() | small_state(2)
    model = {n.removeprefix("model."): t for n, t in wanted.items() if n.startswith("model.")}
    assert_same(weights, model)
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
    CheckpointStore(trained_run / "checkpoints", keep_last=5).mark_best(1, {"value": 0.9})
    first = export_model(trained_run, output=tmp_path / "first")
    assert json.loads((first / "config.json").read_text())["step"] == 1
    one = trained_run / "checkpoints" / "step-000000001"
    os.truncate(one / "state.safetensors", 10)
    second = export_model(trained_run, output=tmp_path / "second")
    assert json.loads((second / "config.json").read_text())["step"] == 2
    with pytest.raises(CheckpointError, match="truncated"):
        export_model(one, output=tmp_path / "third")


def test_an_export_that_differs_from_the_checkpoint_is_not_made(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_wrongly(_: Disk, descriptor: int, data: memoryview) -> int:
        is_header = data[8:9] == b"{"
        return os.write(descriptor, bytes(data[:-1]) + bytes([data[-1] ^ (not is_header)]))

    monkeypatch.setattr(Disk, "write", write_wrongly)
    with pytest.raises(CheckpointError, match="differ from the checkpoint"):
        export_model(trained_run, output=tmp_path / "exports" / "mine")
    assert os.listdir(tmp_path / "exports") == []


def test_an_export_says_why_it_cannot_be_made(trained_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    export_model(trained_run, output=output)  # it is empty
    with pytest.raises(CheckpointError, match="an export would mix with its content"):
        export_model(trained_run, output=output)
    with pytest.raises(CheckpointError, match="is not a folder"):
        export_model(tmp_path / "nowhere", output=tmp_path / "x")
    with pytest.raises(CheckpointError, match="none was written"):
        export_model(tmp_path, output=tmp_path / "x")
    bare = CheckpointStore(tmp_path / "bare" / "checkpoints", keep_last=1)
    bare.write(1, tensors={"optimizer.x": torch.zeros(1)}, meta={})
    with pytest.raises(CheckpointError, match="no tensor named model"):
        export_model(tmp_path / "bare", output=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_path_means_a_run_its_checkpoints_or_one_of_them(trained_run: Path) -> None:
    root = trained_run / "checkpoints"
    assert open_checkpoint(trained_run).step == 2
    assert open_checkpoint(root).step == 2
    assert open_checkpoint(root / "step-000000001").step == 1
    renamed = trained_run / "my-favourite"
    (root / "step-000000001").rename(renamed)
    assert open_checkpoint(renamed).step == 1
