"""One rank fails inside of a step: the window is done again, and the run ends as if nothing was."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow_after
from tests.ranks import train
from tests.run_folder import find_checkpoints, last_tensors, only_run, read_summary, step_of

POINTS: list[str | Path] = ["--dataset", "tests.plugins:points", "--cpu_only", "--batch_size", "4"]
POINTS += [
    "--dataset_args",
    "{size: 48}",
    "--epochs",
    "4",
    "--log_interval",
    "1",
    "--eval_every",
    "0",
    "--num_workers",
    "0",
]


def run(output: Path, world_size: int, *flags: str | Path) -> Any:
    return train([*POINTS, "--output_dir", output, *flags], world_size)


@pytest.mark.parametrize("world_size", slow_after(1, [3, 2, 1]))
def test_faults_of_ranks_inside_of_steps_leave_no_trace_in_the_weights(
    world_size: int, tmp_path: Path
) -> None:
    model = ["--model", "tests.plugins:Stumbling", "--model_args"]
    # By rank and forward. A window done again is another forward: 9 fails twice, on two ranks.
    faults = {
        0: {5: "forward", 9: "backward", 15: "nan"},
        1: {7: "backward", 9: "forward", 12: "nan", 17: "forward"},
        2: {9: "nan", 13: "backward"},
    }
    run(tmp_path / "quiet", world_size, *model, "{}").ok()
    struck = run(tmp_path / "struck", world_size, *model, str({"faults": faults})).ok()
    assert last_tensors(tmp_path / "struck") == last_tensors(tmp_path / "quiet")
    assert struck.outputs[0].count("the window is done again") >= 3
    assert "rank 0, step" in struck.outputs[0]
    assert "a fault in backward" in struck.outputs[0]
    assert "Traceback" not in struck.output
    assert not (only_run(tmp_path / "struck") / "skipped_samples.jsonl").exists()


@pytest.mark.slow
def test_memory_for_half_a_batch_gives_the_gradient_of_the_whole(tmp_path: Path) -> None:
    model = ["--model", "tests.plugins:Greedy", "--batch_size", "10", "--model_args"]
    quiet = run(tmp_path / "quiet", 2, *model, "{}").ok()
    small = run(tmp_path / "small", 2, *model, "{most: 3}").ok()
    assert "micro-batches have 5 samples at most from now on" in small.outputs[0]
    assert "micro-batches have 2 samples at most from now on" in small.outputs[0]
    assert small.outputs[0].count("at most from now on") == 2
    losses = [_losses(only_run(tmp_path / name)) for name in ("quiet", "small")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert quiet.outputs[0].count(" step ") == small.outputs[0].count("  loss")
    # What was learned goes on with the run.
    resumed = run(tmp_path / "small", 2, "--resume", only_run(tmp_path / "small"), "--epochs", "5")
    assert "at most from now on" not in resumed.ok().outputs[0]


@pytest.mark.slow
def test_memory_for_not_even_one_sample_stops_all_ranks_with_that_cause(tmp_path: Path) -> None:
    model = ["--model", "tests.plugins:Greedy", "--model_args", "{most: 0}"]
    finished = run(tmp_path, 2, *model)
    assert finished.statuses == (1, 1)
    assert "DDP-S02" in finished.outputs[0]
    assert "DDP-S02" in finished.outputs[1]
    assert re.search(r"rank 1, step \d+, forward, samples \[", finished.outputs[0])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sample_that_fails_alone_is_left_out_by_name(world_size: int, tmp_path: Path) -> None:
    picky = ["--model", "tests.plugins:Picky", "--continue_on_error"]
    run(tmp_path, world_size, *picky, "--ledger").ok()
    folder = only_run(tmp_path)
    lines = (folder / "skipped_samples.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    assert [(entry["index"], entry["epoch"]) for entry in entries] == [(13, e) for e in range(4)]
    assert "I do not like this one" in entries[0]["error"]
    assert read_summary(folder)["num_left_out"] == 4


def test_a_sample_that_fails_again_stops_all_ranks_with_one_cause_and_loses_no_step(
    tmp_path: Path,
) -> None:
    finished = run(tmp_path, 2, "--model", "tests.plugins:Picky")
    assert finished.statuses == (1, 1)
    causes = [
        next(line for line in output.splitlines() if "DDP-S01" in line).partition("DDP-S01")[2]
        for output in finished.outputs
    ]
    assert causes[0] == causes[1]
    assert "I do not like this one" in causes[0]
    [checkpoint] = find_checkpoints(tmp_path)
    assert f", step {step_of(checkpoint)}, forward" in causes[0]


@pytest.mark.slow
def test_a_loss_that_stays_nan_stops_before_it_reaches_the_weights(tmp_path: Path) -> None:
    poisoned = ["--model", "tests.plugins:Poisoned", "--model_args", "{nan_from: 8}"]
    finished = run(tmp_path, 2, *poisoned)
    assert finished.statuses == (1, 1)
    assert "DDP-S03" in finished.outputs[0]
    assert "the loss is nan" in finished.outputs[0]
    [checkpoint] = find_checkpoints(tmp_path)
    assert step_of(checkpoint) > 0  # that of the last good step, saved because of it


@pytest.mark.slow
def test_a_layer_that_one_rank_stops_using_switches_the_search_on(tmp_path: Path) -> None:
    fading = ["--model", "tests.plugins:Fading"]
    finished = run(tmp_path / "auto", 2, *fading).ok()
    assert "rank 1: no gradient came for second.weight, second.bias" in finished.outputs[0]
    assert "find_unused_parameters is on from now" in finished.outputs[0]
    run(tmp_path / "on", 2, *fading, "--find_unused_parameters").ok()
    assert last_tensors(tmp_path / "auto") == last_tensors(tmp_path / "on")
    finished = run(tmp_path / "off", 2, *fading, "--find_unused_parameters", "off")
    assert finished.statuses == (1, 1)
    assert "no gradient came for second.weight" in finished.outputs[0]


@pytest.mark.slow
def test_without_recovery_the_first_exception_ends_the_run(tmp_path: Path) -> None:
    model = ["--model", "tests.plugins:Stumbling", "--model_args", "{faults: {1: {7: forward}}}"]
    finished = run(tmp_path, 2, *model, "--recovery", "off")
    assert finished.statuses == (75, 1)
    assert "a fault in forward" in finished.output


def _losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [e["loss/train"] for e in map(json.loads, lines) if "loss/train" in e]
