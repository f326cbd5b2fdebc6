"""Training on a stream: every promise of a map-style dataset, kept for an iterable one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.ranks import run_program, start_training, train
from tests.run_folder import find_checkpoints, last_tensors, only_run, samples_by_step

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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of the STEADY run that nothing happens to, on two ranks."""
    output = tmp_path_factory.mktemp("undisturbed")
    done = train([*STEADY, "--output_dir", output], 2).ok()
    assert "test accuracy" in done.output
    return output


def test_a_kill_and_other_numbers_of_ranks_lose_nothing(tmp_path: Path, undisturbed: Path) -> None:
    whole, pace = undisturbed, tmp_path / "pace"
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
    assert samples_by_step(run) == samples_by_step(only_run(whole))
    one, other = weights_of(tmp_path / "cut"), weights_of(whole)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)
    report = tmp_path / "report.json"
    train(["evaluate", run, "--cpu_only", "--output", report], 2).ok()
    assert json.loads(report.read_text())["num_samples"] == 17


@pytest.mark.slow
def test_a_stop_and_a_resume_with_workers_change_no_bit(tmp_path: Path, undisturbed: Path) -> None:
    cut = [*STEADY, "--output_dir", tmp_path / "cut"]
    train([*cut, "--max_steps", "7"], 2).ok()
    run = only_run(tmp_path / "cut")
    assert any((run / "readers").iterdir()), "the states of the readers are a state to the place"
    more = arguments(lengths=[50, 31, 64, 7, 40, 40, 3])
    done = train([*cut, "--resume", run, *more, "--max_steps", "0"], 2)
    assert any(done.statuses)
    assert "num_shards: the checkpoint has 6, this run 7" in done.output
    assert "Traceback" not in done.output
    train([*cut, "--resume", run, "--max_steps", "0", "--num_workers", "1"], 2).ok()
    assert last_tensors(tmp_path / "cut") == last_tensors(undisturbed)
    assert ledger_of(run).count("232 samples, each exactly once") == 3


@pytest.mark.slow
def test_auto_takes_the_schedule_that_the_length_allows_and_keeps_it(tmp_path: Path) -> None:
    argv = [*STREAM, "--epochs", "1", "--output_dir"]
    done = train([*argv, tmp_path / "sizes", *arguments(says=True)], 3).ok()
    assert "lr_schedule cosine" in done.output
    done = train([*argv, tmp_path / "constant"]).ok()
    assert "lr_schedule constant," in done.output
    again = ["--resume", only_run(tmp_path / "constant"), "--epochs", "2", "--max_steps", "99"]
    done = train([*argv, tmp_path / "constant", *again]).ok()
    assert "lr_schedule constant," in done.output
    done = train([*argv, tmp_path / "cosine", "--max_steps", "3"]).ok()
    assert "lr_schedule cosine" in done.output
    again = ["--resume", only_run(tmp_path / "cosine"), "--max_steps", "0"]
    done = train([*argv, tmp_path / "cosine", *again])
    assert done.statuses == (2,)
    assert "lr_schedule cosine needs the number of steps" in done.output


@pytest.mark.slow
def test_a_bad_sample_is_named_by_shard_and_position(tmp_path: Path) -> None:
    argv = [*STEADY, "--output_dir", tmp_path, "--epochs", "1"]
    done = train([*argv, *arguments(broken="2/17")], 2)
    assert any(done.statuses)
    assert "(shard 2, sample 17 of it): ValueError: a broken row" in done.output
    few = arguments(broken="0/17", lengths=[70, 30])  # fewer shards than ranks
    done = train([*argv, *few, "--continue_on_error", "--run_name", "on"], 3).ok()
    assert "left out sample 34" in done.output
    assert "2 shards for 3 ranks: each rank reads all samples" in done.output
    told = ledger_of(tmp_path / "on")
    assert "100 samples, each exactly once; 1 of them left out, as reported" in told
