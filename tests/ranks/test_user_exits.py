"""sys.exit(0) in the user's code, wherever it is called: an error with a cause, on all ranks."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import ddp_training
from hardened_ddp.task.task import Score, Task
from tests.harness.ranks import train
from tests.marks import slow_after

_calls: list[str] = []  # of leave, by this process


def leave(place: str, after: int = 0) -> None:
    """End the program after so many calls, if this is the place and the rank that does."""
    if os.environ["LEAVES"] == f"{place} on rank {os.environ.get('RANK', '0')}":
        _calls.append(place)
        if len(_calls) > after:
            sys.exit(0)


class Rows(Dataset[tuple[torch.Tensor, int]]):
    num_classes = 2

    def __init__(self, train: bool) -> None:
        leave("dataset")

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index > 16:
            leave("sample")
        return torch.tensor([index / 24, 1.0, -1.0]), index % 2


class WholeRows(Rows):
    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]


class CollatedRows(Rows):
    def collate_fn(self, samples: list[Any]) -> Any:
        if any(inputs[0] * 24 > 16.5 for inputs, _ in samples):
            leave("collate")
        return torch.utils.data.default_collate(samples)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        leave("model")
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        leave("first forward")
        leave("forward", 4)
        if not self.training and len(inputs) > 2:
            leave("evaluation")
        return self.layer(inputs)


class Own(Task):
    def score(self, output: Any, batch: Any) -> Score:
        leave("loss", 4)
        loss = nn.functional.cross_entropy(output, batch.targets, reduction="sum")
        return Score(loss, len(batch.targets))


class Leaving(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        leave("update", 5)
        return super().step(closure)


def leaving_rate(step: int) -> float:
    if step == 3:
        leave("rate")
    return 0.1


HERE = "tests.ranks.test_user_exits"
WORKER = ["--num_workers", "1", "--multiprocessing_context", "fork", "--dataset"]
# What is built as the model is, and a backward as a forward, is not tried once more.
PLACES = {
    **dict.fromkeys(("forward", "sample", "dataset", "model", "first forward"), ()),
    "sample, in a worker": [*WORKER, f"{HERE}:Rows"],
    "sample, of several, in a worker": [*WORKER, f"{HERE}:WholeRows"],
    "collate, in a worker": [*WORKER, f"{HERE}:CollatedRows"],
    "evaluation": ["--eval_every", "1"],
    "loss": ["--task", f"{HERE}:Own"],
    "update": ["--optimizer", f"{HERE}:Leaving"],
    "rate": ["--lr_schedule", f"{HERE}:leaving_rate"],
}
COMMON = ["--cpu_only", "--batch_size", "4", "--epochs", "2", "--no_config", "--num_workers", "0"]
COMMON += ["--dataset", f"{HERE}:Rows", "--model", f"{HERE}:Net", "--eval_every", "0"]
RUNS = [("forward", 2), ("sample", 1), *((place, 2) for place in PLACES if place != "forward")]


@pytest.mark.parametrize("run", slow_after(2, RUNS), ids=str)
def test_an_exit_of_the_users_code_is_an_error_that_says_where_on_all_ranks(
    run: tuple[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, num_ranks = run
    launcher = "torchrun" if num_ranks > 1 else "none"
    argv = [*COMMON, *PLACES[place], "--output_dir", tmp_path]
    env = {"LEAVES": f"{place.partition(',')[0]} on rank {num_ranks - 1}"}
    done = train(argv, num_ranks, launcher=launcher, env=env)
    assert all(status not in (0, None) for status in done.statuses), done.output
    assert "[DDP-" in done.output, done.output
    assert "SystemExit" in done.output, done.output
    assert "Traceback" not in done.output
    line = "sample" if "sample" in place else f"{Path(__file__).name}:"
    assert line in done.output, done.output
    log = tmp_path / "log.txt"
    log.write_text(done.output, encoding="utf-8")
    assert ddp_training.main(["explain", str(log)]) == 0
    told = capsys.readouterr().out
    assert "SystemExit" in told, told
    assert num_ranks == 1 or "rank 1" in told, told
