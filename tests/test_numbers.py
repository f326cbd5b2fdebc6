"""Numbers that go wrong: found before they reach the weights, named, and taken back."""

from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow_after
from tests.ranks import train
from tests.run_folder import find_checkpoints, last_tensors, step_of

POINTS: list[str | Path] = ["--dataset", "tests.plugins:points", "--cpu_only", "--batch_size", "4"]
POINTS += ["--dataset_args", "{size: 48}", "--epochs", "4", "--log_interval", "1"]
POINTS += ["--eval_every", "0", "--num_workers", "0"]


def run(output: Path, world_size: int, *flags: str | Path) -> Any:
    return train([*POINTS, "--output_dir", output, *flags], world_size)


def spoiled(**arguments: Any) -> list[str]:
    return ["--model", "tests.plugins:Spoiled", "--model_args", str(arguments)]


CULPRITS = [
    ("nan", "the loss is nan; blocks.1.1 (Spoiler) gave the first nan, of finite inputs"),
    ("gradient", "the gradient is not finite; in backward blocks.1.1 (Spoiler) gave the first inf"),
    ("own", "; the model (Spoiled) gave the first nan, in its own forward, before head (Linear)"),
]


@pytest.mark.parametrize("culprit", slow_after(2, CULPRITS), ids=lambda culprit: culprit[0])
def test_the_module_that_first_gives_no_number_is_named_with_rank_and_samples(
    culprit: tuple[str, str], tmp_path: Path
) -> None:
    kind, words = culprit
    finished = run(tmp_path, 2, *spoiled(kind=kind))
    assert finished.statuses == (1, 1)
    [checkpoint] = find_checkpoints(tmp_path)
    for output in finished.outputs:
        [line] = [line for line in output.splitlines() if "DDP-S03" in line]
        # nothing of that step is in the checkpoint, and all before it is
        assert f"rank 1, step {step_of(checkpoint)}, samples [" in line
        assert words in line


def test_a_sample_that_is_no_number_is_named(tmp_path: Path) -> None:
    flags = ["--dataset", "tests.plugins:points_with_nan", *spoiled()]
    finished = run(tmp_path, 2, *flags)
    assert finished.statuses == (1, 1)
    assert "samples [13]: the loss is nan; the input itself is not finite" in finished.outputs[0]


@pytest.mark.parametrize("world_size", slow_after(1, [2, 1]))
@pytest.mark.parametrize("kind", slow_after(1, ["gradient", "nan"]))
def test_numbers_that_go_wrong_once_leave_no_trace_in_the_weights(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    run(tmp_path / "quiet", world_size, *spoiled()).ok()
    once = spoiled(kind=kind, first=9, last=9, rank=world_size - 1)
    struck = run(tmp_path / "struck", world_size, *once).ok()
    assert struck.outputs[0].count("the window is done again") == 1
    assert last_tensors(tmp_path / "struck") == last_tensors(tmp_path / "quiet")
