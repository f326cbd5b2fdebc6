"""The gradient is the mean over the labels that count, however ranks share them."""

import importlib
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hardened_ddp.gradients.by_ddp import ByDdp
from hardened_ddp.ranks.group import open_group
from hardened_ddp.ranks.launch import read_launch
from hardened_ddp.step.gradient import Outcome
from tests.harness.ranks import run_ranks
from tests.marks import slow_after
from tests.step.test_steps import parts_of, step_gradients, stepper_of

DATA = ["--dataset", "tests.token_data:sequences", "--model", "tests.token_data:TinyLM"]
TOLERANCES = {False: 1e-6, True: 1e-12}
# Windows of 12 of 40 sequences: the last one has 4, so that with 5 ranks some rank has none.
SIZE, WINDOW = 40, 12


def arguments(double: bool, *more: str) -> list[str]:
    kind = str(double).lower()
    data = [*DATA, "--dataset_args", f"{{size: {SIZE}, silent: [3, 4, 8, 9, 15, 22, 30]}}"]
    return [*data, "--model_args", f"{{double: {kind}}}", "--task", "tokens", *more]


def whole_batch_gradients(argv: list[str], which: list[int], shift: int) -> list[torch.Tensor]:
    """Give the gradients of plain torch: one mean over all labels of a window."""
    parts = parts_of([*argv, "--batch_size", str(WINDOW)])
    order = parts.sampler.order(0)
    found = []
    for number in which:
        first = number * WINDOW
        indices = order.take(first, min(first + WINDOW, SIZE)).tolist()
        samples = [parts.data.train[index] for index in indices]
        ids = torch.stack([sample["ids"] for sample in samples])
        labels = torch.stack([sample["labels"] for sample in samples])
        module = parts.replica.module
        logits = module.head(module.mix(module.embed(ids)).tanh())
        outputs = logits[:, : logits.shape[1] - shift].flatten(0, 1)
        cross_entropy(outputs, labels[:, shift:].flatten()).backward()
        found.append(torch.cat([p.grad.flatten() for p in module.parameters()]).clone())
        module.zero_grad()
    return found


def assert_close(of_ranks: Any, wanted: list[torch.Tensor], double: bool) -> None:
    for gradients in of_ranks:
        for found, expected in zip(gradients, wanted, strict=True):
            assert (found - expected).abs().max() <= TOLERANCES[double] * expected.abs().max()


@pytest.mark.parametrize(
    "shared",
    slow_after(
        2,
        [
            (2, True, ["--batch_size", "3", "--accumulation_steps", "2"]),
            (3, True, ["--batch_size", "2", "--accumulation_steps", "2", "--no_shared_memory"]),
            (1, True, ["--batch_size", "4", "--accumulation_steps", "3"]),
            (2, True, ["--batch_size", "6", "--no_shared_memory", "--step_retry", "off"]),
            (4, False, ["--batch_size", "3", "--continue_on_error"]),
            (3, False, ["--batch_size", "4", "--no_shared_memory", "--find_unused_parameters=on"]),
        ],
    ),
    ids=str,
)
def test_any_sharing_gives_the_mean_of_counted_tokens(shared: tuple[int, bool, list[str]]) -> None:
    world_size, double, how = shared
    which = [0, 1, 3]
    argv = arguments(double)
    [wanted] = run_ranks(whole_batch_gradients, 1, argv, which, 0)
    assert_close(run_ranks(step_gradients, world_size, [*argv, *how], which), wanted, double)


@pytest.mark.parametrize(
    "case",
    slow_after(
        1,
        [
            ("tokens", "loss logits", 1, ["--no_shared_memory"]),
            ("own", "loss logits", 1, ["--no_shared_memory"]),
            ("own", "loss", 0, []),
        ],
    ),
    ids=str,
)
def test_labels_are_counted_as_the_model_uses_them(case: tuple[str, str, int, list[str]]) -> None:
    task, names, shift, how = case
    argv = arguments(True, *how)
    argv[argv.index("tests.token_data:TinyLM")] = "tests.token_data:OwnLM"
    argv[argv.index("{double: true}")] = f"{{double: true, shift: {shift}, names: {names}}}"
    argv[argv.index("tokens")] = task
    [wanted] = run_ranks(whole_batch_gradients, 1, argv, [0, 2], shift)
    # OwnLM's loss in fp64; task own multiplies it in the same precision
    assert_close(run_ranks(step_gradients, 2, [*argv, "--batch_size", "6"], [0, 2]), wanted, True)


def weights_after(argv: list[str], number: int) -> tuple[bool, str, float]:
    """Do one step with AdamW and weight decay, whose window has no label that counts."""
    if "late" in argv:
        importlib.import_module("tests.late_looks")
    parts = parts_of([word for word in argv if word != "late"])
    stepper = stepper_of(parts)
    windows = list(parts.train_loader.windows(0, 0))
    for group in parts.optimizer.param_groups:
        group["weight_decay"] = 0.1
    stepper.train_step(*windows[0])
    stepper.confirm_last_step()
    before = {name: tensor.clone() for name, tensor in parts.replica.module.state_dict().items()}
    for batch in windows[number][1]:
        batch.targets.fill_(-100)
    outcome = stepper.train_step(*windows[number])
    stepper.confirm_last_step()
    now = parts.replica.module.state_dict()
    loss = stepper.read_totals()["loss"]
    parts.group.close()
    assert stepper.progress.step == 2
    return all(torch.equal(before[name], now[name]) for name in now), outcome.value, loss


@pytest.mark.parametrize(
    "how", slow_after(1, [["--no_shared_memory"], [], ["--no_shared_memory", "late"]]), ids=str
)
def test_a_step_without_any_label_that_counts_moves_nothing(how: list[str]) -> None:
    argv = arguments(False, "--batch_size", str(WINDOW // 2), *how)
    for is_same, outcome, loss in run_ranks(weights_after, 2, argv, 1):
        assert is_same
        assert outcome == Outcome.EMPTY.value or "late" in how
        assert 0 < loss < 10


def total_of_counts(dtype: torch.dtype, sent_as: torch.dtype | None) -> tuple[float, int]:
    """Send 5003 and 5004 with the gradients of two ranks; return what each reads, and the sums."""
    launch, cpu = read_launch(os.environ), torch.device("cpu")
    group = open_group(launch, device=cpu, backend="gloo", timeout_s=30, shared_memory=False)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 3).to(dtype))
    sums = ByDdp(ddp, group, sent_as=sent_as, counts=True)
    sums.note_count(5003.0 + group.launch.rank)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
        ddp(torch.ones(2, 4, dtype=dtype)).sum().backward()
        found = float(sums._total_count())
    group.close()
    return found, sent.call_count


SENT = [(torch.float32, None, 1), (torch.float32, torch.float16, 2), (torch.float16, None, 2)]


@pytest.mark.parametrize("types", slow_after(1, SENT), ids=str)
def test_the_count_is_exact_and_costs_no_sum_of_its_own_but_beside_gradients_of_16_bits(
    types: tuple[torch.dtype, torch.dtype | None, int],
) -> None:
    *sent, num_sums = types
    assert run_ranks(total_of_counts, 2, *sent) == [(10007.0, num_sums)] * 2


@pytest.mark.parametrize("how", [["--accumulation_steps", "2"], ["--batch_size", "2"]], ids=str)
def test_metrics_are_of_the_reported_steps(how: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    argmax = torch.Tensor.argmax
    monkeypatch.setattr(torch.Tensor, "argmax", lambda *a, **k: calls.append(a) or argmax(*a, **k))
    parts = parts_of([*arguments(False), "--log_interval", "4", "--batch_size", "6", *how])
    stepper = stepper_of(parts)
    for number, (window, batches) in enumerate(parts.train_loader.windows(0, 0), start=1):
        calls.clear()
        ids = torch.cat([batch.inputs["ids"] for batch in batches])
        labels = torch.cat([batch.targets for batch in batches])
        with torch.no_grad():
            predicted = argmax(parts.replica.module(ids), dim=-1)
        stepper.train_step(window, batches)
        is_reported = number % 4 == 0 or window.stop == SIZE
        assert len(calls) == (len(batches) if is_reported else 0), number
        is_right = (predicted == labels)[labels != -100]
        if is_reported and len(is_right):
            found = stepper.read_totals()["token_accuracy"]
            assert found == pytest.approx(float(is_right.float().mean()))
    stepper.train_step(*next(iter(parts.train_loader.windows(1, 0))))
    assert "token_accuracy" not in stepper.read_totals()  # a stop between two reports
    parts.close()
