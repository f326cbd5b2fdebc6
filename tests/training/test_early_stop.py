"""Early stopping: when a run ends because it no longer improves, and where a resumed one ends."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from hardened_ddp.step.progress import Progress
from hardened_ddp.task.task import Metric
from hardened_ddp.training.evaluation import why_stopped
from tests.harness.ranks import train
from tests.harness.run_folder import read_summary

ARGV = ["--cpu_only", "--batch_size", "64", "--epochs", "30", "--learning_rate", "0.03"]
ARGV += ["--model", "mlp", "--num_workers", "0"]
ARGV += ["--lr_schedule", "constant"]
ARGV += ["--stop_when", "loss", "--patience", "2", "--checkpoint_every_epochs", "1"]


def digest_of(run: Path, step: int) -> str:
    """Return the sha256 of a checkpoint's tensors, as its manifest has it."""
    manifest = run / "checkpoints" / f"step-{step:09d}" / "manifest.json"
    return str(json.loads(manifest.read_text())["files"]["state.safetensors"]["sha256"])


@pytest.mark.slow
def test_a_run_stops_when_it_no_longer_improves_and_a_resumed_one_at_the_same_step(
    tmp_path: Path,
) -> None:
    whole = [*ARGV, "--output_dir", tmp_path, "--run_name", "whole", "--keep_last", "40"]
    output = train(whole, 2).ok().outputs[0]
    [line] = [line for line in output.splitlines() if "stopping early after step" in line]
    assert "loss has not been better than" in line
    summary = read_summary(tmp_path / "whole")
    assert summary["status"] == "finished"
    assert summary["epoch"] < 30
    losses = [
        entry["loss/test"]
        for entry in map(json.loads, (tmp_path / "whole" / "metrics.jsonl").open())
        if "loss/test" in entry
    ]
    best = losses.index(min(losses))
    assert len(losses) == best + 3
    steps_per_epoch = summary["step"] // summary["epoch"]
    # Again, in two parts: the first ends after one evaluation without a better value.
    parts = [*ARGV, "--output_dir", tmp_path, "--run_name", "parts", "--keep_last", "40"]
    first = (best + 2) * steps_per_epoch
    train([*parts, "--max_steps", str(first)], 2).ok()
    train([*parts, "--max_steps", "0"], 2).ok()
    assert read_summary(tmp_path / "parts")["step"] == summary["step"]
    assert digest_of(tmp_path / "parts", summary["step"]) == digest_of(
        tmp_path / "whole", summary["step"]
    )
    again = train(whole, 2).ok()
    assert "is finished" in again.outputs[0]


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
