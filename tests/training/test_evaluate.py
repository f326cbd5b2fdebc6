"""The command evaluate and the evaluations of a run: each sample once, and right figures.

--eval_every_steps, --eval_max_batches, --stop_when: the same evaluations, whatever happens.
"""

import json
import math
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.data.sources.built_in import open_digits
from hardened_ddp.errors import CheckpointMismatchError, ModelError
from hardened_ddp.step.progress import Progress
from hardened_ddp.task.classification import Classification
from hardened_ddp.task.task import Metric
from hardened_ddp.training.evaluation import why_stopped
from hardened_ddp.training.weights import example_inputs, model_tensors, rebuild_model
from tests.harness.ranks import train
from tests.marks import slow_after
from tests.plugins import Plain, is_first_time
from tests.run_folder import find_checkpoints, last_tensors, only_run, read_summary


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


OTHERS = {
    "perplexity": ["--dataset", "tests.token_data:ragged", "--task", "tokens", "--model"],
    "r2": ["--dataset", "tests.token_data:slopes", "--model"],
}
OTHERS["perplexity"] += ["tests.token_data:TinyLM", "--model_args", "{dropout: 0.2}"]
OTHERS["r2"] += ["mlp"]


@pytest.mark.slow
@pytest.mark.parametrize("metric", OTHERS)
def test_tokens_and_regression_have_the_same_figures_on_other_numbers_of_ranks(
    metric: str, tmp_path: Path
) -> None:
    train([*OTHERS[metric], "--cpu_only", "--max_steps", "8", "--output_dir", tmp_path]).ok()
    run, figures = only_run(tmp_path), []
    for ranks in (1, 3):
        report, printed = evaluated(run, tmp_path / "report.json", ranks=ranks)
        assert (report["num_samples"], report["world_size"]) == (13, ranks)
        figures.append(printed.split("test set")[-1].split("report")[0])
    assert figures[0] == figures[1]
    assert metric in figures[0]


@pytest.mark.slow
def test_a_broken_sample_ends_all_ranks_or_is_left_out_by_name(tmp_path: Path) -> None:
    data = ["--dataset", "tests.plugins:points_to_test"]
    few = ["--cpu_only", "--model", "mlp", "--max_steps", "4", "--batch_size", "8"]
    train([*few, *data, "--output_dir", str(tmp_path / "runs")]).ok()
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


Words = list[str | Path]
POINTS: Words = ["--dataset", "tests.plugins:points", "--dataset_args", "{size: 80}", "--cpu_only"]
POINTS += ["--num_workers", "0", "--global_batch_size", "8", "--lr_schedule", "constant"]
POINTS += ["--eval_every", "0", "--eval_every_steps", "3", "--learning_rate", "0.1"]
STOPPING: Words = ["--stop_when", "loss", "--patience", "2", "--epochs", "30"]


class DyingInEvaluation(Plain):
    """Rank 1 is killed in the first evaluation after some steps."""

    def __init__(self, num_classes: int, marker: str) -> None:
        super().__init__(num_classes)
        self.marker = marker

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        is_late = not self.training and self.num_forwards > 8 and os.environ.get("RANK") == "1"
        if is_late and is_first_time(self.marker):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


def evaluations(run: Path, ending: str = "loss/test") -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[ending] for line in lines if ending in line}


def best_and_stop(output_dir: Path) -> dict[str, Any]:
    meta = json.loads((find_checkpoints(output_dir)[-1] / "manifest.json").read_text())["meta"]
    names = ("best_metric", "best_value", "stop_value", "num_worse", "evaluated_step")
    return {name: meta[name] for name in names}


def test_a_run_that_dies_in_an_evaluation_measures_and_stops_as_the_whole_one(
    tmp_path: Path,
) -> None:
    argv = [*POINTS, *STOPPING, "--model", "tests.training.test_evaluate:DyingInEvaluation"]
    argv += ["--run_name", "run", "--model_args"]
    (tmp_path / "none").touch()
    whole: Words = [*argv, f"{{marker: {tmp_path / 'none'}}}", "--output_dir", tmp_path / "whole"]
    assert "stopping early after step" in train(whole, 2).ok().outputs[0]
    faulty: Words = [*argv, f"{{marker: {tmp_path / 'marker'}}}"]
    faulty += ["--output_dir", tmp_path / "faulty"]
    assert -signal.SIGKILL in train(faulty, 2).statuses
    train(faulty, 2).ok()
    runs = [tmp_path / name / "run" for name in ("whole", "faulty")]
    found = evaluations(runs[0])
    assert [*found] == [*range(3, 3 * len(found) + 1, 3)]
    assert read_summary(runs[0])["step"] == 3 * len(found) < 300
    assert found == evaluations(runs[1])
    assert best_and_stop(tmp_path / "whole") == best_and_stop(tmp_path / "faulty")
    assert last_tensors(tmp_path / "whole") == last_tensors(tmp_path / "faulty")


@pytest.mark.slow
def test_an_end_of_an_epoch_that_is_also_due_by_steps_is_measured_once(tmp_path: Path) -> None:
    argv: Words = [*POINTS, "--model", "mlp", "--epochs", "3", "--eval_every", "1"]
    output = train([*argv, "--eval_every_steps", "5", "--output_dir", tmp_path], 2).ok().outputs[0]
    assert [*evaluations(only_run(tmp_path))] == [5, 10, 15, 20, 25, 30]
    assert output.count("done: test loss") == 6


def test_a_part_of_the_test_set_is_called_so_and_is_the_same_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    argv: Words = [*POINTS, "--model", "mlp", "--max_steps", "3", "--eval_max_batches", "2"]
    argv += ["--eval_batch_size", "5"]  # 10 of 17
    losses = []
    for world_size in (1, 3):
        output_dir = tmp_path / str(world_size)
        output = train([*argv, "--output_dir", output_dir], world_size).ok().outputs[0]
        assert "partial test accuracy" in output
        assert "(10 samples)" in output
        assert " test accuracy" not in output.replace("partial test accuracy", "")
        run = only_run(output_dir)
        summary, best = (
            read_summary(run),
            json.loads((run / "checkpoints" / "best.json").read_text()),
        )
        assert (best["metric"], summary["test_accuracy"]) == ("partial_accuracy", None)
        assert summary["test_partial_accuracy"] == best["value"]
        losses.append(evaluations(run, "partial_loss/test")[3])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_only_better_values_count_and_nan_is_never_better() -> None:
    loss = Metric("loss", is_higher_better=False)
    progress = Progress()
    seen = []
    for value in (math.nan, 3.0, 2.0, 2.0, math.nan, 1.0, 5.0):
        progress.note_for_stop(loss, value)
        seen.append(progress.num_worse)
    assert seen == [1, 0, 0, 1, 2, 0, 1]
    assert progress.stop_value == 1.0
    assert why_stopped(loss, progress) == "loss has not been better than 1 in 1 evaluation"
    progress.note_for_stop(Metric("accuracy"), 0.1)  # another metric: all begins anew
    assert (progress.stop_metric, progress.num_worse) == ("accuracy", 0)


@pytest.mark.parametrize("is_higher_better", [True, False])
def test_a_metric_that_is_never_a_number_ends_the_run_too(is_higher_better: bool) -> None:
    metric, progress = Metric("score", is_higher_better=is_higher_better), Progress()
    for value in (math.nan, math.inf):
        progress.note_for_stop(metric, value)
    json.dumps(asdict(progress), allow_nan=False)  # it goes into checkpoints
    assert progress.num_worse == 2
    assert why_stopped(metric, progress) == "score has been NaN or infinite in 2 evaluations"
    progress.note_for_stop(metric, -7.0)
    assert (progress.num_worse, progress.stop_value) == (0, -7.0)


def test_without_a_test_set_to_measure_it_a_metric_to_stop_by_is_refused(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--stop_when", "loss", "--model", "mlp", "--output_dir", tmp_path]
    argv += ["--dataset", "tests.plugins:points_to_test", "--dataset_args", "{none: true}"]
    finished = train(argv, 1)
    assert finished.statuses == (2,)
    assert "has no test set to measure it" in finished.output
