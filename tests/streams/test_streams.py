"""Training on a stream: every promise of a map-style dataset, kept for an iterable one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.ranks import run_program, start_training, train
from tests.harness.run_folder import find_checkpoints, last_tensors, only_run, samples_by_step
from tests.task.test_task import Distance

STREAM: list[str | Path] = ["--cpu_only", "--dataset", "tests.streams.stream_programs:point_stream"]
STREAM += ["--model", "mlp", "--num_workers", "0", "--learning_rate", "0.01"]
STEADY: list[str | Path] = [*STREAM, "--lr_schedule", "constant", "--epochs", "3", "--ledger"]
STEADY += ["--global_batch_size", "24", "--checkpoint_every_steps", "4"]


def arguments(**given: object) -> list[str | Path]:
    return ["--dataset_args", json.dumps(given)]


def ledger_of(run: Path) -> str:
    done = run_program(["python", "ddp_training.py", "verify-ledger", str(run)], timeout_s=60)
    return done.ok().stdout


def weights_of(output_dir: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(find_checkpoints(output_dir)[-1] / "state.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("says", [False, True])
def test_the_weights_are_the_same_on_any_number_of_ranks(tmp_path: Path, says: bool) -> None:
    found = []
    for world_size in (1, 2, 3):
        place = ["--output_dir", tmp_path / str(world_size)]
        done = train([*STEADY, *place, *arguments(says=says)], world_size).ok()
        assert "test accuracy" in done.output
        run = only_run(tmp_path / str(world_size))
        assert ledger_of(run).count("232 samples, each exactly once") == 3
        found.append((samples_by_step(run), weights_of(tmp_path / str(world_size))))
    for samples, weights in found[1:]:
        assert samples == found[0][0]
        assert_close(weights, found[0][1])


class Powered(Distance):
    def __init__(self, power: float) -> None:  # it has to be given
        super().__init__(power)


def test_a_task_of_the_users_gets_its_arguments_and_the_stream(tmp_path: Path) -> None:
    task = ["--task", "tests.streams.test_streams:Powered", "--task_args", "{power: 3.0}"]
    for world_size in (1, 2):
        place = ["--output_dir", tmp_path / str(world_size)]
        done = train([*STEADY, *task, "--epochs", "1", *place], world_size).ok()
        assert "test distance" in done.output
    assert_close(weights_of(tmp_path / "1"), weights_of(tmp_path / "2"))


def test_a_kill_and_other_numbers_of_ranks_cost_no_sample(tmp_path: Path) -> None:
    whole = [*STEADY, "--output_dir", tmp_path / "whole", *arguments(pace="")]
    train(whole, 2).ok()
    pace = tmp_path / "pace"
    pace.touch()
    argv = [*STEADY, "--output_dir", tmp_path / "cut", *arguments(pace=str(pace))]
    with start_training(argv, 2) as running:
        running.wait_for(
            lambda: len(find_checkpoints(tmp_path / "cut")) > 1, timeout_s=60, what="steps"
        )
        for rank in (0, 1):
            running.kill(rank)
        running.wait(30)
    pace.unlink()
    run = only_run(tmp_path / "cut")
    train([*argv, "--resume", run], 3).ok()
    assert ledger_of(run).count("232 samples, each exactly once") == 3
    assert samples_by_step(run) == samples_by_step(only_run(tmp_path / "whole"))
    assert_close(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole"))


@pytest.mark.slow
def test_a_stop_and_a_resume_with_the_same_ranks_change_no_bit(tmp_path: Path) -> None:
    whole = [*STEADY, "--output_dir", tmp_path / "whole"]
    train(whole, 2).ok()
    cut = [*STEADY, "--output_dir", tmp_path / "cut"]
    train([*cut, "--max_steps", "7"], 2).ok()
    run = only_run(tmp_path / "cut")
    assert any((run / "readers").iterdir()), "the states of the readers are a state to the place"
    train([*cut, "--resume", run, "--max_steps", "0"], 2).ok()
    assert last_tensors(tmp_path / "cut") == last_tensors(tmp_path / "whole")
    assert ledger_of(run).count("232 samples, each exactly once") == 3


@pytest.mark.slow
def test_workers_change_no_bit(tmp_path: Path) -> None:
    for number in ("0", "2"):
        argv = [*STEADY, "--output_dir", tmp_path / number, "--epochs", "2"]
        train([*argv, "--num_workers", number], 1).ok()
    assert last_tensors(tmp_path / "0") == last_tensors(tmp_path / "2")


@pytest.mark.parametrize(
    ("length", "chosen"),
    [
        (["--epochs", "2"], "constant"),
        (["--max_steps", "5"], "cosine"),
        ([*arguments(says=True), "--epochs", "1"], "cosine"),
    ],
    ids=["unknown", "max_steps", "sizes"],
)
def test_auto_takes_the_schedule_that_the_length_allows(
    tmp_path: Path, length: list[str | Path], chosen: str
) -> None:
    argv = [*STREAM, *length, "--warmup_steps", "3", "--output_dir"]
    done = train([*argv, tmp_path / "auto"]).ok()
    is_told = "lr_schedule constant (the number of steps is not known" in done.output
    assert is_told is (chosen == "constant")
    train([*argv, tmp_path / chosen, "--lr_schedule", chosen]).ok()
    assert last_tensors(tmp_path / "auto") == last_tensors(tmp_path / chosen)


def test_auto_keeps_the_schedule_that_it_chose(tmp_path: Path) -> None:
    argv = [*STREAM, "--epochs", "1", "--output_dir"]
    train([*argv, tmp_path / "constant"]).ok()
    again = ["--resume", only_run(tmp_path / "constant"), "--epochs", "2", "--max_steps", "99"]
    done = train([*argv, tmp_path / "constant", *again]).ok()
    assert "lr_schedule constant, as before" in done.output
    done = train([*argv, tmp_path / "cosine", "--max_steps", "3"]).ok()
    assert "lr_schedule cosine" in done.output
    again = ["--resume", only_run(tmp_path / "cosine"), "--max_steps", "0"]
    done = train([*argv, tmp_path / "cosine", *again])
    assert done.statuses == (2,)
    assert "lr_schedule cosine needs the number of steps" in done.output


@pytest.mark.slow
def test_a_bad_sample_is_named_by_shard_and_position(tmp_path: Path) -> None:
    argv = [*STEADY, "--output_dir", tmp_path, *arguments(broken="2/17")]
    done = train(argv, 2)
    assert any(done.statuses)
    assert "(shard 2, sample 17 of it): ValueError: a broken row" in done.output
    argv += ["--continue_on_error", "--run_name", "on"]
    done = train(argv, 2).ok()
    assert "left out sample 104" in done.output
    assert ledger_of(tmp_path / "on").count("1 of them left out, as reported") == 3


def test_fewer_shards_than_ranks_are_shared_and_said(tmp_path: Path) -> None:
    argv = [*STEADY, "--output_dir", tmp_path, "--epochs", "1", *arguments(lengths=[70, 30])]
    done = train(argv, 3).ok()
    assert "2 shards for 3 ranks: each rank reads all samples" in done.output
    assert ledger_of(only_run(tmp_path)).startswith("epoch 0: 100 samples, each exactly once\n")


def test_a_stream_with_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    argv = [*STEADY, "--output_dir", tmp_path]
    train([*argv, "--max_steps", "3"]).ok()
    more = arguments(lengths=[50, 31, 64, 7, 40, 40, 3])
    done = train([*argv, "--resume", only_run(tmp_path), *more, "--max_steps", "0"])
    assert any(done.statuses)
    assert "num_shards: the checkpoint has 6, this run 7" in done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_a_file_that_changed_since_the_checkpoint_is_named(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i * 'x'}\n" for i in range(40)))
    argv: list[str | Path] = ["--cpu_only", "--dataset", f"text:{tmp_path}/*.txt", "--model", "mlp"]
    argv += ["--lr_schedule", "constant", "--output_dir", tmp_path / "runs", "--epochs", "2"]
    argv += arguments(transform="tests.plugins:length_of", num_classes=2, num_shards=4)
    train([*argv, "--max_steps", "2"]).ok()
    with (tmp_path / "b.txt").open("a") as file:
        file.write("one more line\n")
    done = train([*argv, "--resume", only_run(tmp_path / "runs"), "--max_steps", "0"])
    assert any(done.statuses)
    assert "of the stream's files b.txt has changed (" in done.output
    assert "Traceback" not in done.output


def test_evaluate_counts_each_sample_of_a_test_stream_once(tmp_path: Path) -> None:
    train([*STEADY, "--output_dir", tmp_path, "--epochs", "1"], 2).ok()
    done = train(["evaluate", only_run(tmp_path)], 2).ok()
    assert "17" in done.output
    report = json.loads(next(only_run(tmp_path).rglob("evaluation-*.json")).read_text())
    assert report["num_samples"] == 17
