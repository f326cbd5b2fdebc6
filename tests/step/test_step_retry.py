"""One rank fails inside a step: all ranks retry it, and the run ends with the same weights."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.errors import OutOfMemoryError, PeerLostError
from hardened_ddp.step.failure import explain_failure, is_out_of_memory
from tests.harness.ranks import train
from tests.marks import sections, slow_after
from tests.run_folder import last_tensors, losses_of, only_run, read_summary, saved_step

POINTS: list[str | Path] = ["--dataset", "tests.plugins:points", "--dataset_args", "{size: 48}"]
POINTS += ["--cpu_only", "--batch_size", "4", "--epochs", "4", "--log_interval", "1"]
POINTS += ["--eval_every", "0", "--num_workers", "0"]


def run(output: Path, world_size: int, *flags: str | Path) -> Any:
    return train([*POINTS, "--output_dir", output, *flags], world_size)


HOOKS = "--no_shared_memory"  # gradients are sent within backward, as between machines
FORMS = [(3, []), (3, [HOOKS]), (1, [])]
FORMS += [(4, ["--comm_hook", "fp16", "--bucket_cap_mb=1e-4", "--find_unused_parameters"])]
FORMS += [(3, [HOOKS, "--accumulation_steps", "2", "--batch_size", "2"])]
LATE = "late"  # as on GPUs, see tests/late_looks.py
FORMS += [(3, [HOOKS, LATE, "--log_interval", "7"]), (1, [LATE])]
OTHERWISE = ["--optimizer", "sgd", "--clip_grad_norm", "1"]
FORMS += [(3, [HOOKS, LATE, "--accumulation_steps", "2", "--batch_size", "2", *OTHERWISE])]


@pytest.mark.parametrize("form", slow_after(2, FORMS), ids=str)
def test_faults_of_ranks_inside_of_steps_do_not_change_the_weights(
    form: tuple[int, list[str]], tmp_path: Path
) -> None:
    world_size, flags = form
    place = "tests.late_looks" if LATE in flags else "tests.plugins"
    flags = [flag for flag in flags if flag != LATE]
    model = [*flags, "--model", f"{place}:FailingOnce", "--model_args"]
    # By rank and forward. A step that is retried is another forward; 12 fails on all ranks.
    faults = {
        0: {8: "raise", 12: "raise in backward", 18: "nan"},
        1: {10: "raise in backward", 12: "raise", 15: "nan", 20: "raise"},
        2: {12: "nan", 16: "raise in backward"},
    }
    if "--accumulation_steps" in flags:  # two forwards of a rank in each step
        faults = {0: {8: "raise"}, 1: {14: "raise in backward"}, 2: {20: "nan"}}
    run(tmp_path / "undisturbed", world_size, *model, "{}").ok()
    faulty = run(tmp_path / "faulty", world_size, *model, str({"faults": faults})).ok()
    assert last_tensors(tmp_path / "faulty") == last_tensors(tmp_path / "undisturbed")
    # A fault may hit a step that is taken back in any case.
    num_retried = faulty.outputs[0].count("retrying step")
    assert num_retried >= (2 if LATE in form[1] else 3)
    assert ("a flag was up" in faulty.outputs[0]) == (LATE in form[1])
    assert "rank 0, step" in faulty.outputs[0]
    assert "a fault of the drill" in faulty.outputs[0]
    assert "Traceback" not in faulty.output
    assert not (only_run(tmp_path / "faulty") / "skipped_samples.jsonl").exists()


FIRST_FORWARD = 5  # of the first step, after DDP's warm-up


def test_a_rank_that_fails_in_the_first_step_keeps_no_other_waiting(tmp_path: Path) -> None:
    model = [HOOKS, "--max_steps", "2", "--model", "tests.plugins:FailingOnce"]
    run(tmp_path / "undisturbed", 3, *model).ok()
    faults = str({"faults": {1: {FIRST_FORWARD: "raise"}}})
    faulty = run(tmp_path / "faulty", 3, *model, "--model_args", faults).ok()
    assert "retrying step 0: rank 1" in faulty.outputs[0]
    assert last_tensors(tmp_path / "faulty") == last_tensors(tmp_path / "undisturbed")


@pytest.mark.slow
def test_with_fp16_a_fault_that_is_learned_late_does_not_change_its_scale(tmp_path: Path) -> None:
    faults = {0: {8: "raise", 18: "nan"}, 1: {12: "raise in backward"}, 2: {14: "raise"}}
    half = ["--dataset", "tests.halves:points", "--dataset_args", "{}", HOOKS, "--epochs", "5"]
    half += ["--model", "tests.plugins:FailingOnce", "--model_args"]
    run(tmp_path / "undisturbed", 3, *half, "{}").ok()
    faulty = run(tmp_path / "faulty", 3, *half, str({"faults": faults})).ok()
    assert last_tensors(tmp_path / "faulty") == last_tensors(tmp_path / "undisturbed")
    assert "a flag was up" in faulty.outputs[0]
    assert faulty.outputs[0].count("retrying step") >= 2
    assert _scale(tmp_path / "faulty") == _scale(tmp_path / "undisturbed")


@pytest.mark.slow
def test_ranks_that_would_compute_in_other_types_stop_at_once(tmp_path: Path) -> None:
    half = ["--dataset", "tests.halves:points", "--dataset_args", "{ranks: [1]}"]
    finished = run(tmp_path, 2, *half, "--model", "mlp")
    assert 0 not in finished.statuses
    assert "rank 1: precision is 'fp16', rank 0 has 'off'" in finished.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [[], ["--clip_grad_norm", "1", "--log_interval", "7", "--ema", "0.9"]]
)
def test_an_overflow_of_fp16_is_its_scalers_business(flags: list[str], tmp_path: Path) -> None:
    steep = ["--dataset", "tests.halves:points", HOOKS, *flags, "--model", "tests.halves:Steep"]
    at_once = run(tmp_path / "once", 2, *steep, "--dataset_args", "{late: false}").ok()
    late = run(tmp_path / "late", 2, *steep, "--dataset_args", "{late: true}").ok()
    assert "a flag was up" in late.outputs[0]
    assert "a flag was up" not in at_once.outputs[0]
    assert "retrying step" not in late.outputs[0] + at_once.outputs[0]
    assert last_tensors(tmp_path / "late") == last_tensors(tmp_path / "once")
    assert _scale(tmp_path / "late") == _scale(tmp_path / "once")
    assert _scale(tmp_path / "late")["scale"] < 65536


def test_memory_for_half_a_batch_gives_the_gradient_of_the_whole(tmp_path: Path) -> None:
    model = ["--model", "tests.plugins:Greedy", "--batch_size", "10", "--model_args"]
    undisturbed = run(tmp_path / "undisturbed", 2, *model, "{}").ok()
    small = run(tmp_path / "small", 2, *model, "{most: 3}").ok()
    assert "micro-batches have 5 samples at most from now on" in small.outputs[0]
    assert "micro-batches have 2 samples at most from now on" in small.outputs[0]
    assert small.outputs[0].count("at most from now on") == 2
    losses = [[*losses_of(only_run(tmp_path / name)).values()] for name in ("undisturbed", "small")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert undisturbed.outputs[0].count("  loss ") == small.outputs[0].count("  loss ")
    # What was learned goes on with the run.
    resumed = run(tmp_path / "small", 2, "--resume", only_run(tmp_path / "small"), "--epochs", "5")
    assert "at most from now on" not in resumed.ok().outputs[0]


def less_memory(kind: str, *flags: str, place: str = "tests.plugins") -> tuple[list[str], str]:
    faults = {"faults": {1: {9: kind}}}
    return [*flags, "--model", f"{place}:FailingOnce", "--model_args", str(faults)], "points"


def ragged(data: str, kind: str, *flags: str) -> tuple[list[str], str]:
    """Batches of a collate: their parts are read again."""
    args = f"{{forward_number: 9, how: {kind}}}"
    argv = ["--dataset", f"tests.token_data:{data}", "--task", "tokens", "--batch_size", "32"]
    argv += ["--global_batch_size", "32", "--model", "tests.token_data:FailingLM"]
    return [*argv, "--model_args", args, *flags], "language_model"


LESS_MEMORY = [less_memory("memory"), less_memory("memory in backward", HOOKS)]
LESS_MEMORY += [less_memory("memory", HOOKS, place="tests.late_looks")]
LESS_MEMORY += [ragged("ragged", "memory in backward", HOOKS)]
LESS_MEMORY += [ragged("ragged_stream", "memory", "--batch_size", "8")]


@pytest.mark.parametrize("case", slow_after(1, LESS_MEMORY), ids=str)
def test_after_an_out_of_memory_the_weights_are_those_of_equally_small_parts(
    case: tuple[list[str], str], tmp_path: Path
) -> None:
    argv, model = case
    faulty = run(tmp_path / "faulty", 2, *argv).ok()
    told = re.search(r"have (\d+) samples at most .* retrying step (\d+),", faulty.outputs[0])
    assert told, faulty.outputs[0]
    other = ["--model", f"tests.token_data:smaller_{model}"]
    other += ["--model_args", f"{{step: {told[2]}, most: {told[1]}}}"]
    smaller = run(tmp_path / "smaller", 2, *argv, *other).ok()
    assert "retrying" not in smaller.outputs[0]
    assert last_tensors(tmp_path / "faulty") == last_tensors(tmp_path / "smaller")


@pytest.mark.slow
def test_memory_for_not_even_one_sample_stops_all_ranks_with_that_cause(tmp_path: Path) -> None:
    model = ["--model", "tests.plugins:Greedy", "--model_args", "{most: 0}"]
    finished = run(tmp_path, 2, *model)
    assert finished.statuses == (1, 1)
    assert finished.output.count("DDP-S02") == 1
    assert re.search(r"DDP-S02\] rank 1, step \d+, forward, samples \[", finished.output)


WORDS = sections(Path(__file__).with_name("memory_words.txt"))
"""Errors of torch and its libraries; no: what smaller micro-batches do not cure."""


@pytest.mark.parametrize("kind", WORDS)
def test_want_of_memory_is_known_by_all_its_words(kind: str) -> None:
    error = RuntimeError(WORDS[kind].removesuffix("\n"))
    assert is_out_of_memory(error) == (not kind.startswith("no "))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())


def test_an_error_of_a_step_is_told_in_full() -> None:
    text = "CUDA out of memory. " + "Of the allocated memory 1 GiB is allocated by torch. " * 20
    group: Any = SimpleNamespace(launch=SimpleNamespace(rank=1), world_size=1)
    try:
        raise torch.OutOfMemoryError(text + "The end.")
    except torch.OutOfMemoryError as error:
        found = explain_failure(error, group, "step 3, forward, samples [1]", memory_fix="")
    assert f"samples [1]: OutOfMemoryError: {text}The end. (" in found.message


@pytest.mark.slow
def test_no_memory_before_the_first_step_is_one_clear_error(tmp_path: Path) -> None:
    faults = "{faults: {1: {4: memory}}}"  # in the warm-up, after DDP made its buckets
    flags = [HOOKS, "--model", "tests.plugins:FailingOnce", "--model_args", faults]
    finished = run(tmp_path, 2, *flags)
    assert finished.statuses == (PeerLostError.exit_status, OutOfMemoryError.exit_status)
    assert "[DDP-S02] rank 1, outside of the steps: " in finished.outputs[1]
    assert "Traceback" not in finished.output
    assert "Cause: rank 1: OutOfMemoryError" in finished.output


@pytest.mark.slow
def test_a_sample_that_fails_alone_is_left_out_by_name(tmp_path: Path) -> None:
    picky = ["--model", "tests.plugins:Picky", "--continue_on_error"]
    run(tmp_path, 2, *picky, "--ledger").ok()
    folder = only_run(tmp_path)
    lines = (folder / "skipped_samples.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    assert [(entry["index"], entry["epoch"]) for entry in entries] == [(13, e) for e in range(4)]
    assert "I do not like this one" in entries[0]["error"]
    assert read_summary(folder)["num_left_out"] == 4


def test_a_sample_failing_again_stops_all_with_one_cause_and_loses_no_step(tmp_path: Path) -> None:
    finished = run(tmp_path, 2, "--model", "tests.plugins:Picky")
    assert finished.statuses == (1, 1)
    [cause] = [line for line in finished.output.splitlines() if "DDP-S01" in line]  # by one rank
    assert "I do not like this one" in cause
    assert finished.output.count(" ddp_training.py explain ") == 1
    # WHY the newest: on a busy machine there is one of a step before
    assert f", step {saved_step(tmp_path)}, forward" in cause


@pytest.mark.slow
def test_a_layer_that_one_rank_stops_using_switches_the_search_on(tmp_path: Path) -> None:
    fading = ["--model", "tests.plugins:Fading"]
    finished = run(tmp_path / "auto", 2, *fading).ok()
    late = r"rank 1, step \d+, backward: no gradient came for second\.weight"
    assert re.search(rf"{late}, second\.bias", finished.output)
    assert "find_unused_parameters is on from now" in finished.output
    run(tmp_path / "on", 2, *fading, "--find_unused_parameters").ok()
    assert last_tensors(tmp_path / "auto") == last_tensors(tmp_path / "on")
    finished = run(tmp_path / "off", 2, *fading, "--find_unused_parameters", "off")
    assert finished.statuses == (1, 1)
    [line] = [line for line in finished.output.splitlines() if "DDP-M02" in line]  # by one rank
    assert re.search(late, line)


def _scale(output: Path) -> Any:
    """Read the numbers of fp16's scaler at the end of the run."""
    return load_checkpoint(open_checkpoint(only_run(output)))[1]["precision"]
