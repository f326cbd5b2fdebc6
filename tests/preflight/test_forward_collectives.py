"""Collectives in a model's forward: every rank runs as many, or the run is refused at its start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hardened_ddp.model.replica import NO_COLLECTIVES, ForwardCollectives
from hardened_ddp.preflight.probe import check_evaluation
from tests.harness.ranks import train
from tests.marks import slow_after
from tests.run_folder import last_tensors, only_run, read_summary

FLAGS: list[str | Path] = ["--cpu_only", "--dataset", "tests.plugins:points", "--batch_size", "4"]
FLAGS += ["--epochs", "2", "--num_workers", "0", "--hang_after_s", "5", "--timeout_s", "30"]
NORMING, GATHERING = ("--model", "tests.plugins:Norming"), ("--model", "tests.plugins:Gathering")
SUMMING = ("--model", "tests.plugins:Summing")
COMPILED = ("--compile", "--model", "tests.compiled_models:NormingTestsCompiled")


UNEVEN = [("allreduce", NORMING), ("allreduce", (*NORMING, "--no_shared_memory"))]
UNEVEN += [("allgather", ("--model", "tests.plugins:GatheringMeans"))]


@pytest.mark.parametrize("case", slow_after(1, UNEVEN), ids=str)
def test_ranks_with_unequal_shares_run_as_many_forwards(
    case: tuple[str, tuple[str, ...]], tmp_path: Path
) -> None:
    # Steps of 16 and 9 samples: 5 and 4 of the last one, so 2 micro-batches and 1.
    name, flags = case
    argv = [*FLAGS, *flags, "--accumulation_steps", "2", "--output_dir", tmp_path]
    finished = train([*argv, "--dataset_args", "{size: 25}"], 2).ok()
    assert finished.outputs[0].count("the model's forward runs collectives (") == 1
    assert f"{name} in plugins.py:" in finished.output
    assert read_summary(only_run(tmp_path))["step"] == 4


REFUSED = [
    # A last step of 1 sample: rank 1 has none.
    (33, (*NORMING,), "rank 1 has 0 for the 1 forwards", "--drop_last"),
    (25, (*SUMMING, "--accumulation_steps", "2"), "need equal sizes", "--drop_last"),
    (25, (*GATHERING, "--accumulation_steps", "2"), "need equal sizes", "--drop_last"),
    (24, (*NORMING, "--continue_on_error"), "left out", "--continue_on_error"),
    (24, (*NORMING, "--global_batch_size", "1"), "each step has 1", "a multiple of 2"),
    # 17 samples to test on, 16 at once: one rank has 9 of them, in one batch, and the other 8.
    (
        24,
        (*NORMING, "--eval_batch_size", "1", "--model_args", "{all_modes: true}"),
        "8 for",
        "--eval",
    ),
    (24, ("--model", "tests.plugins:NormingTests", "--eval_batch_size", "1"), "8 for", "--eval"),
    (24, (*COMPILED, "--eval_batch_size", "1"), "8 for", "--eval"),
]


@pytest.mark.parametrize(
    ("size", "flags", "problem", "fix"),
    [REFUSED[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in REFUSED[1:])],
    ids=str,
)
def test_a_run_in_which_a_rank_would_lack_a_forward_is_refused_before_it_trains(
    size: int, flags: tuple[str, ...], problem: str, fix: str, tmp_path: Path
) -> None:
    argv = [*FLAGS, *flags, "--dataset_args", f"{{size: {size}}}", "--output_dir", tmp_path]
    finished = train(argv, 2)
    assert all(finished.statuses)
    output = finished.output
    assert "[DDP-M01] the model's forward runs collectives (" in output
    assert problem in output
    assert fix in output.partition("wait for each other: ")[2].partition(problem)[2]
    assert output.count("DDP-M01") == 1  # one rank tells it
    assert "Traceback" not in output
    if fix == "--drop_last":
        train([*argv, "--drop_last"], 2).ok()


@pytest.mark.slow
def test_an_error_of_one_rank_in_such_a_forward_ends_the_attempt_and_loses_no_step(
    tmp_path: Path,
) -> None:
    argv = [*FLAGS, *NORMING, "--dataset_args", "{size: 24}", "--output_dir", tmp_path]
    fails = ["--model_args", "{fails_at: 8}"]
    finished = train([*argv, *fails], 2)
    assert finished.statuses == (75, 1)
    assert "a fault of this model" in finished.output
    assert "is saved; to resume" in finished.output
    train([*argv, "--resume", only_run(tmp_path)], 2).ok()
    train([*argv, "--output_dir", tmp_path / "undisturbed"], 2).ok()
    assert last_tensors(tmp_path) == last_tensors(tmp_path / "undisturbed")


def test_the_trial_of_the_test_set_is_left_out_where_a_rank_could_wait_in_it() -> None:
    found = ForwardCollectives(in_evaluation=("allreduce in mine.py:1",))
    parts: Any = SimpleNamespace(  # with nothing that a trial needs: it would raise
        config=SimpleNamespace(loop=SimpleNamespace(evaluates=True)),
        eval_loader=object(),
        group=None,
        replica=SimpleNamespace(collectives=found),
    )
    check_evaluation(parts)
    parts.replica.collectives = NO_COLLECTIVES
    with pytest.raises(AttributeError):
        check_evaluation(parts)
