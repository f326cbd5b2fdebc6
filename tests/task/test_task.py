"""The task: what a batch is worth, and that training adds up any task's scores alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.errors import ModelError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.step.gradient import Totals
from hardened_ddp.task.classification import Classification
from hardened_ddp.task.first_batch import check_score
from hardened_ddp.task.task import Metric, Score, Task, described, with_loss
from tests.harness.ranks import train

CPU = torch.device("cpu")
LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.5, 0.0]])
TARGETS = torch.tensor([0, 1, 2])


class Distance(Task):
    """A toy task with floats as labels: how far off is the model?"""

    metrics = (Metric("distance", is_higher_better=False), Metric("near", ".1%"))

    def __init__(self, power: float = 2.0) -> None:
        self.power = power

    def score(self, output: torch.Tensor, batch: Batch) -> Score:
        output = output.float().reshape(batch.num_samples, -1).mean(dim=1)
        distance = (output.detach() - batch.targets).abs()
        pairs = {"distance": distance.sum(), "near": (distance.le(1).sum(), batch.num_samples)}
        loss_sum = (output - batch.targets).abs().pow(self.power).sum()
        return Score(loss_sum, batch.num_samples, pairs)


def batch_of(inputs: Any, targets: torch.Tensor) -> Batch:
    return Batch(inputs, targets, torch.arange(len(targets)))


def score_of(task: Task, *, seed: int = 0, size: int = 4) -> Score:
    generator = torch.Generator().manual_seed(seed)
    return task.score(torch.randn(size, generator=generator), batch_of(None, torch.zeros(size)))


def test_logits_are_worth_their_summed_loss_and_the_correct_ones_are_counted() -> None:
    score = Classification(num_classes=3).score(LOGITS, batch_of(None, TARGETS))
    wanted = nn.functional.cross_entropy(LOGITS, TARGETS, reduction="sum")
    assert torch.equal(score.loss_sum, wanted)
    assert (score.count, int(score.metrics["correct"])) == (3, 2)


def test_the_mean_loss_of_a_model_itself_becomes_a_sum() -> None:
    class WithLoss(nn.Module):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": labels.float().mean(), "logits": inputs}

    model, task = WithLoss(), Classification(num_classes=3)
    task.attach(model)
    batch = batch_of(LOGITS, TARGETS)
    score = task.score(task.forward(model, batch), batch)
    assert float(score.loss_sum) == 3.0
    assert int(score.metrics["correct"]) == 2


def test_totals_add_up_the_sums_of_any_task_and_go_back_to_a_mark() -> None:
    task = Distance()
    totals = Totals(task, CPU)
    first, second = score_of(task, seed=1), score_of(task, seed=2, size=3)
    totals.add(first, 4)
    kept = totals.sums["distance"]
    mark = totals.mark()
    totals.add(second, 3)
    assert totals.loss_since(mark) == pytest.approx(float(second.loss_sum))
    totals.go_back(mark)
    assert totals.sums["distance"] is kept  # in place: see totals.py
    assert totals.read(Group(Launch(), CPU)) == {
        "loss": float(first.loss_sum) / 4,
        "distance": float(first.metrics["distance"]) / 4,
        "near": int(first.metrics["near"][0]) / 4,
        "samples": 4.0,
    }


def test_a_metric_says_which_value_is_better_and_how_it_is_printed() -> None:
    distance, near = Distance.metrics
    assert distance.is_better(1.0, than=2.0)
    assert near.is_better(2.0, than=1.0)
    assert near.is_better(1.0, than=1.0), "of two equal ones the newer is the best"
    assert not near.is_better(0.5, than=1.0)
    text = described(Distance.metrics, {"near": 0.97125, "distance": 0.5})
    assert text == "distance 0.5000  near 97.1%"
    assert described([near], {"near": 0.97125}, of="test") == "test near 97.1%"
    assert with_loss(0.5, text) == f"loss 0.5000  {text}"
    assert [with_loss(loss) for loss in (0.0, 2e-7, 3e11)] == [
        "loss 0.0000",
        "loss 2e-07",
        "loss 3e+11",
    ]


@pytest.mark.slow
def test_the_best_checkpoint_is_the_one_of_the_first_metric_of_the_task(tmp_path: Path) -> None:
    argv: list[str | Path] = ["--dataset", "tests.plugins:points", "--cpu_only"]
    argv += ["--model", "tests.plugins:Plain", "--task", "tests.task.test_task:Distance"]
    argv += ["--task_args", "{power: 1.0}"]
    argv += ["--epochs", "4", "--lr_schedule", "constant", "--learning_rate", "0.1"]
    train([*argv, "--output_dir", tmp_path, "--run_name", "one"], 1).ok()
    lines = (tmp_path / "one" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    distances = {e["step"]: e["distance/test"] for e in entries if "distance/test" in e}
    assert len(distances) == 4
    [best] = (tmp_path / "one").rglob("best.json")
    found = json.loads(best.read_text(encoding="utf-8"))
    assert (found["metric"], found["direction"]) == ("distance", "lower is better")
    assert found["value"] == min(distances.values())
    assert found["value"] == distances[found["step"]]


class Undeclared(Classification):
    def sums_of(self, score: Score) -> dict[str, Any]:
        return {**super().sums_of(score), "seen": 1}


def test_a_sum_that_a_task_does_not_declare_is_told() -> None:
    score = Score(torch.ones((), requires_grad=True), 1, {"correct": torch.tensor(1)})
    with pytest.raises(ModelError, match=r"gives seen, which is not among its sums"):
        check_score(Undeclared(num_classes=2), score)
