"""sys.exit(0) in the user's code, wherever it is called: an error with a cause, on all ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import ddp_training
from hardened_ddp.ranks.launch import environment
from hardened_ddp.task.task import Score, Task
from tests.harness.ranks import train
from tests.marks import slow_after

_calls: list[int] = []  # of leave, by this process


def leave(rank: int, after: int = 0) -> None:
    """End the program after so many calls, if this is the rank that does."""
    _calls.append(rank)
    if len(_calls) > after and rank in (-1, int(environment().get("RANK", "0"))):
        sys.exit(0)


class Rows(Dataset[tuple[torch.Tensor, int]]):
    num_classes = 2

    def __init__(self, train: bool, where: str = "", rank: int = -1) -> None:
        self.where, self.rank = where, rank
        if where == "constructor":
            leave(rank)
        if where == "collate":
            self.collate_fn = self._collate

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.where == "item" and index > 16:
            leave(self.rank)
        return torch.tensor([index / 24, 1.0, -1.0]), index % 2

    def _collate(self, samples: list[Any]) -> Any:
        if any(inputs[0] * 24 > 16.5 for inputs, _ in samples):
            leave(self.rank)
        return torch.utils.data.default_collate(samples)


class WholeRows(Rows):
    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]


class Net(nn.Module):
    def __init__(self, where: str = "", rank: int = -1, after: int = 4) -> None:
        super().__init__()
        if where == "constructor":
            leave(rank)
        self.layer = nn.Linear(3, 2)
        self.where, self.rank, self.after = where, rank, after

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(inputs)
        if self.where == "evaluation" and not self.training and len(inputs) > 2:
            leave(self.rank)
        if self.where == "backward" and logits.requires_grad:
            logits.register_hook(lambda gradient: leave(self.rank, self.after))
        elif self.where == "forward":
            leave(self.rank, self.after)
        return logits


class Own(Task):
    def __init__(self, where: str, rank: int = -1) -> None:
        self.rank = rank
        if where == "constructor":
            leave(rank)

    def score(self, output: Any, batch: Any) -> Score:
        leave(self.rank, 4)
        loss = nn.functional.cross_entropy(output, batch.targets, reduction="sum")
        return Score(loss, len(batch.targets))


class Leaving(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float, where: str, rank: int = -1) -> None:
        super().__init__(parameters, lr=lr)
        self.rank = rank
        if where == "constructor":
            leave(rank)

    def step(self, closure: Any = None) -> Any:
        leave(self.rank, 5)
        return super().step(closure)


def leaving_rate(step: int, rank: int = -1, at: int = 0) -> float:
    if step == at:
        leave(rank)
    return 0.1


class LeavingSchedule(torch.optim.lr_scheduler.LambdaLR):
    def __init__(self, optimizer: Any, rank: int = -1) -> None:
        leave(rank)
        super().__init__(optimizer, lambda step: 0.1)


HERE = "tests.ranks.test_user_exits"
DATA = ("--dataset", f"{HERE}:Rows", "--dataset_args")
MODEL = ("--model", f"{HERE}:Net", "--model_args")
TASK = ("--task", f"{HERE}:Own", "--task_args")
OPTIMIZER = ("--optimizer", f"{HERE}:Leaving", "--optimizer_args")
WORKER = ("--num_workers", "1")

PLACES: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {
    "forward": (MODEL, {"where": "forward"}, ()),
    "sample": (DATA, {"where": "item"}, ()),
    "dataset": (DATA, {"where": "constructor"}, ()),
    "sample, in a worker": (DATA, {"where": "item"}, WORKER),
    "samples, in a worker": (
        ("--dataset", f"{HERE}:WholeRows", DATA[2]),
        {"where": "item"},
        WORKER,
    ),
    "collate, in a worker": (DATA, {"where": "collate"}, WORKER),
    "model": (MODEL, {"where": "constructor"}, ()),
    "first forward": (MODEL, {"where": "forward", "after": 0}, ()),
    "backward": (MODEL, {"where": "backward"}, ()),
    "evaluation": (MODEL, {"where": "evaluation"}, ("--eval_every", "1")),
    "task": (TASK, {"where": "constructor"}, ()),
    "loss": (TASK, {"where": "score"}, ()),
    "optimizer": (OPTIMIZER, {"where": "constructor"}, ()),
    "update": (OPTIMIZER, {"where": "step"}, ()),
    "schedule": (("--lr_schedule", f"{HERE}:LeavingSchedule", "--lr_schedule_args"), {}, ()),
    "rate": (("--lr_schedule", f"{HERE}:leaving_rate", "--lr_schedule_args"), {"at": 3}, ()),
}
COMMON = ("--cpu_only", "--batch_size", "4", "--epochs", "2", "--no_config", "--num_workers", "0")
REST = {"--dataset": f"{HERE}:Rows", "--model": f"{HERE}:Net", "--eval_every": "0"}


def command(place: str, output: Path, rank: int) -> list[str]:
    words, given, more = PLACES[place]
    found = [*words, json.dumps({**given, "rank": rank}), *more, "--output_dir", str(output)]
    rest = {name: value for name, value in REST.items() if name not in found}
    return [*COMMON, *found, *(word for pair in rest.items() for word in pair)]


RUNS = [("forward", 2), ("sample", 1), *((place, 2) for place in PLACES if place != "forward")]


@pytest.mark.parametrize("run", slow_after(2, RUNS), ids=str)
def test_an_exit_of_the_users_code_is_an_error_that_says_where_on_all_ranks(
    run: tuple[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, num_ranks = run
    launcher = "torchrun" if num_ranks > 1 else "none"
    done = train(command(place, tmp_path, num_ranks - 1), num_ranks, launcher=launcher)
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
