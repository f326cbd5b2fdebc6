"""Models and data sets of the Hugging Face libraries: texts, then images.

All are small and made here: no network is used.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import DataError, ModelError
from hardened_ddp.export.export import export_model
from hardened_ddp.export.formats import how_to_load, write_model, write_preparation
from hardened_ddp.model.huggingface import ImageClassifier, TextModel, build_from_config
from hardened_ddp.model.zoo import build_model
from hardened_ddp.settings.config import DataConfig, ModelConfig
from hardened_ddp.training.weights import model_tensors, rebuild_model
from tests.harness.ranks import import_in_server, train
from tests.run_folder import only_run, read_summary

# WHY not importorskip: each process of pytest would import it to collect, for 0.7 s
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs requirements-extras.txt"
)
VOCABULARY, LENGTH = 23, 8
SMALL = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {**SMALL, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 32}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
LLAMA = {**SMALL, "hidden_size": 16, "intermediate_size": 16, "num_key_value_heads": 2}


def saved(folder: Path, name: str, **more: Any) -> str:
    """Save a small model with random weights; return how --model names it."""
    transformers = import_extra("transformers", what="this test")
    torch.manual_seed(0)
    kinds = {"GPT2": GPT2, "Bert": BERT, "Llama": LLAMA}
    base, values = next((b, v) for b, v in kinds.items() if name.startswith(b))
    config = getattr(transformers, f"{base}Config")(**{**values, **more})
    getattr(transformers, name)(config).save_pretrained(folder / name)
    return f"hf:{folder / name}"


def build(model: str, task: str, *, num_classes: int = 0) -> Any:
    return build_model(ModelConfig(model=model), num_classes=num_classes, input_shape=(), task=task)


IDS = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY

HEADS = [
    ("GPT2LMHeadModel", "tokens", 0, (2, LENGTH, VOCABULARY)),
    ("GPT2LMHeadModel", "auto", 0, (2, LENGTH, VOCABULARY)),
    ("LlamaForCausalLM", "tokens", 0, (2, LENGTH, VOCABULARY)),
    ("BertForMaskedLM", "tokens", 0, (2, LENGTH, VOCABULARY)),
    ("BertForTokenClassification", "tokens", 5, (2, LENGTH, 5)),
    ("BertModel", "tokens", 5, (2, LENGTH, 5)),
    ("BertForSequenceClassification", "auto", 4, (2, 4)),
    ("BertForMaskedLM", "classification", 4, (2, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_the_head_is_that_of_the_task(head: tuple[str, str, int, Any], tmp_path: Path) -> None:
    name, task, num_classes, shape = head
    model = build(saved(tmp_path, name), task, num_classes=num_classes)
    assert isinstance(model, TextModel)
    assert model(input_ids=IDS)["logits"].shape == shape
    again = build_from_config(model.hub_config, input_shape=())
    again.load_state_dict(model.state_dict())
    wanted = model.eval()(input_ids=IDS)["logits"]
    assert torch.equal(again.eval()(input_ids=IDS)["logits"], wanted)


def test_a_body_without_a_head_needs_a_task(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="several tasks"):
        build(saved(tmp_path, "BertModel"), "auto")


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Counting texts of two lengths, padded: the labels of padding do not count."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) + index) % VOCABULARY
        mask = torch.arange(LENGTH) < (LENGTH if index % 3 else 5)
        labels = torch.where(mask, ids, -100)
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def give_tokenizer(folder: Path) -> Any:  # Any: a tokenizer of transformers
    """Save a tokenizer in a folder: words, and bytes for the rest."""
    tokenizers = import_extra("tokenizers", what="this test")
    transformers = import_extra("transformers", what="this test")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    words = {word: number for number, word in enumerate(["<s>", "<pad>", *sorted(alphabet)])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    fast = transformers.PreTrainedTokenizerFast
    made = fast(tokenizer_object=inner, bos_token="<s>", pad_token="<pad>", model_max_length=77)
    made.save_pretrained(folder)
    return made


def write_export(model: str, task: str, folder: Path, *, num_classes: int = 0) -> None:
    """Export a model as it is after training."""
    net = build(model, task, num_classes=num_classes)
    meta = {"model": model, "hub_config": net.hub_config, "num_classes": num_classes}
    meta |= {"input_shape": [], "class_names": [], "dataset": "m:f"}
    folder.mkdir()
    write_model(folder, "huggingface", net.state_dict(), json.loads(json.dumps(meta)))


EXPORTED = [("GPT2LMHeadModel", "tokens", 0, True), ("LlamaForCausalLM", "tokens", 0, False)]
EXPORTED += [("BertForMaskedLM", "tokens", 0, True)]
EXPORTED += [("BertForSequenceClassification", "classification", 2, False)]


@pytest.mark.parametrize("case", EXPORTED)
def test_an_export_has_what_the_model_came_with_and_no_other_setting(
    case: tuple[str, str, int, bool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, task, num_classes, use_cache = case
    model = saved(tmp_path, name, use_cache=use_cache)
    source, out = tmp_path / name, tmp_path / "out"
    (source / "vocab_old").mkdir()  # what else is in the folder does no harm
    told = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokenizer = give_tokenizer(source)
    generation = source / "generation_config.json"
    if generation.exists():
        given = {"max_new_tokens": 7, "do_sample": True, "temperature": 0.4}
        generation.write_text(json.dumps(given), encoding="utf-8")
    write_export(model, task, out, num_classes=num_classes)
    assert "the export has no" not in caplog.text
    assert json.loads((out / "config.json").read_text(encoding="utf-8")) == told
    assert (out / "generation_config.json").exists() == generation.exists()
    if generation.exists():
        assert (out / "generation_config.json").read_bytes() == generation.read_bytes()
    again = import_extra("transformers", what="this test").AutoTokenizer.from_pretrained(out)
    text = "A naïve café: 漢字 1,234\n\tdef f(x)"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"] != []
    assert again.model_max_length == 77


def test_a_missing_tokenizer_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = saved(tmp_path, "GPT2LMHeadModel")
    settings = tmp_path / "GPT2LMHeadModel" / "tokenizer_config.json"
    settings.write_text('{"model_max_length": 77}')  # no tokenizer by themselves
    write_export(model, "tokens", tmp_path / "out")
    assert f"the export has no tokenizer: none is at {model} on this machine" in caplog.text
    assert not list((tmp_path / "out").glob("*token*"))
    (tmp_path / "GPT2LMHeadModel").rename(tmp_path / "moved")
    net = build(f"hf:{tmp_path / 'moved'}", "tokens")
    meta = {"model": model, "hub_config": net.hub_config}
    (tmp_path / "other").mkdir()
    caplog.clear()
    write_model(tmp_path / "other", "huggingface", net.state_dict(), meta)
    assert "the export has no tokenizer" in caplog.text


def test_a_tokenizer_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "GPT2LMHeadModel")
    cache = tmp_path / "cache"
    snapshot = cache / "models--somebody--small" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    (tmp_path / "GPT2LMHeadModel").rename(snapshot)
    (cache / "models--somebody--small" / "refs").mkdir()
    (cache / "models--somebody--small" / "refs" / "main").write_text("0" * 40)
    tokenizer = give_tokenizer(snapshot)
    hub = import_extra("huggingface_hub", what="this test")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "out").mkdir()
    meta = {"model": "hf:somebody/small", "dataset": "digits"}
    assert write_preparation(tmp_path / "out", meta, kind="tokenizer")
    again = import_extra("transformers", what="this test").AutoTokenizer
    assert again.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()


def test_an_image_processor_scales_as_the_training_did(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    meta = {"model": f"hf:{source}", "dataset": "hf:pictures"}
    assert not write_preparation(out, meta, kind="image processor")
    given = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}
    given |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (source / "preprocessor_config.json").write_text(json.dumps(given), encoding="utf-8")
    assert write_preparation(out, meta, kind="image processor")
    written = json.loads((out / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert written["size"] == given["size"]
    white = (255 * written["rescale_factor"] - written["image_mean"][2]) / written["image_std"][2]
    assert white == pytest.approx(1)
    assert write_preparation(out, {**meta, "dataset": "cifar10"}, kind="image processor")
    assert json.loads((out / "preprocessor_config.json").read_text()) == given


def check_exports(run: Path, folder: Path) -> None:
    """Load an export of a run as its users do, compare the logits, and read its card."""
    tensors, meta = load_checkpoint(open_checkpoint(run, prefer_best=True))
    model = rebuild_model(model_tensors(tensors, meta), meta)
    wanted = model(input_ids=IDS)["logits"]
    whole = export_model(run, output=folder / "whole", form="huggingface")
    gpt2 = import_extra("transformers", what="this test").GPT2LMHeadModel
    assert torch.equal(gpt2.from_pretrained(whole).eval()(input_ids=IDS).logits, wanted)
    card = (whole / "README.md").read_text(encoding="utf-8")
    assert "from transformers import GPT2LMHeadModel" in card


@pytest.mark.slow
@pytest.mark.timeout(600)  # a tracer takes half a minute where several tests share the cores
@pytest.mark.parametrize(
    ("name", "form"),
    [("LlamaForCausalLM", "onnx"), ("BertForSequenceClassification", "torch_export")],
)
def test_text_exports_take_padded_texts_of_any_length(name: str, form: str, tmp_path: Path) -> None:
    model = build(saved(tmp_path, name), "auto").eval()
    meta = {"model": f"hf:{name}", "hub_config": model.hub_config, "input_shape": []}
    ids, mask = torch.arange(33).view(3, 11) % VOCABULARY, torch.ones(3, 11, dtype=torch.int64)
    mask[1, 4:] = 0
    wanted = model(input_ids=ids, attention_mask=mask)["logits"]
    write_model(tmp_path, form, model.state_dict(), meta)
    if form == "onnx":
        evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
        tokens = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        [found] = evaluator(str(tmp_path / "model.onnx")).run(["logits"], tokens)
    else:
        found = torch.export.load(tmp_path / "model.pt2").module()(ids, mask).detach()
        assert 'model(tokens["input_ids"], tokens["attention_mask"])' in how_to_load(form, meta)
    assert torch.allclose(torch.as_tensor(found), wanted, rtol=1e-4, atol=1e-5)


def counting(lengths: Sequence[int]) -> dict[str, list[Any]]:
    """Texts that count from their number on, each as long as given."""
    ids = [[(number + i) % VOCABULARY for i in range(n)] for number, n in enumerate(lengths)]
    return {"input_ids": ids, "labels": ids, "text": ["a text"] * len(ids)}


def save(folder: Path, columns: Mapping[str, Any], test: Mapping[str, Any] | None = None) -> Path:
    """Save a set, or one with two parts, and return its folder."""
    datasets = pytest.importorskip("datasets", reason="needs requirements-extras.txt")
    rows = datasets.Dataset.from_dict(dict(columns))
    if test is not None:
        part = datasets.Dataset.from_dict(dict(test))
        rows = datasets.DatasetDict({"train": rows, "validation": part})
    rows.save_to_disk(folder / "set")
    return folder / "set"


def opened(folder: Path, task: str = "tokens", **arguments: Any) -> Any:
    return build_data(DataConfig(dataset=f"hf:{folder}", dataset_args=arguments), task=task)


def batch_of(data: Any, *indices: int) -> dict[str, torch.Tensor]:
    return data.train.collate_fn(data.train.__getitems__(list(indices)))


@pytest.mark.slow
def test_a_model_learns_to_count_from_a_folder_is_evaluated_and_exported(tmp_path: Path) -> None:
    for name in ("datasets", "transformers.models.gpt2.modeling_gpt2"):
        import_in_server(name)
    lengths = [5 + number % 4 for number in range(48)]
    folder = save(tmp_path, counting(lengths), counting(lengths))
    model = saved(tmp_path, "GPT2LMHeadModel")
    argv: list[str | Path] = ["--model", model, "--task", "tokens", "--cpu_only", "--ledger"]
    argv += ["--dataset", f"hf:{folder}", "--batch_size", "8", "--learning_rate", "0.02"]
    argv += ["--epochs", "30", "--eval_every", "30", "--num_workers", "1"]
    train([*argv, "--output_dir", tmp_path / "runs"], 2, timeout_s=240).ok()
    run = only_run(tmp_path / "runs")
    done = train(["verify-ledger", run], launcher="none").ok()
    assert done.output.count("48 samples, each exactly once") == 30
    summary = read_summary(run)
    # After the shift every label that counts can be predicted.
    assert summary["test_perplexity"] < 1.5
    assert summary["test_token_accuracy"] > 0.95
    text = train(["evaluate", run], launcher="none").ok().output
    assert f"perplexity {summary['test_perplexity']:.4g}" in text
    check_exports(run, tmp_path)


def test_rows_are_padded_and_padding_counts_nowhere(tmp_path: Path) -> None:
    data = opened(save(tmp_path, counting([3, 5, 4])), pad=7)
    assert data.test is None
    batch = batch_of(data, 0, 1)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 7, 7], [1, 2, 3, 4, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"].tolist() == [[0, 1, 2, -100, -100], [1, 2, 3, 4, 5]]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert set(opened(tmp_path / "set", columns=["input_ids"]).train[0]) == {"input_ids", "labels"}


def test_a_set_keeps_its_mask_and_gets_none_where_no_row_is_padded(tmp_path: Path) -> None:
    columns = counting([4, 4])
    assert set(opened(save(tmp_path, columns)).train[0]) == {"input_ids", "labels"}
    columns |= {"attention_mask": [[0, 1, 1, 1], [1] * 4], "token_type_ids": [[0, 0, 1, 1]] * 2}
    data = opened(save(tmp_path / "masked", columns))
    assert batch_of(data, 0, 1)["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert batch_of(data, 1)["token_type_ids"].tolist() == [[0, 0, 1, 1]]


def test_the_ids_may_be_the_labels(tmp_path: Path) -> None:
    columns = {"input_ids": [[1, 2, 0], [3, 4, 5]], "attention_mask": [[1, 1, 0], [1, 1, 1]]}
    folder = save(tmp_path, columns)
    told = r"no column label or .*; it has: input_ids, attention_m"
    with pytest.raises(DataError, match=told) as caught:
        opened(folder)
    assert "{label: input_ids}" in caught.value.fix
    batch = batch_of(opened(folder, label="input_ids"), 0, 1)
    assert batch["labels"].tolist() == [[1, 2, -100], [3, 4, 5]]
    assert batch["input_ids"].tolist() == columns["input_ids"]


def test_classes_are_those_of_the_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs requirements-extras.txt")
    names = datasets.ClassLabel(names=["no", "yes"])
    kinds = {"input_ids": datasets.List(datasets.Value("int32")), "tags": datasets.List(names)}
    rows = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2], [3, 4]], "tags": [[0, 1], [1, 1]]}, datasets.Features(kinds)
    )
    rows.save_to_disk(tmp_path / "tags")
    data = opened(tmp_path / "tags", label="tags")
    assert (data.num_classes, data.class_names) == (2, ("no", "yes"))
    assert opened(tmp_path / "tags", label="input_ids", num_classes=9).num_classes == 9


def test_one_label_for_each_text_of_another_length_needs_the_padding_token(tmp_path: Path) -> None:
    columns = counting([3, 5, 4]) | {"labels": [0, 2, 1]}
    folder = save(tmp_path, columns)
    with pytest.raises(DataError, match="texts of 3 to 5 tokens have one label each"):
        opened(folder, task="classification")
    data = opened(folder, task="classification", pad=0)
    assert data.num_classes == 3
    assert batch_of(data, 0, 1)["labels"].tolist() == [0, 2]


def test_a_set_of_other_columns_is_told_with_those_that_it_has(tmp_path: Path) -> None:
    folder = save(tmp_path, {"sentence": ["a", "b"], "stars": [1, 2]})
    told = r"no column image or img or pixel_values or images; it has: sentence, stars"
    with pytest.raises(DataError, match=told) as caught:
        opened(folder)
    assert "of a text: its tokens in a column input_ids" in caught.value.fix
    assert "download" not in f"{caught.value.message} {caught.value.fix}"


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ViT for 3 classes of RGB pictures, 16x16, as save_pretrained() leaves it."""
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
    datasets: Any = pytest.importorskip("datasets", reason="needs requirements-extras.txt")
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
