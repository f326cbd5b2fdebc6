"""Bad input of tasks, metrics, batches and streams: one clear error each, before the first step."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_training
from hardened_ddp.errors import HardenedError
from hardened_ddp.preflight.probe import check_evaluation
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.reporting.events import Events
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.layers import resolve
from hardened_ddp.training.evaluation import check_stop_when
from tests.harness.ranks import run_ranks, train

Words = tuple[str, ...]


def data(label: str = "class", **more: Any) -> Words:
    return ("--dataset", "tests.bad_tasks:table", *given(label=label, **more))


def stream(kind: str = "", *words: str, **more: Any) -> Words:
    return ("--dataset", "tests.bad_tasks:stream", *given(kind=kind, **more), *words)


def dataset(name: str, *words: str) -> Words:
    return ("--dataset", f"tests.bad_tasks:{name}", *model(2), *words)


def given(**arguments: Any) -> Words:
    return ("--dataset_args", args(**arguments))


def maps(label: str, *shape: int) -> Words:
    return (*data(label, num_classes=3), *task("segmentation"), *model(*shape))


def model(*shape: int, kind: str = "logits") -> Words:
    return ("--model", "tests.bad_tasks:Model", "--model_args", args(shape=shape, kind=kind))


def pairs(**arguments: Any) -> Words:
    return ("--dataset", "tests.data.test_datasets:open_pairs", *given(**arguments))


def unusual(name: str, **arguments: Any) -> Words:
    path = f"tests.preflight.test_odd_models:{name}"
    return (*data(num_classes=2), "--model", path, "--model_args", args(**arguments))


def task(name: str, **more: Any) -> Words:
    return ("--task", name, "--task_args", args(**more))


def wrong(kind: str) -> Words:
    return (*task("tests.bad_tasks:Wrong", kind=kind), *data(num_classes=2))


def collate(name: str) -> Words:
    return (*data(num_classes=2), "--collate", f"tests.bad_tasks:{name}")


def metric(kind: str, *, called: str = "own") -> Words:
    own = {called: {"class": "tests.bad_tasks:Measure", "kind": kind}}
    return ("--metrics", json.dumps(own), *data(num_classes=2))


def args(**given: Any) -> str:
    return json.dumps(given)


COMMON = ("--cpu_only", "--no_config", "--num_workers", "0", "--model", "mlp")
OWN = (*data("text"), "--task", "own")
CONSTANT = ("--lr_schedule", "constant")
TWO = data(num_classes=2)
LATER_NAN = (*data("float", test_label="later NaN"), *task("regression"), *model(1))
TASKS = "tests.task.test_tasks"

CASES: list[tuple[Words, str]] = [
    ((*data("text"), *model(2)), "labels are a list of str, and the model returns no loss"),
    ((*data("binary"), *model(1)), "multilabel and regression alike"),
    ((*data("float"), *model(3)), "(2,) float64, output (2, 3): they fit no task"),
    ((*data("map"), *model(5, 6)), "output (2, 5, 6): they fit no task"),
    (dataset("loader", *CONSTANT), "returned a DataLoader, whose samples are batches"),
    (dataset("no_instance"), "returned the class Table, not an"),
    (("--dataset", "image_folder:/x"), "image_folder:/x: no path follows the name"),
    (dataset("sized", *given(length=-1)), "its length is not known: ValueError"),
    (dataset("sized", *given(classes=2)), "its classes are 2, not a list of names"),
    (data(num_classes=0), "its num_classes is 0"),
    (pairs(size=0), "no training sample"),
    (pairs(num_classes=3, says={"targets": [0, 2, 3, 1]}), "sample 2: its label is 3, and there"),
    (data(inputs="nothing", num_classes=2), "a sample is a NoneType"),
    (data(inputs="named", num_classes=2), "unexpected keyword argument 'pixels'"),
    ((*TWO, *model(kind="not built")), "ValueError: depth must be a multiple of 8 ("),
    ((*TWO, *model(kind="meta")), "has parameters without values: layer.weight, layer.bias"),
    ((*TWO, *model(kind="in a list")), "2 parameters in use, of shape (1, 3) and (1,), that the"),
    ((*TWO, *model(2, kind="a late buffer")), "made or resized what a checkpoint saves: mean"),
    (unusual("Waves", is_lazy=True), "without values: first.weight, first.bias"),
    (unusual("Sparse"), "the gradients of words.weight are sparse"),
    (unusual("wrapped"), "wrapped in DataParallel already"),
    ((*TWO, *model(kind="nothing")), "the model returned a NoneType"),
    ((*data(num_classes=3), *model(2)), "(2, 2) for 2 samples and 3 classes"),
    ((*data("half", num_classes=2), *task("classification")), "of a batch are (2,) float64"),
    ((*data("pair", num_classes=2), *task("classification")), "of a batch are (2, 2) int64"),
    ((*data("NaN"), *task("regression"), *model(1)), "is NaN or infinite"),
    ((*data("float"), *task("regression"), *model(2)), "for labels of (2,) float64; reg"),
    ((*data("text"), *task("regression"), *model(1)), "for labels of a list of str; reg"),
    ((*data("float"), *task("regression", loss="l7"), *model(1)), "has no loss 'l7'"),
    ((*data("two", num_classes=2), *task("multilabel")), "0 or 1, and one is 2"),
    ((*data("pair", num_classes=2), *task("multilabel"), *model(3)), "(2, 3) for labels of (2, 2)"),
    ((*data("token 9"), *task("tokens"), *model(3, 5)), "run from 0 to 9, and there are 5 tok"),
    ((*data(), *task("tokens"), *model(2)), "needs (num_samples, length, voc"),
    (maps("map", 3, 2, 2), "logits of shape (2, 3, 2, 2) for labels of (2, 4, 4)"),
    (maps("map 255", 3, 4, 4), "labels run from 255 to 255, and there are 3 classes"),
    (LATER_NAN, "the test set can't be evaluated, rank 0: the label of sample 5 is NaN"),
    (data(num_classes=2, test_label="at the start"), "test sample 1 can't be read: its label is 5"),
    ((*OWN, *model(kind="no loss")), "a dict with ['logits'], without a loss"),
    ((*OWN, *model(kind="losses")), "a tensor of shape (2,), not a scalar"),
    ((*OWN, *model(kind="detached")), "does not depend on any parameter"),
    ((*OWN, *model(kind="two losses")), "2 losses (loss_g, loss_d), and a step has one"),
    ((*data(), "--task", f"{TASKS}:NoScore"), "is no Task"),
    ((*data(), "--task", f"{TASKS}:Refusing"), "no such table"),
    (wrong("no Score"), "score() returned a Tensor, not a Score"),
    (wrong("not summed"), "loss_sum is not a scalar tensor but a tensor of shape (2,)"),
    (wrong("no metric"), "score() did not return mae"),
    (wrong("raises"), "IndexError: no such column ("),
    (wrong("count of nothing"), "count is a NoneType, not a number"),
    (wrong("negative count"), "count is -2, not a number from 0"),
    ((*TWO, *task("tests.bad_tasks:Undeclared", num_classes=2)), "gives seen, which is not among"),
    (wrong("rows"), "its metric mae is a tensor of shape (2,), not a number"),
    ((*TWO, "--best_metric", "f1"), "best_metric: this task has no metric 'f1'"),
    ((*TWO, "--stop_when", "acuracy"), "stop_when: this task has no metric 'acur"),
    ((*TWO, "--metrics", "{x: nothing}"), "need package.module:Class"),
    ((*TWO, "--metrics", f"{{x: {{class: '{TASKS}:Sum', y: 1}}}}"), "keyword argument 'y'"),
    (metric("raises"), "ValueError: no binary labels"),
    (metric("list"), "compute() did not return a number"),
    (metric("", called="loss"), "metrics: loss is measured by the task"),
    ((*TWO, "--metrics", "{own: tests.bad_tasks:NoMeasure}"), "without update, compute, reset"),
    (collate("drop"), "it returned 1 labels for 2 samples: some are left out"),
    (collate("fail"), "collate failed on samples [0]: KeyError: 'padding' ("),
    (collate("nothing"), "collate failed on samples [0]: TypeError: a sample is a NoneType"),
    (stream("", *CONSTANT, "--drop_last"), "drop_last: which samples of this stream"),
    (stream("iterator", *CONSTANT), "which can be read only once"),
    (stream("too many sizes", *CONSTANT), "3 shards and sizes of 4"),
    (stream("no number", *CONSTANT), "num_shards is '4'; need a whole number"),
    (stream("does not open", *CONSTANT), "No such file: 'shard-0.bin'"),
    (stream("all broken", *CONSTANT), "ValueError: a broken row"),
]


def build_each(cases: list[Words]) -> list[list[str]]:
    """Put a run of each together, up to its first step; give the error's code, text and fix."""
    found = []
    for words in cases:
        output = io.StringIO()
        try:
            with contextlib.redirect_stderr(output):
                settings = resolve(parse([*COMMON, *words]), world_size=1)
                group = Group(Launch(), torch.device("cpu"))
                parts = ddp_training.build(settings, group, None, Events())
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


TOLD = [told for _, told in CASES]
FIXES = {"'pixels'": "pixels is (", "image_folder": "'{root: /x}'"}
FIXES |= dict.fromkeys(("fit no task", "alike"), "--task classification | multilabel")


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    """What each case ends with. One process for all of them: each takes some milliseconds."""
    [found] = run_ranks(build_each, 1, [words for words, _ in CASES])
    return dict(zip(TOLD, found, strict=True))


@pytest.mark.parametrize("told", TOLD)
def test_each_is_one_error_before_the_first_step(told: str, errors: dict[str, list[str]]) -> None:
    code, message, fix = errors[told]
    assert code.startswith("DDP-"), message
    assert told in message
    assert fix
    for words, wanted in FIXES.items():
        assert words not in told or wanted in fix


def test_a_nan_label_that_only_reading_can_find_is_told_when_its_step_comes(tmp_path: Path) -> None:
    words = (*data("later NaN", test_label="float"), *task("regression"), *model(1))
    argv = ["--cpu_only", "--num_workers", "0", "--output_dir", str(tmp_path), *words]
    done = train([*argv, "--global_batch_size", "4"])
    assert any(done.statuses), done.output
    assert "the model's output is finite, its loss is not: look at the labels" in done.output
    assert "Traceback" not in done.output
