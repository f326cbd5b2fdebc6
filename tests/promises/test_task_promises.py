"""The promises hold for any task: resume, another number of ranks, a failing rank, evaluation."""

import re
from pathlib import Path

import pytest

from tests.harness.ranks import run_program, train
from tests.marks import slow_after
from tests.run_folder import last_tensors, only_run, read_summary, samples_by_step

Words = list[str | Path]
STEADY: Words = ["--cpu_only", "--num_workers", "0", "--ledger", "--log_interval", "4"]
STEADY += ["--epochs", "4", "--checkpoint_every_steps", "0", "--global_batch_size", "8"]
TASKS: dict[str, Words] = {
    "tokens": [
        *("--dataset", "tests.token_data:ragged", "--task", "tokens"),
        *("--model", "tests.token_data:TinyLM", "--model_args", "{dropout: 0.2, width: 512}"),
        *("--global_batch_size", "16"),  # twice as many: of 8 samples, a rank has two batches
    ],
    "regression": ["--dataset", "tests.token_data:slopes", "--model", "mlp"],
}


@pytest.mark.parametrize("task", slow_after(1, TASKS))
def test_a_run_that_was_cut_goes_on_to_the_same_weights(task: str, tmp_path: Path) -> None:
    argv = [*STEADY, *TASKS[task], "--lr_schedule", "constant", "--run_name", "run"]
    cut: Words = [*argv, "--output_dir", tmp_path / "cut"]
    first = train([*cut, "--max_steps", "7"], 2).ok()
    assert ("in two parts" in first.outputs[0]) == (task == "tokens")
    halfway = last_tensors(tmp_path / "cut")
    train([*cut, "--max_steps", "20"], 2).ok()
    train([*argv, "--output_dir", tmp_path / "through", "--max_steps", "20"], 2).ok()
    assert halfway != last_tensors(tmp_path / "cut") == last_tensors(tmp_path / "through")
    runs = [only_run(tmp_path / name) for name in ("cut", "through")]
    assert samples_by_step(runs[0]) == samples_by_step(runs[1])


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_other_numbers_of_ranks_take_the_same_samples_and_measure_the_same(
    task: str, tmp_path: Path
) -> None:
    argv = [*STEADY, *TASKS[task], "--lr_schedule", "constant", "--run_name", "run"]
    changing: Words = [*argv, "--output_dir", tmp_path / "changing"]
    for world_size, last in ((3, 7), (1, 12), (2, 0)):
        train([*changing, "--max_steps", str(last)], world_size).ok()
    train([*argv, "--output_dir", tmp_path / "alone"], 1).ok()
    runs = [tmp_path / name / "run" for name in ("changing", "alone")]
    assert samples_by_step(runs[0]) == samples_by_step(runs[1])
    losses = [read_summary(run)["test_loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=0.2 if task == "tokens" else 1e-3)
    figures = []
    for world_size in (1, 3):
        output = tmp_path / f"{world_size}.json"
        command = ["torchrun", "--standalone", f"--nproc_per_node={world_size}"]
        command += ["ddp_training.py", "evaluate", str(runs[1]), "--output", str(output)]
        text = run_program(command, timeout_s=90).ok().output
        assert "13 samples" in text
        figures.append(text.split("test set")[-1].split("report")[0])
    assert figures[0] == figures[1]
    assert ("perplexity" if task == "tokens" else "r2") in figures[0]


@pytest.mark.slow
def test_a_rank_that_fails_in_a_step_with_tokens_changes_no_weight(tmp_path: Path) -> None:
    argv = [*STEADY, *TASKS["tokens"]]
    argv[argv.index("tests.token_data:TinyLM")] = "tests.token_data:FailingLM"
    argv[argv.index("{dropout: 0.2, width: 512}")] = "{forward_number: 9, how: raise, width: 512}"
    finished = train([*argv, "--output_dir", tmp_path / "once"], 2).ok()
    assert "retrying step" in finished.outputs[0]
    assert "in two parts" in finished.outputs[0]
    argv += ["--model_args", "{width: 512}"]
    train([*argv, "--output_dir", tmp_path / "undisturbed"], 2).ok()
    assert last_tensors(tmp_path / "once") == last_tensors(tmp_path / "undisturbed")


RAGGED = [("ragged", "memory in backward", ["--no_shared_memory"])]
RAGGED += [("ragged_stream", "memory", ["--batch_size", "8"])]


@pytest.mark.slow
@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_after_an_out_of_memory_batches_of_a_collate_have_the_same_parts(
    case: tuple[str, str, list[str]], tmp_path: Path
) -> None:
    data, how, flags = case
    argv: Words = [*STEADY, "--dataset", f"tests.token_data:{data}", "--task", "tokens", *flags]
    argv += ["--global_batch_size", "32", "--lr_schedule", "constant"]
    args = f"{{forward_number: 9, how: {how}}}"
    tight = ["--model", "tests.token_data:FailingLM", "--model_args", args]
    faulty = train([*argv, *tight, "--output_dir", tmp_path / "faulty"], 2).ok()
    told = re.search(r"have (\d+) samples at most .* retrying step (\d+),", faulty.outputs[0])
    assert told, faulty.outputs[0]
    other: Words = ["--model", "tests.smaller_parts:language_model"]
    other += ["--model_args", f"{{step: {told[2]}, most: {told[1]}}}"]
    smaller = train([*argv, *other, "--output_dir", tmp_path / "smaller"], 2).ok()
    assert "retrying" not in smaller.outputs[0]
    assert last_tensors(tmp_path / "faulty") == last_tensors(tmp_path / "smaller")
