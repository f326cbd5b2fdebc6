"""Models and image sets of the Hugging Face libraries, from local folders: no network is used."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import DataError, MissingPackageError, ModelError
from hardened_ddp.export.export import export_model
from hardened_ddp.model.huggingface import ImageClassifier
from hardened_ddp.model.zoo import build_model
from hardened_ddp.settings.config import DataConfig, ModelConfig
from hardened_ddp.streams.formats import open_files
from tests.harness.ranks import import_in_server, train
from tests.run_folder import only_run

EXTRAS = "needs requirements-extras.txt"


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ViT for 3 classes of RGB pictures, 16x16, as save_pretrained() leaves it."""
    pytest.importorskip("transformers", reason=EXTRAS)
    transformers = import_extra("transformers", what="this test")
    sizes = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}
    config = transformers.ViTConfig(**sizes)
    folder = tmp_path_factory.mktemp("hub") / "vit"
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey pictures of two classes, dark and bright, as save_to_disk() leaves them."""
    datasets: Any = pytest.importorskip("datasets", reason=EXTRAS)
    from PIL import Image

    def part(size: int) -> Any:
        images = [Image.fromarray(np.full((8, 8), 200 * (i % 2), np.uint8)) for i in range(size)]
        features = datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "bright"])}
        )
        columns = {"image": images, "label": [i % 2 for i in range(size)]}
        return datasets.Dataset.from_dict(columns, features=features)

    folder = tmp_path_factory.mktemp("sets") / "pictures"
    datasets.DatasetDict({"train": part(40), "test": part(10)}).save_to_disk(folder)
    return folder


def load(folder: Path, *, input_shape: tuple[int, ...] = (3, 16, 16), **args: Any) -> Any:
    config = ModelConfig(model=f"hf:{folder}", model_args=args)
    return build_model(config, num_classes=10, input_shape=input_shape)


@pytest.mark.slow
def test_the_body_is_loaded_and_the_head_fits_the_classes(vit: Path) -> None:
    model = load(vit)
    auto = import_extra("transformers", what="this test").AutoModelForImageClassification
    saved = auto.from_pretrained(vit, local_files_only=True).state_dict()
    for name, tensor in model.net.state_dict().items():
        if name.startswith("classifier"):
            assert tensor.shape[0] == 10
        else:
            assert torch.equal(tensor, saved[name]), name
    # small grey images are shown as the model knows them
    model = load(vit, input_shape=(1, 8, 8)).eval()
    grey = torch.rand(2, 1, 8, 8)
    large = torch.nn.functional.interpolate(grey, (16, 16), mode="bilinear", antialias=True)
    with torch.no_grad():
        wanted = model.net(pixel_values=large.repeat(1, 3, 1, 1)).logits
        assert torch.equal(model(grey), wanted)
    assert wanted.shape == (2, 10)


@pytest.mark.slow
def test_what_is_no_fitting_classifier_is_one_error(vit: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="3 channels, and the data has samples of shape"):
        load(vit, input_shape=(4, 16, 16))
    with pytest.raises(ModelError, match=r"do not fit the model: .* would be new"):
        load(vit, image_size=32)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="can't be loaded: ValueError"):
        load(tmp_path)
    # nor is a pickle read
    (tmp_path / "config.json").write_bytes((vit / "config.json").read_bytes())
    torch.save({"classifier.weight": torch.ones(3, 16)}, tmp_path / "pytorch_model.bin")
    model = load(tmp_path)  # from random weights, with a warning
    assert isinstance(model, ImageClassifier)


def test_an_absent_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="--dataset hf:set needs datasets, which is not"):
        build_data(DataConfig(dataset="hf:set"))
    model = ModelConfig(model="hf:vit")
    with pytest.raises(MissingPackageError, match="--model hf:vit needs transformers, which is"):
        build_model(model, num_classes=2, input_shape=(1, 8, 8))
    with pytest.raises(MissingPackageError, match="needs pyarrow, which is not installed"):
        open_files("parquet:/etc/hos*", train=True)


@pytest.mark.slow
def test_two_ranks_fine_tune_a_folder_and_export(vit: Path, pictures: Path, tmp_path: Path) -> None:
    for module in ("transformers.models.vit.modeling_vit", "datasets"):
        import_in_server(module)
    runs = tmp_path / "runs"
    argv = ["--cpu_only", "--model", f"hf:{vit}", "--dataset", f"hf:{pictures}", "--epochs", "3"]
    argv += ["--batch_size", "4", "--output_dir", str(runs)]
    done = train([*argv, "--gradient_checkpointing"], 2).ok()
    assert "(10 samples)" in done.output
    run = only_run(runs)
    report = tmp_path / "report.json"
    train(["evaluate", str(run), "--cpu_only", "--output", str(report)], 2).ok()
    assert json.loads(report.read_text())["num_samples"] == 10
    folder = export_model(run, output=tmp_path / "out", form="huggingface")
    auto = import_extra("transformers", what="this test").AutoModelForImageClassification
    model = auto.from_pretrained(folder, local_files_only=True)
    assert model.config.id2label == {0: "dark", 1: "bright"}


def test_an_image_set_gives_images_labels_and_names(pictures: Path) -> None:
    data = build_data(DataConfig(dataset=f"hf:{pictures}"))
    assert (len(data.train), len(data.test)) == (40, 10)  # type: ignore[arg-type]
    assert data.class_names == ("dark", "bright")
    assert data.input_shape == (1, 8, 8)
    image, label = data.train[1]
    assert label == 1
    assert torch.allclose(image, torch.full((1, 8, 8), 200 / 127.5 - 1))
    scaled = build_data(DataConfig(dataset=f"hf:{pictures}", dataset_args={"image_size": 4}))
    assert scaled.input_shape == (1, 4, 4)


def test_wrong_columns_and_parts_are_told_with_the_right_ones(pictures: Path) -> None:
    for arguments, told in (
        ({"image": "picture"}, "no column picture; it has: image, label"),
        ({"train_part": "tarin"}, "no part 'tarin'; it has: train, test"),
    ):
        with pytest.raises(DataError, match=told):
            build_data(DataConfig(dataset=f"hf:{pictures}", dataset_args=arguments))
