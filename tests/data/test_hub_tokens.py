"""Tokenised texts that save_to_disk() wrote: --dataset hf:FOLDER. No network is used."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import DataError
from hardened_ddp.settings.config import DataConfig
from tests.harness.ranks import import_in_server, train
from tests.model.test_hub_text import VOCABULARY, check_exports, saved
from tests.run_folder import only_run, read_summary

# WHY not importorskip: each process of pytest would import them to collect, for a second
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("datasets", "transformers"))),
    reason="needs requirements-extras.txt",
)


def counting(lengths: Sequence[int]) -> dict[str, list[Any]]:
    """Texts that count from their number on, each as long as given."""
    ids = [[(number + i) % VOCABULARY for i in range(n)] for number, n in enumerate(lengths)]
    return {"input_ids": ids, "labels": ids, "text": ["a text"] * len(ids)}


def save(folder: Path, columns: Mapping[str, Any], test: Mapping[str, Any] | None = None) -> Path:
    """Save a set, or one with two parts, and return its folder."""
    import datasets

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
    import datasets

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
