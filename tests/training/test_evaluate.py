"""The command evaluate and the evaluations of a run: each sample once, and right figures.

--eval_every_steps, --eval_max_batches, --stop_when: the same evaluations, whatever happens. --ema:
what is averaged, when, and that the averages are those that are measured and exported.
"""

import json
import math
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.data.sources.built_in import open_digits
from hardened_ddp.errors import CheckpointMismatchError, ModelError
from hardened_ddp.export.export import export_model
from hardened_ddp.model.average import AVERAGE, WeightAverage
from hardened_ddp.step.progress import Progress
from hardened_ddp.task.classification import Classification
from hardened_ddp.task.task import Metric
from hardened_ddp.training.evaluation import why_stopped
from hardened_ddp.training.weights import example_inputs, model_tensors, rebuild_model
from tests import run_folder
from tests.harness.ranks import start_training, train
from tests.marks import slow_after
from tests.plugins import Plain, is_first_time
from tests.run_folder import find_checkpoints, last_tensors, losses_of, only_run, read_summary


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
    place = tmp_path / "report.json"
    report, printed = evaluated(digits_run, place, "--eval_batch_size", "7", ranks=ranks)
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
    row = report["classes"][3]
    assert f"{row['name']:<20}{row['samples']:>11}{row['predicted']:>11}" in printed


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
    assert "RUN: 'runs/zz' is neither a run folder" in done.output
    assert f"there are: runs/{digits_run.name}" in done.output
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
    wanted = {"name": "a", "samples": 4, "predicted": 5, "precision": 3 / 5, "recall": 3 / 4}
    assert first == {**wanted, "f1": 2 * 3 / 9}
    assert (second["samples"], second["precision"], second["recall"]) == (7, 4 / 5, 4 / 7)
    assert (third["name"], third["precision"], third["recall"], third["f1"]) == ("2", 0, None, 0)


POINTS = ["--dataset", "tests.plugins:points", "--dataset_args", "{size: 80}", "--cpu_only"]
POINTS += ["--num_workers", "0", "--global_batch_size", "8", "--lr_schedule", "constant"]
POINTS += ["--eval_every", "0", "--eval_every_steps", "3", "--learning_rate", "0.1"]
STOPPING = ["--stop_when", "loss", "--patience", "2", "--epochs", "30"]


class EndsInEvaluation(Plain):
    """On rank 1, a forward after those of some steps kills it, or never ends, once."""

    since_training = 0

    def __init__(self, num_classes: int, marker: str, how: str = "die", at: int = 1) -> None:
        super().__init__(num_classes)
        self.marker, self.how, self.at = marker, how, at

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kind = type(self)
        kind.since_training = 0 if self.training else kind.since_training + 1
        is_here = kind.since_training == self.at and self.num_forwards > 8
        if is_here and os.environ.get("RANK") == "1" and is_first_time(self.marker):
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1e6)
        return super().forward(inputs)


def best_and_stop(output_dir: Path) -> dict[str, Any]:
    meta = json.loads((find_checkpoints(output_dir)[-1] / "manifest.json").read_text())["meta"]
    names = ("best_metric", "best_value", "stop_value", "num_worse", "evaluated_step")
    return {name: meta[name] for name in names}


def test_a_run_that_dies_in_an_evaluation_measures_and_stops_as_a_whole_one(tmp_path: Path) -> None:
    argv = [*POINTS, *STOPPING, "--model", "tests.training.test_evaluate:EndsInEvaluation"]
    argv += ["--run_name", "run", "--model_args"]
    (tmp_path / "none").touch()
    whole = [*argv, f"{{marker: {tmp_path / 'none'}}}", "--output_dir", tmp_path / "whole"]
    assert "stopping early after step" in train(whole, 2).ok().outputs[0]
    faulty = [*argv, f"{{marker: {tmp_path / 'marker'}}}", "--output_dir", tmp_path / "faulty"]
    assert -signal.SIGKILL in train(faulty, 2).statuses
    train(faulty, 2).ok()
    runs = [tmp_path / name / "run" for name in ("whole", "faulty")]
    found = losses_of(runs[0], "loss/test")
    assert [*found] == [*range(3, 3 * len(found) + 1, 3)]
    assert read_summary(runs[0])["step"] == 3 * len(found) < 300
    assert found == losses_of(runs[1], "loss/test")
    assert best_and_stop(tmp_path / "whole") == best_and_stop(tmp_path / "faulty")
    assert last_tensors(tmp_path / "whole") == last_tensors(tmp_path / "faulty")


@pytest.mark.slow
def test_an_end_of_an_epoch_that_is_also_due_by_steps_is_measured_once(tmp_path: Path) -> None:
    argv = [*POINTS, "--model", "mlp", "--epochs", "3", "--eval_every", "1"]
    output = train([*argv, "--eval_every_steps", "5", "--output_dir", tmp_path], 2).ok().outputs[0]
    assert [*losses_of(only_run(tmp_path), "loss/test")] == [5, 10, 15, 20, 25, 30]
    assert output.count("done: test loss") == 6


def test_a_part_of_the_test_set_is_called_so_and_is_the_same_on_any_ranks(tmp_path: Path) -> None:
    argv = [*POINTS, "--model", "mlp", "--max_steps", "3", "--eval_max_batches", "2"]
    argv += ["--eval_batch_size", "5"]  # 10 of 17
    losses = []
    for world_size in (1, 3):
        output_dir = tmp_path / str(world_size)
        output = train([*argv, "--output_dir", output_dir], world_size).ok().outputs[0]
        assert "partial test accuracy" in output
        assert "(10 samples)" in output
        assert " test accuracy" not in output.replace("partial test accuracy", "")
        run = only_run(output_dir)
        summary = read_summary(run)
        best = json.loads((run / "checkpoints" / "best.json").read_text())
        assert (best["metric"], summary["test_accuracy"]) == ("partial_accuracy", None)
        assert summary["test_partial_accuracy"] == best["value"]
        losses.append(losses_of(run, "partial_loss/test")[3])
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


AVERAGED = ["--dataset", "tests.plugins:points", "--cpu_only", "--batch_size", "4"]
AVERAGED += ["--num_workers", "0", "--lr_schedule", "constant", "--ema", "0.9"]
KEPT = ["--checkpoint_every_steps", "1", "--keep_last", "40"]


def averages_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(checkpoint / "state.safetensors")
    return {n.removeprefix(AVERAGE): t for n, t in tensors.items() if n.startswith(AVERAGE)}


@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_averages_are_those_of_the_weights_after_each_step(every: int, tmp_path: Path) -> None:
    argv = [*AVERAGED, "--model", "tests.plugins:FailingOnce", "--ema_every", str(every)]
    argv += ["--run_name", "run", "--output_dir", tmp_path]
    before: dict[str, torch.Tensor] = {}
    for step in range(1, 5):
        train([*argv, "--max_steps", str(step)], 1).ok()
        newest = find_checkpoints(tmp_path)[-1]
        weights, now = load_file(newest / "state.safetensors"), averages_of(newest)
        new = 0.0 if step % every else 1 - min(0.9, (1 + step) / (10 + step)) ** every
        wanted = {n: a + new * (weights[f"model.{n}"] - a) for n, a in before.items()}
        if step > 1:
            torch.testing.assert_close(now, wanted)
            assert not torch.equal(now["layer.weight"], weights["model.layer.weight"])
        before = now
    assert "norm.running_mean" in before  # the statistics that belong to the weights


def test_tied_weights_have_one_average_and_half_floats_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    trained = dict(model.named_parameters())
    average = WeightAverage(model, trained=trained, moving=(), decay=0.5, every=1)
    assert str(average) == "averages of 1 tensors (--ema, 0.0 MiB)"
    assert average.tensors().keys() == {f"{AVERAGE}0.weight", f"{AVERAGE}1.weight"}
    half = {name: parameter for name, parameter in model.bfloat16().named_parameters()}
    with pytest.raises(ModelError, match=r"is torch\.bfloat16, which rounds"):
        WeightAverage(model, trained=half, moving=(), decay=0.5, every=1)


@pytest.mark.slow
def test_both_are_measured_and_the_averages_decide_and_are_exported(tmp_path: Path) -> None:
    argv = [*AVERAGED, "--model", "mlp", "--epochs", "3", "--output_dir", tmp_path]
    output = train(argv, 2).ok().outputs[0]
    assert "averages of 4 tensors (--ema, " in output
    assert output.count("; averaged weights: loss ") == 4
    run = only_run(tmp_path)
    summary, best = read_summary(run), json.loads((run / "checkpoints" / "best.json").read_text())
    assert best["metric"] == "ema_accuracy"
    assert summary["test_ema_loss"] != summary["test_loss"]
    newest = find_checkpoints(tmp_path)[-1]
    reports = {}
    for weights in ("averaged", "trained"):
        place = tmp_path / f"{weights}.json"
        reports[weights], _ = evaluated(newest, place, "--weights", weights)
    assert reports["averaged"]["loss"] == pytest.approx(summary["test_ema_loss"], rel=1e-5)
    assert reports["trained"]["loss"] == pytest.approx(summary["test_loss"], rel=1e-5)
    assert (reports["averaged"]["is_averaged"], reports["trained"]["is_averaged"]) == (True, False)
    saved = load_file(newest / "state.safetensors")
    for averaged, prefix in ((True, AVERAGE), (False, "model.")):
        folder = export_model(newest, output=tmp_path / prefix, averaged=averaged)
        exported = load_file(folder / "model.safetensors")
        assert all(torch.equal(tensor, saved[f"{prefix}{n}"]) for n, tensor in exported.items())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["die", "hang"])
def test_an_end_while_averages_are_measured_saves_both(how: str, tmp_path: Path) -> None:
    argv = [*AVERAGED, "--epochs", "2", "--checkpoint_every_steps", "0", "--run_name", "run"]
    argv += ["--model", "tests.training.test_evaluate:EndsInEvaluation"]
    args = f"{{how: {how}, at: 2, marker: {tmp_path / 'marker'}}}"
    (tmp_path / "no").touch()  # no fault
    none = ["--model_args", f"{{marker: {tmp_path / 'no'}}}"]
    train([*argv, *KEPT, *none, "--output_dir", tmp_path / "whole"], 2).ok()
    faulty = [*argv, "--model_args", args, "--output_dir", tmp_path / "faulty"]
    with start_training([*faulty, "--stop_grace_s", "3"], 2) as running:
        running.wait_for((tmp_path / "marker").exists, timeout_s=60, what="the second evaluation")
        if how == "hang":
            for rank in range(2):
                running.kill(rank, signal.SIGTERM)
        finished = running.wait(60)
    assert "is saved; to resume" in finished.output
    at_fault = find_checkpoints(tmp_path / "faulty")[-1]
    same = tmp_path / "whole" / "run" / "checkpoints" / at_fault.name
    states = [folder / "state.safetensors" for folder in (at_fault, same)]
    assert run_folder.fingerprints(states[0]) == run_folder.fingerprints(states[1])
    train([*faulty, *none], 2).ok()
    assert last_tensors(tmp_path / "faulty") == last_tensors(tmp_path / "whole")


@pytest.mark.slow
def test_averages_that_a_continued_run_begins_or_ends_with(tmp_path: Path) -> None:
    argv = [*AVERAGED, *KEPT, "--model", "mlp", "--output_dir", tmp_path, "--run_name", "run"]
    train([*argv, "--ema", "0", "--max_steps", "3"], 1).ok()
    output = train([*argv, "--max_steps", "5"], 1).ok().outputs[0]
    assert "the checkpoint has no averages: --ema begins with its weights" in output
    assert averages_of(find_checkpoints(tmp_path)[-1])
    train([*argv, "--ema", "0", "--max_steps", "7"], 1).ok()
    assert not averages_of(find_checkpoints(tmp_path)[-1])
