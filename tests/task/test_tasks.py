"""Tasks, built in and others: losses and metrics beside plain torch, and what they refuse.

Bad input of tasks, metrics, batches and streams: one clear error each, before the first step.
"""

import contextlib
import io
import math
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ddp_training
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import HardenedError, ModelError
from hardened_ddp.preflight.probe import check_evaluation, choose_task, try_metrics
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.reporting.events import Events
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.layers import resolve
from hardened_ddp.step.gradient import Totals
from hardened_ddp.task.build import build_task, metric_of, task_that_fits
from hardened_ddp.task.classification import Classification
from hardened_ddp.task.multilabel import Multilabel
from hardened_ddp.task.output import fix_for
from hardened_ddp.task.own import Own
from hardened_ddp.task.own_metrics import OwnMetrics
from hardened_ddp.task.regression import Regression
from hardened_ddp.task.segmentation import Segmentation
from hardened_ddp.task.task import Metric, Task, described, with_loss
from hardened_ddp.task.tokens import Tokens
from hardened_ddp.training.building import check_names
from hardened_ddp.training.evaluation import check_stop_when, report_lines
from tests.harness.ranks import run_ranks, train
from tests.marks import sections
from tests.ranks.test_shared_sum import rendezvous
from tests.token_data import Distance

CPU = torch.device("cpu")
ALONE = Group(Launch(), CPU)


def batch_of(targets: Any, inputs: Any = None) -> Batch:
    size = len(targets) if isinstance(targets, torch.Tensor) else len(inputs)
    return Batch(inputs, targets, torch.arange(size))


def figures_of(task: Task, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """Give the figures over some batches of outputs and labels."""
    totals = Totals(task, CPU, loss_dtype=torch.float64)
    for output, targets in pairs:
        task.check(output, batch_of(targets))
        totals.add(task.score(output, batch_of(targets)), len(targets))
    return totals.read(ALONE)


def report_of(task: Task, output: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Give what the command evaluate reports of one batch."""
    task.in_detail = True
    totals = Totals(task, CPU)
    totals.add(task.score(output, batch_of(targets)), len(targets))
    return task.report(*totals.gather(ALONE))


def in_parts(output: torch.Tensor, targets: torch.Tensor, *sizes: int) -> list[Any]:
    return list(zip(output.split(list(sizes)), targets.split(list(sizes)), strict=True))


@pytest.mark.parametrize("shape", [(9,), (9, 1)])
def test_regression_is_measured_as_over_all_samples_at_once(shape: tuple[int, ...]) -> None:
    outputs, labels = torch.randn(9, 1), torch.randn(shape) + 3
    found = figures_of(Regression(), in_parts(outputs, labels, 4, 4, 1))
    error = outputs.flatten() - labels.flatten()
    assert found["loss"] == pytest.approx(float(error.square().mean()), rel=1e-6)
    assert found["rmse"] == pytest.approx(float(error.square().mean().sqrt()), rel=1e-6)
    assert found["mae"] == pytest.approx(float(error.abs().mean()), rel=1e-6)
    spread = (labels - labels.mean()).square().sum()
    assert found["r2"] == pytest.approx(1 - float(error.square().sum() / spread), rel=1e-5)


def test_r2_of_large_numbers_keeps_its_digits_and_of_several_is_the_mean_of_theirs() -> None:
    outputs, labels = torch.randn(2, 9, 1, dtype=torch.float64)
    near = figures_of(Regression(), [(outputs, labels)])["r2"]
    far = figures_of(Regression(), in_parts(outputs + 1e5, labels + 1e5, 4, 5))["r2"]
    assert far == pytest.approx(near, rel=1e-3)
    too_far = figures_of(Regression(), in_parts(outputs + 1e9, labels + 1e9, 4, 5))["r2"]
    assert math.isnan(too_far), "wrong digits must not be shown"
    outputs, labels = torch.randn(9, 2), torch.randn(9, 2) * torch.tensor([1.0, 100.0])
    together = figures_of(Regression(num_outputs=2), [(outputs, labels)])
    each = [figures_of(Regression(), [(outputs[:, i], labels[:, i])])["r2"] for i in (0, 1)]
    assert together["r2"] == pytest.approx(sum(each) / 2)
    rows = report_of(Regression(num_outputs=2), outputs, labels)["rows"]
    assert [row["name"] for row in rows] == ["output 0", "output 1"]
    assert [row["r2"] for row in rows] == pytest.approx(each)


def test_multilabel_is_measured_per_label() -> None:
    logits = torch.tensor([[1.0, -1.0, -1.0], [1.0, 1.0, -1.0], [-1.0, 1.0, -1.0]])
    labels = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0]])
    task = Multilabel(num_labels=3, class_names=("a", "b", "c"))
    found = figures_of(task, in_parts(logits, labels, 2, 1))
    wanted = functional.binary_cross_entropy_with_logits(logits, labels.float())
    assert found["loss"] == pytest.approx(float(wanted))
    # a: TP 1, FP 1, FN 1; b: TP 2; c never occurs
    assert found["f1"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["exact_match"] == pytest.approx(1 / 3)
    rows = report_of(task, logits, labels)["rows"]
    assert [row["f1"] for row in rows] == [0.5, 1.0, None]
    lines = report_lines({"rows": [*rows, {**rows[0], "name": "small", "f1": 2e-7}]})
    assert any(line.startswith("b ") and "1.0000" in line for line in lines)
    assert lines[-1].endswith(" 2e-07")


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_one_label_is_binary_classification(shape: tuple[int, ...]) -> None:
    logits, labels = torch.tensor([[2.0], [-1.0], [3.0], [-2.0]]), torch.tensor([1, 0, 0, 0])
    task = Multilabel(num_labels=2)  # what a dataset of two classes says
    task.check(logits, batch_of(labels.reshape(shape)))  # the probe's
    found = figures_of(task, [(logits, labels.reshape(shape))])
    wanted = functional.binary_cross_entropy_with_logits(logits.flatten(), labels.float())
    assert found["loss"] == pytest.approx(float(wanted))
    assert (found["f1"], found["exact_match"]) == (pytest.approx(2 / 3), 0.75)


@pytest.mark.parametrize("size", [(4, 4), pytest.param((4, 2, 3), marks=pytest.mark.slow)])
def test_segmentation_counts_the_pixels_that_count(size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, *size, generator=generator)
    labels = torch.randint(3, (5, *size), generator=generator)
    labels[0, :2] = 255
    task = Segmentation(num_classes=3, ignore_index=255)
    found = figures_of(task, in_parts(logits, labels, 2, 2, 1))
    wanted = functional.cross_entropy(logits, labels, ignore_index=255)
    assert found["loss"] == pytest.approx(float(wanted), rel=1e-6)
    predicted, counts = logits.argmax(1), labels != 255
    shares = []
    for index in range(3):
        both = ((predicted == index) & (labels == index) & counts).sum()
        either = (((predicted == index) | (labels == index)) & counts).sum()
        shares.append(float(both / either))
    assert found["mean_iou"] == pytest.approx(sum(shares) / 3)
    is_right = (predicted == labels)[counts].float()
    assert found["pixel_accuracy"] == pytest.approx(float(is_right.mean()))


def test_tokens_are_measured_over_those_that_count() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 5, generator=generator)
    labels = torch.randint(5, (4, 6), generator=generator)
    labels[1:3, 2:] = -100
    task = Tokens()
    found = figures_of(task, in_parts(logits, labels, 1, 3))
    wanted = float(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert found["loss"] == pytest.approx(wanted, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-5)
    counts = labels != -100
    share = float((logits.argmax(2) == labels)[counts].float().mean())
    assert found["token_accuracy"] == pytest.approx(share)


FITS: list[tuple[str, Any, Any]] = [
    ("classification", torch.randn(4, 3), torch.tensor([0, 1, 2, 1])),
    ("tokens", torch.randn(2, 6, 5), torch.randint(5, (2, 6))),
    ("segmentation", torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))),
    ("segmentation", {"out": torch.randn(2, 3, 4, 4)}, torch.randint(3, (2, 4, 4))),
    ("regression", torch.randn(4, 1), torch.randn(4)),
    ("regression", torch.randn(4, 2), torch.randn(4, 2)),
    ("multilabel", torch.randn(2, 3), torch.tensor([[0.0, 1, 0], [1, 0, 0]])),
    ("multilabel", torch.randn(2, 3), torch.tensor([[0, 1, 0], [1, 0, 0]])),
    ("own", {"loss": torch.ones(())}, None),
    ("own", torch.ones(()), torch.randn(4)),
    ("own", {"loss": torch.ones(()), "logits": torch.randn(2, 7)}, ["a", "b"]),
    ("tokens", (torch.randn(2, 6, 5), torch.ones(())), torch.randint(5, (2, 6))),
    ("segmentation", torch.randn(2, 3, 4, 5, 6), torch.randint(3, (2, 4, 5, 6))),
    ("regression", torch.randn(2, 3), torch.tensor([[0.2, 0.3, 0.1], [0.5, 0.2, 0.3]])),
]


@pytest.mark.parametrize(("name", "output", "labels"), FITS)
def test_auto_takes_the_task_that_fits(name: str, output: Any, labels: Any) -> None:
    assert task_that_fits(output, batch_of(labels, inputs=[1, 2]))[0] == name


LOSS, PLAIN = torch.ones((), requires_grad=True), torch.ones(())


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ({"loss": {"g": PLAIN, "d": PLAIN}}, r"2 losses \(loss g, "),
        ({"loss": [PLAIN, PLAIN]}, "a step has one"),
        ({"loss_g": PLAIN, "loss_d": PLAIN}, "2 losses"),
        ((LOSS, LOSS), r"2 losses \(part 0, part 1\)"),
    ],
)
def test_several_losses_are_refused_in_whatever_form_they_come(output: Any, told: str) -> None:
    for refuse in (Own().check, task_that_fits):
        with pytest.raises(ModelError, match=told) as caught:
            refuse(output, batch_of(None, inputs=[1, 2]))
        assert caught.value.fix


def test_a_number_beside_the_loss_is_no_loss() -> None:
    nothing = batch_of(None, inputs=[1, 2])
    assert task_that_fits((LOSS, torch.ones(())), nothing)[0] == "own"
    named = {"loss": LOSS, "aux_loss": torch.ones(()), "main_loss": torch.ones(())}
    Own().check(named, nothing)


def test_the_first_batch_shows_which_labels_an_own_loss_is_a_mean_over() -> None:
    logits = torch.randn(2, 3, 7, requires_grad=True)
    labels = torch.randint(7, (2, 3))
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    task = Own()
    torch.set_warn_always(True)  # WHY: else torch warns once per process, maybe in another test
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            task.check({"loss": loss, "logits": logits}, batch_of(labels))
    finally:
        torch.set_warn_always(False)
    assert task.learned() == {"shift": 1}
    assert task.score({"loss": loss}, batch_of(labels)).count == 4


class NoScore:
    pass


class Refusing(Task):
    def __init__(self) -> None:
        raise ValueError("no such table")


class Sum:
    """A metric in torchmetrics' form: the sum of all labels."""

    higher_is_better = False

    def __init__(self, factor: float = 1.0) -> None:
        self.total, self.factor = torch.zeros(()), factor

    def update(self, output: torch.Tensor, labels: torch.Tensor) -> None:
        self.total = self.total + self.factor * labels.sum()

    def compute(self) -> torch.Tensor:
        return self.total

    def reset(self) -> None:
        self.total = torch.zeros(())


class Synced(Sum):
    """One that sums over the ranks in compute(), as those of torchmetrics do, on one device."""

    distributed_available_fn = staticmethod(torch.distributed.is_initialized)
    device = torch.device("meta")

    def to(self, device: torch.device) -> None:
        self.device = device

    def update(self, output: torch.Tensor, labels: torch.Tensor) -> None:
        assert self.device == output.device
        super().update(output, labels)

    def compute(self) -> torch.Tensor:
        if self.distributed_available_fn():
            torch.distributed.all_reduce(self.total)  # of rank 0 alone: it would never end
        return self.total


class Summed(Sum):
    """One with a collective that nothing switches off."""

    def compute(self) -> torch.Tensor:
        torch.distributed.all_reduce(self.total)
        return self.total


def built(*argv: str) -> Task:
    config = resolve(parse(["--cpu_only", *argv]), world_size=1).config
    model = nn.Linear(3, 2)
    return build_task(config.task.task, model, build_data(config.data), config.task)


def test_an_impossible_metric_is_told_before_ranks_meet_and_one_of_some_data_passes() -> None:
    def check(*argv: str) -> None:
        check_names(resolve(parse(["--cpu_only", *argv]), world_size=1).config)

    own = ("--metrics", "{total: tests.task.test_tasks:Sum}", "--best_metric", "total")
    check(*own, "--stop_when", "top5_accuracy")
    check("--task", "tests.task.test_tasks:Refusing")
    with pytest.raises(HardenedError, match="no metric 'acuracy' with --task auto"):
        check("--stop_when", "acuracy")
    with pytest.raises(HardenedError, match="no metric 'mae' with --task tokens"):
        check("--task", "tokens", "--best_metric", "mae")


def test_the_best_metric_is_the_first_of_the_task_or_the_loss() -> None:
    for name, metric in (("regression", "rmse"), ("own", "loss")):
        assert metric_of(built("--task", name), "auto", setting="best_metric").name == metric
    asked = built("--task", "own", "--metrics", "{total: tests.task.test_tasks:Sum}")
    found = metric_of(asked, "total", setting="stop_when")
    assert (found.name, found.is_higher_better) == ("total", False)


def count_with_own_metrics() -> dict[str, float]:
    """Rank r has r batches; the last rank has one more than all others reach."""
    group = rendezvous()
    rank = group.launch.rank
    here = "tests.task.test_tasks"
    twice = {"class": f"{here}:Sum", "factor": 2.0}
    metrics = OwnMetrics({"total": f"{here}:Sum", "twice": twice, "synced": f"{here}:Synced"})
    for number in range(3):
        has_any = number < rank
        labels = torch.full((number + 1,), 10 * rank + number)
        metrics.add(torch.ones(number + 1, 2), batch_of(labels) if has_any else None, group)
    found = metrics.compute(group)
    summed = OwnMetrics({"x": f"{here}:Summed"})
    with pytest.raises(ModelError, match="allreduce in test_tasks"):
        try_metrics(summed, torch.ones(1, 2), batch_of(torch.ones(1)), group)
    group.close()
    return found


def test_own_metrics_count_each_sample_once_on_any_number_of_ranks() -> None:
    wanted = 10 + (20 + 21 * 2)
    for found in run_ranks(count_with_own_metrics, 3):
        assert found == {"total": wanted, "twice": 2 * wanted, "synced": wanted}


def choose_on_ranks() -> str:
    """The batches of the ranks fit different tasks."""
    group = rendezvous()
    is_first = group.launch.rank == 0
    labels = torch.tensor([0, 1] if is_first else [0.5, 1.5])
    model, batch = nn.Linear(1, 2 if is_first else 1), batch_of(labels, inputs=torch.ones(2, 1))
    task = choose_task(model, batch, build_data(Config().data), Config().task, group)
    group.close()
    return task.name


def test_where_the_batches_of_the_ranks_fit_different_tasks_rank_0s_decides() -> None:
    assert run_ranks(choose_on_ranks, 2) == ["classification"] * 2


def test_top_5_accuracy_is_measured_where_there_are_more_than_10_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(40, 30, generator=generator), torch.arange(40) % 30
    logits[39] = math.nan
    found = figures_of(Classification(num_classes=30), in_parts(logits, labels, 30, 10))
    best = logits[:39].topk(5).indices
    wanted = (best == labels[:39, None]).any(1).sum() / 40
    assert found["top5_accuracy"] == pytest.approx(float(wanted))
    assert found["top5_accuracy"] > found["accuracy"]
    few = Classification(num_classes=10)
    assert [metric.name for metric in few.metrics] == ["accuracy"]
    unknown = Classification(num_classes=0)
    unknown.check(logits, batch_of(labels))
    assert [metric.name for metric in unknown.metrics] == ["accuracy", "top5_accuracy"]


UNEXPECTED = TypeError("forward() got an unexpected keyword argument 'mask'")
MISSING = TypeError("forward() missing 1 required positional argument: 'second'")
DTYPES = RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float")
SHAPES = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
TWO = torch.ones(2, 3)
ODD_INPUTS: list[tuple[Exception, Any, str]] = [
    (MISSING, {"text": ["one", "two"], "size": TWO}, "text is a list of str; size is (2, 3) float"),
    (MISSING, ["one", "two"], "pad lists, and tokenize text"),
    (MISSING, TWO, "last part of a sample is its label"),
    (MISSING, [TWO, TWO], "return a mapping to give it parts by name"),
    (DTYPES, torch.ones(2, 4).double(), "(2, 4) float64; a model computes in float32"),
    (SHAPES, torch.ones(2, 8, 8, 3).byte(), "permute"),
    (SHAPES, torch.ones(2, 28, 28), "(2, 28, 28) float32; the whole"),
    (RuntimeError("same dtype"), {"x": 3}, "the whole traceback"),
]


@pytest.mark.parametrize(("error", "inputs", "told"), ODD_INPUTS, ids=[t for *_, t in ODD_INPUTS])
def test_odd_input_of_a_first_forward_is_named(error: Exception, inputs: Any, told: str) -> None:
    assert told in fix_for(error, inputs)


def test_an_input_too_much_is_told() -> None:
    parts = {"image": TWO, "mask": TWO}
    assert "labels, label, targets or target" in fix_for(UNEXPECTED, parts, has_labels=False)
    assert "taken as label" not in fix_for(UNEXPECTED, parts)
    wanted = "mask is (2, 3) float32; parts of a mapping go to forward by name; the whole"
    assert wanted in fix_for(UNEXPECTED, parts)


@pytest.mark.parametrize("kind", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_labels_may_be_of_any_integer_type(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    cases: list[tuple[Task, torch.Tensor, torch.Tensor]] = [
        (Classification(num_classes=12), torch.randn(4, 12), torch.randint(12, (4,))),
        (Tokens(), torch.randn(2, 3, 5), torch.randint(5, (2, 3))),
        (Segmentation(num_classes=3), torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))),
    ]
    for task, logits, labels in cases:
        scores = []
        for wanted in (labels, labels.to(kind)):
            task.check(logits, batch_of(wanted))
            scores.append(task.score(logits, batch_of(wanted)))
            assert report_of(task, logits, wanted) or isinstance(task, Tokens)
        assert torch.equal(scores[0].loss_sum, scores[1].loss_sum)
        assert all(torch.equal(a, scores[1].metrics[n]) for n, a in scores[0].metrics.items())


class Asking(nn.Module):
    """A language model that computes its loss if it gets labels; of: what its logits depend on."""

    def __init__(self, of: str = "tokens", factor: float = 1.0) -> None:
        super().__init__()
        self.table, self.of, self.factor = nn.Embedding(5, 5), of, factor
        self.drop, self.num_losses = nn.Dropout(0.5), 0

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        use_labels = self.of == "labels" and labels is not None
        logits = self.drop(self.table(labels.clamp(min=0) if use_labels else ids))
        if self.of == "no last":
            logits = logits if labels is not None else logits[:, -1:]
        if labels is None:
            return {"logits": logits}
        self.num_losses += 1
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": self.factor * loss}


@pytest.mark.parametrize(
    ("of", "factor", "asked"),
    [("tokens", 1.0, False), ("labels", 1.0, True), ("no last", 1.0, True), ("tokens", 1.5, True)],
)
def test_a_loss_that_comes_anyway_is_not_asked_for(of: str, factor: float, asked: bool) -> None:
    model, task = Asking(of, factor), Tokens()
    task.attach(model, "tokens")
    labels = torch.tensor([[1, 2, -100], [3, -100, 4]])
    batch = batch_of(labels, inputs=torch.tensor([[0, 1, 2], [2, 3, 4]]))
    task.check(task.forward(model, batch), batch)
    assert model.training
    before = model.num_losses
    score = task.score(task.forward(model, batch), batch)
    assert (model.num_losses > before) == asked
    assert score.loss_sum.requires_grad
    resumed = Tokens()
    resumed.attach(model, "tokens")
    resumed.take_over(task.learned())
    assert bool(resumed.labels_name) == asked


def test_the_mean_loss_of_a_model_itself_becomes_a_sum() -> None:
    model, task = nn.Module(), Classification(num_classes=3)
    model.forward = lambda inputs, labels: {"loss": labels.float().mean(), "logits": inputs}
    task.attach(model)
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.5, 0.0]])
    batch = batch_of(torch.tensor([0, 1, 2]), logits)
    score = task.score(task.forward(model, batch), batch)
    assert (float(score.loss_sum), score.count, int(score.metrics["correct"])) == (3.0, 3, 2)


def test_totals_add_up_the_sums_of_any_task_and_go_back_to_a_mark() -> None:
    task = Distance()
    totals = Totals(task, CPU)
    first, second = (task.score(torch.randn(n), batch_of(torch.zeros(n))) for n in (4, 3))
    totals.add(first, 4)
    kept = totals.sums["mae"]
    mark = totals.mark()
    totals.add(second, 3)
    assert totals.loss() - float(mark[0]) == pytest.approx(float(second.loss_sum))
    totals.go_back(mark)
    assert totals.sums["mae"] is kept  # in place: see totals.py
    mean = float(first.loss_sum) / 4
    assert totals.read(ALONE) == {"loss": mean, "mae": mean, "share": 1 / 4, "samples": 4.0}


def test_a_metric_says_which_value_is_better_and_how_it_is_printed() -> None:
    distance, near = Metric("distance", is_higher_better=False), Metric("near", ".1%")
    assert distance.is_better(1.0, than=2.0)
    assert distance.record(2.0)["direction"] == "lower is better"
    assert near.is_better(2.0, than=1.0)
    assert near.is_better(1.0, than=1.0), "of two equal ones the newer is the best"
    assert not near.is_better(0.5, than=1.0)
    text = described([distance, near], {"near": 0.97125, "distance": 0.5})
    assert text == "distance 0.5000  near 97.1%"
    assert described([near], {"near": 0.97125}, of="test") == "test near 97.1%"
    assert with_loss(0.5, text) == f"loss 0.5000  {text}"
    for loss, told in ((0.0, "0.0000"), (2e-7, "2e-07"), (3e11, "3e+11")):
        assert with_loss(loss) == f"loss {told}"


COMMON = ["--cpu_only", "--no_config", "--num_workers", "0", "--model", "mlp"]
CASES = {
    told: shlex.split(words.replace("bad:", "tests.bad_tasks:"))
    for told, words in sections(Path(__file__).with_name("bad_input.txt")).items()
}
"""Words of the error, and the command, in which bad: is tests.bad_tasks:."""


def build_each(cases: list[list[str]]) -> list[list[str]]:
    """Put a run of each together, up to its first step; give the error's code, text and fix."""
    found = []
    for words in cases:
        output = io.StringIO()
        try:
            with contextlib.redirect_stderr(output):
                settings = resolve(parse([*COMMON, *words]), world_size=1)
                parts = ddp_training.build(settings, ALONE, None, Events())
                check_evaluation(parts)
                if parts.config.loop.stop_when:
                    check_stop_when(parts)
                parts.close()
            found.append(["", "no error", ""])
        except HardenedError as error:
            found.append([error.code, error.message, error.fix])
        except Exception as error:  # WHY broad: a traceback is what must not be
            found.append(["TRACEBACK", repr(error), ""])
    return found


FIXES = {"'pixels'": "pixels is (", "image_folder": "'{root: /x}'"}
FIXES |= {"fit no task": "--task classification | multilabel"}


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    """What each case ends with. One process for all of them: each takes some milliseconds."""
    [found] = run_ranks(build_each, 1, [*CASES.values()])
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("told", CASES)
def test_each_is_one_error_before_the_first_step(told: str, errors: dict[str, list[str]]) -> None:
    code, message, fix = errors[told]
    assert code.startswith("DDP-"), message
    assert told in message
    assert fix
    for words, wanted in FIXES.items():
        assert words not in told or wanted in fix


def test_a_nan_label_that_only_reading_can_find_is_told_when_its_step_comes(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--num_workers", "0", "--output_dir", str(tmp_path)]
    argv += ["--dataset", "tests.bad_tasks:table", "--task", "regression"]
    argv += ["--dataset_args", "{label: later NaN, test_label: float}"]
    argv += ["--model", "tests.bad_tasks:Model", "--model_args", "{shape: [1]}"]
    done = train([*argv, "--global_batch_size", "4"])
    assert any(done.statuses), done.output
    assert "the model's output is finite, its loss is not: look at the labels" in done.output
    assert "Traceback" not in done.output
