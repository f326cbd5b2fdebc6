"""The model for those who use it: what an export holds, and what a user's path means.

Formats that hold a whole model are loaded as their users do, and give the same logits. Those that
need a package of requirements-extras.txt are skipped where it is absent.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError, MissingPackageError, ModelError
from hardened_ddp.export import formats
from hardened_ddp.export.export import export_model
from hardened_ddp.settings.typed_command import pip_command
from hardened_ddp.training.weights import model_tensors, rebuild_model
from tests.checkpoint_states import assert_same, every_kind, small_state
from tests.harness.ranks import run_program, train
from tests.run_folder import only_run

Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "runs"
    train(["--cpu_only", "--max_steps", "5", "--output_dir", str(folder)]).ok()
    return only_run(folder)


@pytest.fixture(scope="module")
def wanted(run: Path) -> Pair:
    """Inputs, and the logits that the checkpoint gives for them."""
    inputs = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    tensors, meta = load_checkpoint(open_checkpoint(run, prefer_best=True))
    with torch.no_grad():
        return inputs, rebuild_model(model_tensors(tensors, meta), meta)(inputs)


def export(run: Path, form: str, output: Path) -> Path:
    argv = ["python", "ddp_training.py", "export", run, "--format", form, "--output", output]
    done = run_program(argv, timeout_s=120).ok()
    assert f"exported to {output}" in done.stdout
    assert (output / "README.md").read_text(encoding="utf-8").isascii()
    os.umask(mask := os.umask(0))  # only a change tells what it is
    assert {path.stat().st_mode & 0o777 for path in output.iterdir()} == {0o664 & ~mask}
    return output


@pytest.mark.slow
def test_huggingface_is_loaded_by_from_pretrained(run: Path, tmp_path: Path, wanted: Pair) -> None:
    pytest.importorskip("huggingface_hub", reason="needs requirements-extras.txt")
    folder = export(run, "huggingface", tmp_path / "out")
    from hardened_ddp.model.hub import HubModel

    model = HubModel.from_pretrained(folder, local_files_only=True)
    assert not model.training
    assert list(model.class_names) == [str(digit) for digit in range(10)]
    with torch.no_grad():
        assert torch.equal(model(wanted[0]), wanted[1])
    model.save_pretrained(tmp_path / "again")
    again = HubModel.from_pretrained(tmp_path / "again", local_files_only=True)
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))


@pytest.mark.slow
def test_torch_export_is_a_program_without_this_code(
    run: Path, tmp_path: Path, wanted: Pair
) -> None:
    folder = export(run, "torch_export", tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["input_shape"] == [1, 8, 8]
    torch.save(wanted[0], tmp_path / "inputs.pt")
    code = (
        "import sys, torch\n"
        f"model = torch.export.load(r'{folder / 'model.pt2'}').module()\n"
        f"logits = model(torch.load(r'{tmp_path / 'inputs.pt'}'))\n"
        f"torch.save(logits.detach(), r'{tmp_path / 'logits.pt'}')\n"
        "assert not any(name.startswith('hardened_ddp') for name in sys.modules)\n"
    )
    run_program(["python", "-c", code], timeout_s=60, cwd=tmp_path).ok()
    logits = torch.load(tmp_path / "logits.pt")
    assert torch.allclose(logits, wanted[1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_onnx_gives_the_same_logits_for_any_batch(run: Path, tmp_path: Path, wanted: Pair) -> None:
    reference = pytest.importorskip("onnx.reference", reason="needs requirements-extras.txt")
    pytest.importorskip("onnxscript", reason="needs requirements-extras.txt")
    folder = export(run, "onnx", tmp_path / "out")
    evaluator = reference.ReferenceEvaluator(str(folder / "model.onnx"))
    [logits] = evaluator.run(["logits"], {"inputs": wanted[0].numpy()})
    assert torch.allclose(torch.from_numpy(logits), wanted[1], rtol=1e-4, atol=1e-5)


def test_an_export_with_other_logits_is_not_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_another_model(folder: Path, model: torch.nn.Module, meta: object) -> formats.Forward:
        (folder / "model.pt2").write_bytes(b"x")
        return lambda inputs: model(inputs) + 0.01

    monkeypatch.setattr(formats, "_write_torch_export", write_another_model)
    with pytest.raises(CheckpointError, match=r"other logits than the checkpoint: .* 0\.01"):
        export_model(run, output=tmp_path / "exports" / "x", form="torch_export")
    assert os.listdir(tmp_path / "exports") == []


def test_a_model_that_can_not_be_traced_is_one_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> formats.Forward:
        raise AssertionError("a tracer's own words")

    monkeypatch.setattr(formats, "_write_torch_export", fail)
    with pytest.raises(ModelError, match="written as torch_export: AssertionError: a tracer's"):
        export_model(run, output=tmp_path / "x", form="torch_export")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("form", "package"), [("huggingface", "huggingface_hub"), ("onnx", "onnx")]
)
def test_an_absent_package_is_named_with_the_command_that_installs_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError) as caught:
        export_model(run, output=tmp_path / "x", form=form)
    assert str(caught.value) == (
        f"[DDP-X02] --format {form} needs {package}, which is not installed\n"
        f"  next: {pip_command('requirements-extras.txt')}"
    )
    assert not (tmp_path / "x").exists()


@pytest.fixture
def trained_run(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "mine"
    store = CheckpointStore(run / "checkpoints", keep_last=5)
    model = {"model": "simple_cnn", "num_classes": 10, "input_shape": [1, 8, 8], "epoch": 1}
    for step in (1, 2):
        store.write(step, tensors=every_kind() | small_state(step), meta=model)
    return run


def test_an_export_holds_the_model_and_how_to_load_it(trained_run: Path, tmp_path: Path) -> None:
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


def test_an_export_is_of_the_best_that_is_whole(trained_run: Path, tmp_path: Path) -> None:
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
    (output := tmp_path / "out").mkdir()
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
