"""How given weights come into a new run, as far as they fit, and a saved state to the ranks.

The memory of a resume: tests/ranks/test_memory.py.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.checkpoint.tensors import TensorSpec
from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.errors import CheckpointError, CheckpointMismatchError, MainRankError
from hardened_ddp.export.export import export_model
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.step.progress import Progress
from hardened_ddp.training import state
from hardened_ddp.training.weights import fit_weights, load_initial_weights, read_weights
from tests.harness.ranks import run_ranks, train
from tests.ranks.test_shared_sum import rendezvous

CPU = torch.device("cpu")


def net(outputs: int = 2) -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, outputs)})


def wrapped(module: nn.Module) -> nn.Module:
    return nn.ModuleDict({"net": module})


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


def fit(found: dict[str, torch.Tensor], model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    return fit_weights(found, model, Path("weights"))


def test_weights_that_fit_are_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found, model = weights(net()), net()
    save_file(found, tmp_path / "w.safetensors")
    with caplog.at_level(logging.INFO):
        load_initial_weights(model, str(tmp_path / "w.safetensors"), Group(Launch(), CPU))
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())
    assert "4 of 4 tensors, 100.0% of values" in caplog.text
    assert len(caplog.records) == 1


def test_what_does_not_fit_is_named() -> None:
    found = weights(net(7)) | {"extra.scale": torch.zeros(2)}
    del found["body.bias"]
    found["body.weight"] = found["body.weight"].half()
    fitting, lines = fit(found, net())
    assert list(fitting) == ["body.weight"]
    assert lines[0].startswith("--init_from weights: 1 of 4 tensors, 46.2% of values")
    assert lines[1:] == [
        " not in the file, and new: body.bias",
        " of another shape, and new: head.weight is 7x4 float32 in the file, 2x4 float32 in the "
        "model, head.bias is 7 float32 in the file, 2 float32 in the model",
        " in the file, and not in the model: extra.scale",
    ]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "net."])
def test_names_of_a_wrapper_are_dropped_or_added(prefix: str) -> None:
    found = weights(net())
    fitting, [told] = fit({prefix + name: tensor for name, tensor in found.items()}, net())
    assert fitting.keys() == found.keys()
    assert told.endswith(f" (its names: {prefix!r} dropped, '' put before)")
    fitting, _ = fit(found, wrapped(wrapped(net())))
    assert fitting.keys() == {f"net.net.{name}" for name in found}


def test_a_head_beside_the_named_part_is_found_too() -> None:
    model = nn.ModuleDict({"bert": net(), "classifier": nn.Linear(2, 2)})
    found = weights(net()) | {"classifier.weight": torch.ones(2, 2)}
    fitting, lines = fit(found, model)
    assert {"bert.body.weight", "bert.head.bias"} <= fitting.keys()
    assert lines[-1] == " in the file, and not in the model: classifier.weight"


def test_tied_weights_need_one_name() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["words"].weight
    _, told = fit({"words.weight": torch.ones(5, 3)}, model)
    assert told == ["--init_from weights: 1 of 1 tensors, 100.0% of values"]


@pytest.mark.slow
def test_a_run_a_checkpoint_and_an_export_are_understood(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--dataset", "tests.plugins:points", "--model", "mlp", "--epochs", "1"]
    first = [*argv, "--output_dir", str(tmp_path / "runs"), "--run_name", "first"]
    train(first).ok()
    run = tmp_path / "runs/first"
    checkpoint = open_checkpoint(run)
    expected = read_weights(run)
    export_model(run, output=tmp_path / "export")
    for path in (checkpoint.path, tmp_path / "export"):
        found = read_weights(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    # A new run on 2 ranks that changes nothing has these weights, on both of them.
    still = [*argv, "--optimizer", "sgd", "--learning_rate", "0", "--check_replicas_every", "1"]
    still += ["--init_from", str(tmp_path / "export"), "--output_dir", str(tmp_path / "new")]
    train([*still, "--run_name", "second", "--seed", "7"], 2).ok()
    tensors, _ = load_checkpoint(open_checkpoint(tmp_path / "new/second"))
    assert all(torch.equal(tensors[f"model.{name}"], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_folder_of_hugging_face_is_understood_also_in_shards(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs requirements-extras.txt")
    transformers = import_extra("transformers", what="this test")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    bert = transformers.BertForSequenceClassification(config)
    bert.save_pretrained(tmp_path / "one")
    bert.save_pretrained(tmp_path / "shards", max_shard_size="3KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    other = transformers.BertForSequenceClassification(config)
    for name in ("one", "shards"):
        _, [told] = fit(read_weights(tmp_path / name), wrapped(other))
        assert "100.0% of values (its names: '' dropped, 'net.' put before)" in told


ONE, INDEX = {"w": torch.zeros(2)}, '{"weight_map": {"w": "../x"}}'


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "the folder has no *.safetensors"),
        ({"a.safetensors": ONE, "b.safetensors": ONE}, "not clear which weights are meant"),
        ({"a.safetensors": "not tensors"}, "can't be read as safetensors"),
        ({"pytorch_model.bin": "pickle"}, "is a pickle"),
        ({"m.safetensors.index.json": "[]"}, "is no index of weights"),
        ({"m.safetensors.index.json": INDEX}, "x can't be read"),
        ({"manifest.json": "{}"}, "the checkpoint can't be used"),
    ],
)
def test_a_folder_of_no_use_is_told(files: dict[str, Any], told: str, tmp_path: Path) -> None:
    for name, content in files.items():
        if isinstance(content, dict):
            save_file(content, tmp_path / name)
        else:
            (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read_weights(tmp_path)
    assert told in str(caught.value)


def test_a_path_that_is_not_there_or_a_pickle_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        read_weights(tmp_path / "missing")
    (tmp_path / "w.pt").touch()
    with pytest.raises(CheckpointError, match="is a pickle") as caught:
        read_weights(tmp_path / "w.pt")
    assert "weights_only=True" in caught.value.fix


def test_weights_of_another_model_are_an_error_that_names_both() -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        fit({"conv.weight": torch.zeros(2)}, net())
    assert "conv.weight" in caught.value.message
    assert "body.weight" in caught.value.message
    with pytest.raises(CheckpointMismatchError, match="weight is 9x9 float32"):
        fit({"body.weight": torch.zeros(9, 9)}, net())


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_state_goes_over_nccl_if_it_can(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, sent = torch.device("cuda", 0), dict[str, torch.device]()

    def receive(group: object, saved: object, names: list[str], device: torch.device) -> Any:
        sent.update(dict.fromkeys(names, device))
        return {}

    monkeypatch.setattr(state, "receive", receive)
    for name in ("check_fits", "restore_state"):
        monkeypatch.setattr(state, name, mock.Mock())
    parts = mock.MagicMock(average=None, base={}, precision=mock.Mock(scaler=None))
    parts.group = SimpleNamespace(device=gpu, backend=backend)
    parts.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    shapes = {"model.weight": (3,), "optimizer.weight.exp_avg": (3,), "optimizer.weight.step": ()}
    specs = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    meta = asdict(Progress(step=7)) | {"stream": None, "optimizer_state": {}}
    assert state.restore(parts, mock.Mock(specs=specs, meta=meta)).step == 7
    large = gpu if backend == "nccl" else CPU
    assert list(sent.values()) == [large, large, CPU], "step counts stay on the host"


NAMES = [f"model.{number}" for number in range(5)]


def received(fails_at: int) -> tuple[list[float], int, str]:
    """Receive a state in chunks of one tensor; return it, the ranks' votes, and the error."""
    group = rendezvous()
    votes, gather = [], group.gather_json

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        numbers = [int(name.removeprefix("model.")) for name in names]
        if fails_at in numbers:
            raise OSError(f"tensor {fails_at} can't be read")
        return {name: torch.full((3,), number) for name, number in zip(names, numbers, strict=True)}

    def count(value: Any) -> list[Any]:
        votes.append(value)
        return gather(value)

    specs = {name: TensorSpec((3,), "int64") for name in NAMES}
    saved = state.Saved(specs, {}, read=read if group.is_main else None)
    found, error = {}, ""
    group.gather_json = count  # type: ignore[method-assign]
    with mock.patch.object(state, "_CHUNK_BYTES", 1):
        try:
            found = state.receive(group, saved, NAMES, CPU)
        except MainRankError as raised:
            error = raised.message
    group.close()
    return [float(found[name][2]) for name in found], len(votes), error


def test_the_ranks_agree_once_on_a_state_however_large_it_is() -> None:
    assert run_ranks(received, 2, -1) == [([0.0, 1.0, 2.0, 3.0, 4.0], 1, "")] * 2
    for found, votes, error in run_ranks(received, 2, 2):
        assert (found, votes) == ([], 1)
        assert "reading the checkpoint failed on rank 0: OSError: tensor 2 can't be read" in error
