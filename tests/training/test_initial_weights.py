"""A new run that starts from given weights: as far as they fit, and what does not is named."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.errors import CheckpointError, CheckpointMismatchError
from hardened_ddp.export.export import export_model
from hardened_ddp.training.weights import fit_weights, load_initial_weights, read_weights
from tests.harness.ranks import train

HERE = Path("weights")


class Net(nn.Module):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, outputs)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight


class Wrapper(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


class Alone:
    """A group of one rank."""

    def run_on_main(self, work: Any, *, what: str) -> Any:
        return work()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


def fit(
    found: dict[str, torch.Tensor], model: nn.Module
) -> tuple[dict[str, torch.Tensor], list[str]]:
    return fit_weights(found, model, HERE)


def test_weights_that_fit_are_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found, model = weights(Net()), Net()
    save_file(found, tmp_path / "w.safetensors")
    with caplog.at_level(logging.INFO):
        load_initial_weights(model, str(tmp_path / "w.safetensors"), Alone())  # type: ignore[arg-type]
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())
    assert "4 of 4 tensors, 100.0% of values" in caplog.text
    assert len(caplog.records) == 1


def test_what_does_not_fit_is_named() -> None:
    found = weights(Net(7)) | {"extra.scale": torch.zeros(2)}
    del found["body.bias"]
    found["body.weight"] = found["body.weight"].half()
    fitting, lines = fit(found, Net())
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
    found = weights(Net())
    fitting, [told] = fit({prefix + name: tensor for name, tensor in found.items()}, Net())
    assert fitting.keys() == found.keys()
    assert told.endswith(f" (its names: {prefix!r} dropped, '' put before)")
    fitting, _ = fit(found, Wrapper(Wrapper(Net())))
    assert fitting.keys() == {f"net.net.{name}" for name in found}


def test_a_head_beside_the_named_part_is_found_too() -> None:
    model = nn.ModuleDict({"bert": Net(), "classifier": nn.Linear(2, 2)})
    found = weights(Net()) | {"classifier.weight": torch.ones(2, 2)}
    fitting, lines = fit(found, model)
    assert {"bert.body.weight", "bert.head.bias"} <= fitting.keys()
    assert lines[-1] == " in the file, and not in the model: classifier.weight"


def test_tied_weights_need_one_name() -> None:
    _, told = fit({"words.weight": torch.ones(5, 3)}, Tied())
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
    net = transformers.BertForSequenceClassification(config)
    net.save_pretrained(tmp_path / "one")
    net.save_pretrained(tmp_path / "shards", max_shard_size="3KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    other = transformers.BertForSequenceClassification(config)
    for name in ("one", "shards"):
        _, [told] = fit(read_weights(tmp_path / name), Wrapper(other))
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
        fit({"conv.weight": torch.zeros(2)}, Net())
    assert "conv.weight" in caught.value.message
    assert "body.weight" in caught.value.message
    with pytest.raises(CheckpointMismatchError, match="weight is 9x9 float32"):
        fit({"body.weight": torch.zeros(9, 9)}, Net())
