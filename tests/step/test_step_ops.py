"""Operations and waits of a step in the form of GPUs: the bars, and that the counting counts."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import step_ops
from benchmarks.ops_trace import Trace
from hardened_ddp.gradients.sums import flag_of
from hardened_ddp.task.classification import Classification
from hardened_ddp.task.details import FirstMistakes
from hardened_ddp.task.segmentation import Segmentation
from hardened_ddp.task.tokens import Tokens
from tests.harness.ranks import run_program, train
from tests.task.test_task import batch_of


def test_a_step_dispatches_little_more_than_the_bare_loop_and_waits_for_one_flag(
    tmp_path: Path,
) -> None:
    env = {"OPS_TRACE": str(tmp_path / "seen.json")}
    train([*step_ops.flags_of("mlp"), "--output_dir", tmp_path], 2, env=env).ok()
    seen = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    figures = step_ops.figures_of(seen)
    assert sum(seen["bare"]["operations"].values()) > 50
    for name, (count, places) in figures.items():
        assert count <= step_ops.BARS[name], (name, places)
    assert figures["flags"][0] == figures["evaluation"][0] == 1  # they are seen
    reports = [part["waits"] for part in seen["parts"] if part["kind"] == "report"]
    assert any("tolist" in wait for waits in reports for wait in waits)


@pytest.mark.slow
def test_the_command_prints_each_figure_beside_its_bar() -> None:
    done = run_program(["python", "benchmarks/step_ops.py", "--work", "mlp"], timeout_s=400)
    assert done.stdout.count("PASS") + done.stdout.count("MISS") == len(step_ops.BARS)
    assert done.status == ("MISS" in done.stdout)


def test_a_read_of_what_the_device_computes_is_a_wait_and_of_the_hosts_numbers_is_none() -> None:
    trace = Trace()
    weight, other = torch.ones(3), torch.ones(3)
    trace.add([weight])
    with trace:
        (other * 2).sum().item()
        assert not trace.take()["waits"]
        computed = (weight * other).sum()
        other.add_(computed)  # now this is on the device too
        other.nonzero()
        computed.item()
        found = trace.take()
    kinds = [wait.partition(" ")[0] for wait in found["waits"]]
    assert kinds == ["nonzero", "_local_scalar_dense"]
    assert found["operations"]["aten.mul.Tensor"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_flag_is_up_for_nan_and_inf_and_not_for_large_numbers(dtype: torch.dtype) -> None:
    large = torch.full((100,), torch.finfo(dtype).max / 2, dtype=dtype)
    assert flag_of([large, torch.ones(2, dtype=dtype), torch.empty(0, dtype=dtype)]) == 0.0
    for bad in (float("nan"), float("inf"), -float("inf")):
        broken = large.clone()
        broken[3] = bad
        flag = flag_of([torch.ones(2, dtype=dtype), broken])
        assert (flag.item(), flag.dtype, flag.shape) == (1.0, torch.float32, ())


def test_the_first_pictures_that_are_wrong_are_kept_in_their_order() -> None:
    task = Classification(num_classes=3)
    found = FirstMistakes(task, most=3)
    logits = torch.eye(3)[[0, 1, 2, 0]]  # predictions 0, 1, 2, 0
    all_images = []
    for targets in ([0, 1, 2, 1], [0, 1, 2, 0], [2, 1, 0, 0], [1, 0, 0, 1]):
        images = torch.rand(4, 1, 2, 2)
        all_images.append(images)
        batch = batch_of(images, torch.tensor(targets))
        found.add(batch, task.score(logits, batch))
    larger = batch_of(torch.rand(4, 1, 3, 3), torch.ones(4, dtype=torch.int64))
    found.add(larger, task.score(logits, larger))  # another size: left out
    found.copy()
    first, second, third = found.read()
    assert [m.caption for m in (first, second, third)] == [
        "true 1, predicted 0",
        "true 2, predicted 0",
        "true 0, predicted 2",
    ]
    assert torch.equal(first.image, all_images[0][3])
    assert torch.equal(third.image, all_images[2][2])


def test_pictures_with_a_wrong_pixel_are_kept_and_text_is_not() -> None:
    task = Segmentation(num_classes=2)
    found = FirstMistakes(task)
    logits = torch.zeros(2, 2, 2, 2)
    logits[:, 0] = 1.0  # predicts class 0 everywhere
    targets = torch.zeros(2, 2, 2, dtype=torch.int64)
    targets[1, 0, 0] = 1
    batch = batch_of(torch.rand(2, 3, 2, 2), targets)
    found.add(batch, task.score(logits, batch))
    found.copy()
    [mistake] = found.read()
    assert mistake.caption == "1 of 4 pixels wrong"
    text = FirstMistakes(Tokens())
    words = batch_of(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))
    text.add(words, Tokens().score(torch.rand(2, 3, 5), words))
    assert text.read() == []
