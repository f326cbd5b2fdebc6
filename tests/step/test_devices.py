"""Tasks, metrics and steps on a GPU that is pretended: no tensors on two devices, and no waits.

Each is done on the CPU, too, and must give the same numbers. See tests/pretended_gpu.py for what is
found so, and docs/GPU.md for what is not.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch, split
from hardened_ddp.data.batches.checks import Limit
from hardened_ddp.errors import StepError
from hardened_ddp.gradients.sums import LocalGradients, count_on
from hardened_ddp.model.replica import Inputs
from hardened_ddp.ranks.phase import PHASE, Phase
from hardened_ddp.step.gradient import Totals
from hardened_ddp.step.step import Stepper
from hardened_ddp.training.evaluation import evaluate
from tests.marks import slow_after
from tests.pretended_gpu import CPU, GPU, Mix, PretendedGpu
from tests.step.test_steps import parts_of, stepper_of

NUM_STEPS = 3
COMMON = ["--no_shared_memory", "--num_workers", "0", "--batch_size", "4", "--eval_batch_size", "5"]
COMMON += ["--log_interval", f"{NUM_STEPS}", "--amp", "off", "--channels_last", "off"]
HERE = "tests.token_data"
POINTS = ["--dataset", "tests.plugins:points"]
SLOPES = ["--dataset", "tests.token_data:slopes", "--model", "mlp"]
PICTURES = ["--dataset", f"{HERE}:pictures"]
SEQUENCES = ["--dataset", "tests.token_data:sequences"]
OWN_LM = [*SEQUENCES, "--model", "tests.token_data:OwnLM", "--model_args", "{shift: 1}"]
SUM = ["--metrics", "{total: tests.task.test_tasks:Sum}"]
TASKS = {
    "classification": [*POINTS, *SUM, "--model", "mlp"],
    "pictures and top 5": [*PICTURES, "--model", f"{HERE}:net"],
    "multilabel": ["--dataset", f"{HERE}:tagged", "--model", "mlp"],
    "segmentation": ["--dataset", f"{HERE}:maps", "--model", f"{HERE}:pixels"],
    "regression": SLOPES,
    "tokens": [*SEQUENCES, "--task", "tokens", "--model", "tests.token_data:TinyLM"],
    "tokens, shifted by the model": [*OWN_LM, "--task", "tokens"],
    "own, of tokens": [*OWN_LM, "--task", "own"],
    "own, of samples": [*POINTS, "--task", "own", "--model", "tests.plugins:OwnLoss"],
    "own, with a number as count": [*POINTS, "--task", "own", "--model", f"{HERE}:Counting"],
    "a user's": [*SLOPES, "--task", f"{HERE}:Distance"],
}
WAYS = ["--accumulation_steps", "2", "--clip_grad_norm", "0.1", "--optimizer", "sgd"]
TASKS["tokens, in other ways"] = [*TASKS["tokens"], *WAYS]
MORE = ("tokens, shifted by the model", "own, of tokens", "own, of samples")
MORE += ("tokens, in other ways",)


def trained(
    device: torch.device, argv: list[str], gpu: PretendedGpu | None = None
) -> tuple[dict[str, Any], list[list[str]]]:
    """Train some steps and evaluate; return all figures, and the waits of each step."""
    gpu = gpu or PretendedGpu()  # one that nobody uses
    parts = parts_of([*COMMON, *argv], device=device)
    stepper = stepper_of(parts)
    windows = list(parts.train_loader.windows(0, 0))[:NUM_STEPS]
    waits = []
    for window, batches in windows:
        gpu.waits.clear()
        stepper.train_step(window, batches)
        waits.append([*gpu.waits])
    totals = stepper.read_totals()
    figures: dict[str, Any] = {f"train {name}": value for name, value in totals.items()}
    figures["weights"] = {name: p.tolist() for name, p in parts.gradients.local.by_name.items()}
    gpu.waits.clear()
    found = evaluate(parts, parts.eval_loader)
    waits.append([*gpu.waits])
    figures |= found.figures
    task = parts.task
    task.in_detail = True
    with torch.no_grad():
        batch = parts.eval_loader.first_samples().to(parts.device)
        totals = Totals(task, parts.device)
        output = task.forward(parts.replica.module, batch)
        totals.add(task.score(output, batch), batch.num_samples)
    figures["report"] = task.report(*totals.gather(parts.group))
    parts.close()
    parts.group.close()
    return figures, waits


def on_gpu(argv: list[str]) -> tuple[dict[str, Any], list[list[str]]]:
    with PretendedGpu().on() as gpu:
        return trained(GPU, argv, gpu)


@pytest.mark.filterwarnings("error:Converting a tensor")
@pytest.mark.parametrize("task", slow_after(6, sorted(TASKS, key=MORE.__contains__)))
def test_a_task_trains_and_is_measured_on_a_gpu_as_on_the_cpu(task: str) -> None:
    expected, _ = trained(CPU, TASKS[task])
    found, (*steps, evaluation) = on_gpu(TASKS[task])
    assert found == expected
    # Each step waits at most for the flag of the one before; the last, which is reported, for its
    # own. A task may keep a few numbers on the device: they are sent once.
    steps[0] = [wait for wait in steps[0] if not wait.startswith("to at hardened_ddp/task/")]
    for number, step in enumerate(steps, start=1):
        assert len(step) <= (2 if number == NUM_STEPS else 1), step
        assert all(wait.startswith("event at hardened_ddp/step/async_device.py") for wait in step)
    assert len(evaluation) == 1 + ("--metrics" in TASKS[task]), evaluation


def wrong(kind: str, samples: list[int]) -> list[str]:
    """Give the flags of a run in which samples have a number out of range."""
    of, task = ("maps", "segmentation") if "pixels" in kind else ("sequences", "tokens")
    given = f"{{of: {of}, {kind.split()[0]}: {samples}}}"
    return [*TASKS[task], "--dataset_args", given, "--dataset", f"{HERE}:wrong"]


@pytest.mark.parametrize("kind", slow_after(1, ["ids", "labels", "labels of pixels"]))
def test_a_number_out_of_range_is_left_out_by_name_on_a_gpu_as_on_the_cpu(kind: str) -> None:
    parts = parts_of([*COMMON, *wrong(kind, [])])
    order = parts.sampler.next_ids(0, 0) + parts.sampler.next_ids(0, 4)
    parts.close()
    argv = wrong(kind, order[-2:])  # the first ones are those of the trial
    expected, _ = trained(CPU, [*argv, "--continue_on_error"])
    found, _ = on_gpu([*argv, "--continue_on_error"])
    assert found == expected
    with pytest.raises(StepError, match=rf"sample {order[-2]}\b.* 60000"):
        on_gpu(argv)


def test_labels_that_are_shares_of_the_classes_are_no_numbers_out_of_range() -> None:
    limit = Limit(None, 3, "the task", -100)
    mixed = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]])
    limit.check(Batch(torch.ones(2, 4), mixed, torch.arange(2)))
    with pytest.raises(IndexError, match=r"sample 1 has the number 3, .* 0 to 2"):
        limit.check(Batch(torch.ones(3, 4), torch.tensor([-100, 3, 2]), torch.arange(3)))
    with pytest.raises(IndexError, match="number -1"):
        limit.check(Batch(torch.ones(1, 4), torch.tensor([-1]), torch.arange(1)))


def test_smaller_parts_of_a_batch_are_sent_without_a_wait() -> None:
    # After an out of memory.
    with PretendedGpu().on() as gpu:
        batch = Batch(torch.ones(4, 2), {"labels": torch.ones(4)}, torch.arange(4))
        batch.pin()
        for part in split([batch], 2):
            part.to(GPU)
        assert not gpu.waits


@contextlib.contextmanager
def stepper_on_gpu() -> Iterator[tuple[PretendedGpu, Stepper, Any]]:
    """Give the device, what does steps on it, and the steps of an epoch."""
    with PretendedGpu().on() as gpu:
        parts = parts_of([*COMMON, *TASKS["pictures and top 5"]], device=GPU)
        yield gpu, stepper_of(parts), parts.train_loader.windows(0, 0)
        parts.close()
        parts.group.close()


def test_a_batch_is_sent_to_the_device_in_the_phase_of_forward() -> None:
    # There it may wait, behind a full launch queue: and that is no waiting for data.
    phases: list[int] = []
    send = Inputs.send
    with stepper_on_gpu() as (_, stepper, windows):

        def noted(*given: Any) -> Batch:
            phases.append(stepper.parts.group.tracker.words[PHASE])
            return send(*given)

        with mock.patch.object(Inputs, "send", noted):
            stepper.train_step(*next(windows))
    assert phases == [Phase.FORWARD]


def test_no_backward_is_queued_before_the_last_step_is_known_to_be_good() -> None:
    # Behind an all-reduce that never ends, it would fill the launch queue: no thread could copy.
    done: list[str] = []
    backward = torch.Tensor.backward

    def noting(word: str, act: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            done.append(word)
            return act(*given, **named)

        return noted

    with stepper_on_gpu() as (gpu, stepper, windows), contextlib.ExitStack() as stack:
        stepper.parts.replica.module.register_forward_hook(noting("forward"))
        noted = noting("backward", backward)
        stack.enter_context(mock.patch.object(torch.Tensor, "backward", noted))
        stack.enter_context(mock.patch.object(gpu, "wait", side_effect=noting("wait")))
        for window, batches in itertools.islice(windows, NUM_STEPS - 1):
            stepper.train_step(window, batches)
    _, first, *others = " ".join(done).split("forward")
    assert set(first.split()) == {"backward"}
    assert others
    for words in others:
        assert words.split()[0] == "wait"
        assert set(words.split()[1:]) == {"backward"}


def test_a_rank_that_waits_for_its_device_between_steps_says_that_it_waits_for_others() -> None:
    phases: list[int] = []
    with stepper_on_gpu() as (gpu, stepper, windows):
        stepper.train_step(*next(windows))
        words = stepper.parts.group.tracker.words
        with mock.patch.object(gpu, "wait", side_effect=lambda _: phases.append(words[PHASE])):
            assert stepper.is_finite()
            stepper.read_totals()
    assert len(phases) > 2
    assert set(phases) == {Phase.ALL_REDUCE}, "a hang of another rank would be told as one of this"


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor(3.0)], ids=repr)
def test_a_count_that_is_a_number_of_the_host_is_sent_without_a_wait(count: Any) -> None:
    with PretendedGpu().on() as gpu:
        for given in (count, torch.full((), 3, device=GPU)):
            found = count_on(GPU, given)
            assert (found.device, found.dtype, found.shape) == (GPU, torch.float64, ())
        assert not gpu.waits
        assert found.item() == 3.0


@pytest.mark.parametrize(
    ("waits", "act"),
    [
        (0, lambda here, host: here + torch.tensor(2.0)),
        (0, lambda here, host: torch.where(here > 0, 1.0, here)),
        (0, lambda here, host: here.copy_(host.pin_memory(), non_blocking=True)),
        (0, lambda here, host: host.pin_memory()[:2].to(here.device, non_blocking=True)),
        (0, lambda here, host: torch.empty(3, pin_memory=True).copy_(here, non_blocking=True)),
        (0, lambda here, host: here.to("cpu", non_blocking=True)),
        (0, lambda here, host: torch.full((), 3.0, device=here.device)),
        (1, lambda here, host: torch.empty(3).copy_(here, non_blocking=True)),
        (1, lambda here, host: here.copy_(host)),
        (1, lambda here, host: here.copy_(host, non_blocking=True)),
        (1, lambda here, host: host.to(here.device, non_blocking=True)),
        (1, lambda here, host: torch.as_tensor(3.0, device=here.device)),
        (1, lambda here, host: torch.where(host[0] > 0, here, here)),
        (1, lambda here, host: here[torch.tensor([0, 2])]),
        (1, lambda here, host: here[here > 0]),
        (1, lambda here, host: here.cpu()),
        (1, lambda here, host: here.tolist()),
        (1, lambda here, host: bool(here.sum() > 0)),
    ],
)
def test_the_rules_are_those_of_a_gpu(waits: int, act: Callable[..., Any]) -> None:
    host = torch.ones(3)
    with PretendedGpu().on() as gpu:
        here = torch.ones(3, device=GPU)
        assert (here.device, here.is_cuda, host.device) == (GPU, True, CPU)
        act(here, host)
        assert len(gpu.waits) == waits
        for mix in (lambda: here + host, lambda: torch.cat([here, host]), lambda: here @ host):
            with pytest.raises(Mix):
                mix()


def test_gradients_of_one_type_are_multiplied_by_one_kernel() -> None:
    # CUDA has one for all of them only if the factor is of their type.
    model = nn.Linear(3, 2)
    factor = torch.tensor(0.5, dtype=torch.float64)
    with mock.patch("torch._foreach_mul_") as multiply:
        for dtypes in ([torch.float32, torch.float32], [torch.float32, torch.float64]):
            gradients = LocalGradients(model)
            for parameter, dtype in zip(model.parameters(), dtypes, strict=True):
                parameter.data = parameter.data.to(dtype)
                parameter.grad = torch.ones_like(parameter)
            gradients.scale(factor)
    kinds = [call.args[1].dtype for call in multiply.call_args_list]
    assert kinds == [torch.float32, torch.float64]
