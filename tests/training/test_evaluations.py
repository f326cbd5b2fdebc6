"""--eval_every_steps, --eval_max_batches, --stop_when: the same evaluations, whatever happens."""

import json
import math
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.step.progress import Progress
from hardened_ddp.task.task import Metric
from hardened_ddp.training.evaluation import why_stopped
from tests.harness.ranks import train
from tests.plugins import Plain, is_first_time
from tests.run_folder import find_checkpoints, last_tensors, only_run, read_summary

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
    argv = [*POINTS, *STOPPING, "--model", "tests.training.test_evaluations:DyingInEvaluation"]
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
