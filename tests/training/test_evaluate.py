"""The command evaluate: every test sample once, whoever counts, and figures that are right."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.data.sources.built_in import open_digits
from hardened_ddp.errors import CheckpointMismatchError, ModelError
from hardened_ddp.task.classification import Classification
from hardened_ddp.training.weights import example_inputs, model_tensors, rebuild_model
from tests.harness.ranks import train
from tests.marks import slow_after
from tests.run_folder import only_run

POINTS = ["--cpu_only", "--model", "mlp", "--max_steps", "4", "--batch_size", "8"]


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits that is good, but not so good that there are no mistakes to count."""
    folder = tmp_path_factory.mktemp("evaluate") / "runs"
    argv = ["--cpu_only", "--model", "mlp", "--epochs", "1", "--output_dir", str(folder)]
    train([*argv, "--checkpoint_every_steps", "0"]).ok()  # one at the end, however slow it is
    return only_run(folder)


def evaluated(run: Path, output: Path, *words: str, ranks: int = 1) -> tuple[dict[str, Any], str]:
    argv = ["evaluate", str(run), "--cpu_only", "--output", str(output), *words]
    done = train(argv, ranks, timeout_s=60).ok()
    return json.loads(output.read_text(encoding="utf-8")), done.output


@pytest.mark.parametrize("ranks", slow_after(1, [3, 1]))
def test_any_number_of_ranks_counts_what_a_plain_loop_counts(
    digits_run: Path, tmp_path: Path, ranks: int
) -> None:
    report, printed = evaluated(
        digits_run, tmp_path / "a.json", "--eval_batch_size", "7", ranks=ranks
    )
    tensors, meta = load_checkpoint(open_checkpoint(digits_run, prefer_best=True))
    model, test = rebuild_model(model_tensors(tensors, meta), meta), open_digits(train=False)
    wanted = torch.zeros(10, 10, dtype=torch.int64)
    with torch.no_grad():
        logits = model(test.images)
    for label, prediction in zip(test.labels, logits.argmax(dim=1), strict=True):
        wanted[label, prediction] += 1
    assert report["confusion"] == wanted.tolist()
    assert 0 < wanted.diagonal().sum() < 360
    assert report["num_samples"] == 360
    assert report["accuracy"] == int(wanted.diagonal().sum()) / 360
    loss = torch.nn.functional.cross_entropy(logits, test.labels)
    assert report["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert report["is_data_of_training"]
    assert report["world_size"] == ranks
    assert f"accuracy {report['accuracy']:.2%}" in printed
    assert printed.count("confusion matrix") == 1


@pytest.mark.slow
def test_a_broken_sample_ends_all_ranks_or_is_left_out_by_name(tmp_path: Path) -> None:
    data = ["--dataset", "tests.plugins:points_to_test"]
    train([*POINTS, *data, "--output_dir", str(tmp_path / "runs")]).ok()
    run = only_run(tmp_path / "runs")
    broken = ["--dataset_args", "{broken: [16]}"]
    failed = train(["evaluate", str(run), "--cpu_only", *broken], 2, timeout_s=60)
    assert all(failed.statuses)
    assert "test sample 16 can't be read" in failed.output
    report, printed = evaluated(run, tmp_path / "x.json", *broken, "--continue_on_error", ranks=2)
    assert report["num_samples"] == 16
    assert [entry["sample"] for entry in report["left_out"]] == [16]
    assert not report["is_data_of_training"]
    assert "left out" in printed
    none = train(["evaluate", str(run), "--cpu_only", "--dataset_args", "{none: true}"])
    assert none.statuses == (2,)
    assert "has no test set" in none.output


def test_a_path_that_is_no_run_is_told_with_the_runs_that_there_are(digits_run: Path) -> None:
    done = train(["evaluate", "runs/zz"], cwd=digits_run.parents[1])
    assert done.statuses == (2,)
    assert "RUN: 'runs/zz' does not exist; there are: runs/" + digits_run.name in done.output
    assert "--resume" not in done.output


def test_a_model_that_has_changed_since_is_refused_with_what_differs(digits_run: Path) -> None:
    tensors, meta = load_checkpoint(open_checkpoint(digits_run))
    weights = model_tensors(tensors, meta)
    with pytest.raises(CheckpointMismatchError, match=r"layers\.1\.weight"):
        rebuild_model(weights, {**meta, "model_args": {"hidden": 7}})
    with pytest.raises(ModelError, match="which model it belongs to"):
        rebuild_model(weights, {})
    with pytest.raises(ModelError, match="not one tensor"):
        example_inputs({}, num_samples=1)


def test_figures_of_a_class_are_those_of_the_textbook() -> None:
    confusion = [[3.0, 1.0, 0.0, 0.0], [2.0, 4.0, 1.0, 0.0], [0.0] * 4]
    task = Classification(num_classes=3, class_names=["a", "b"])
    first, second, third = task.report({"confusion": confusion}, 11)["classes"]
    assert first == {
        "name": "a",
        "samples": 4,
        "predicted": 5,
        "precision": 3 / 5,
        "recall": 3 / 4,
        "f1": 2 * 3 / 9,
    }
    assert (second["samples"], second["precision"], second["recall"]) == (7, 4 / 5, 4 / 7)
    assert (third["name"], third["precision"], third["recall"], third["f1"]) == ("2", 0, None, 0)
