"""One optimizer step, for real: what gradient comes of its samples, however ranks share them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import ddp_training
from hardened_ddp.errors import StepError
from hardened_ddp.ranks.group import open_group
from hardened_ddp.ranks.launch import read_launch
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.reporting.events import Events
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.layers import resolve
from hardened_ddp.step.failure import Failure
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress
from hardened_ddp.step.step import Stepper
from hardened_ddp.training.evaluation import evaluate
from tests.harness.ranks import run_ranks, train
from tests.marks import slow_after
from tests.run_folder import only_run, read_summary

CPU = torch.device("cpu")
# Sums over samples in another order: relative to the largest entry of a gradient.
TOLERANCE = 2e-6
POINTS = ["--dataset", "tests.plugins:points", "--model", "mlp", "--cpu_only"]
POINTS += ["--log_interval", "1"]


def dropout_of(step: int, rank: int) -> list[bool]:
    """Draw as a forward of this step on this rank does."""
    seed_step(7, step=step, rank=rank, device_type="cpu")
    return (torch.rand(64) < 0.5).tolist()


def test_dropout_differs_by_rank_and_step_and_is_the_same_when_a_step_is_retried() -> None:
    drawn = [dropout_of(step, rank) for step in (3, 4) for rank in (0, 1)]
    assert all(one not in drawn[:place] for place, one in enumerate(drawn))
    assert [dropout_of(step, rank) for step in (3, 4) for rank in (0, 1)] == drawn


def parts_of(argv: list[str], *, device: torch.device = CPU) -> Parts:
    launch = read_launch(os.environ)
    settings = resolve(parse(["--cpu_only", *argv]), world_size=launch.world_size)
    shares = settings.config.ddp.shared_memory
    group = open_group(launch, device=device, backend="gloo", timeout_s=30, shared_memory=shares)
    torch.manual_seed(settings.config.device.seed)
    return ddp_training.build(settings, group, None, Events())


def stepper_of(parts: Parts, before_update: Callable[[], None] | None = None) -> Stepper:
    """Make the object that does steps; before_update is called before the weights change."""
    saver = SimpleNamespace(is_copying=before_update is not None, before_update=before_update)
    return Stepper(parts, Progress(), left_out=LeftOut(parts), saver=saver)


def step_gradients(argv: list[str], which: list[int]) -> list[torch.Tensor]:
    """Give the gradient of some steps of epoch 0, all at the initial weights."""
    parts = parts_of(argv)
    found: list[torch.Tensor] = []

    def keep() -> None:
        gradients = [p.grad for p in parts.gradients.local.by_name.values() if p.grad is not None]
        found.append(torch.cat([gradient.flatten() for gradient in gradients]).clone())

    stepper = stepper_of(parts, keep)
    parts.optimizer.step = lambda: None  # type: ignore[assignment]  # the weights stay
    windows = list(parts.train_loader.windows(0, 0))
    for number in which:
        window, batches = windows[number]
        stepper.progress.step = 0
        stepper.train_step(window, batches)
    parts.group.close()
    return found


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def how_summed(flags: list[str]) -> tuple[str, list[str]]:
    """Do a step; say how gradients are summed, and what is called for a forward."""
    parts = parts_of([*POINTS, "--batch_size", "4", *flags])
    called: list[str] = []
    note = lambda module, *_: called.append(type(module).__name__)  # noqa: E731
    parts.gradients.call.register_forward_hook(note)
    stepper_of(parts).train_step(*next(iter(parts.train_loader.windows(0, 0))))
    parts.close()
    parts.group.close()
    return parts.gradients.how, called


@pytest.mark.parametrize(
    ("flags", "how", "called"),
    [
        ([], "summed through shared memory after backward (--no_shared_memory: by DDP)", "MLP"),
        (["--debug"], "summed by DDP during backward", "DistributedDataParallel"),
    ],
    ids=["default", "debug"],
)
def test_with_debug_ranks_on_one_cpu_use_ddp_too(flags: list[str], how: str, called: str) -> None:
    assert run_ranks(how_summed, 2, flags) == [(how, [called])] * 2


@pytest.mark.parametrize(
    "shared",
    slow_after(
        1,
        [
            (3, ["--batch_size", "4"]),
            (3, ["--batch_size", "2", "--accumulation_steps", "2", "--no_shared_memory"]),
            (2, ["--batch_size", "2", "--accumulation_steps", "3", "--continue_on_error"]),
            (2, ["--batch_size", "6", "--continue_on_error", "--no_shared_memory"]),
            (1, ["--batch_size", "4", "--accumulation_steps", "3"]),
        ],
    ),
    ids=str,
)
def test_any_sharing_gives_the_gradient_of_one_big_batch(shared: tuple[int, list[str]]) -> None:
    # 37 samples in steps of 12: the last has 1 sample, so all ranks but one have none.
    data = ["--dataset", "tests.plugins:points", "--dataset_args", "{size: 37}", "--model", "mlp"]
    which = [0, 2, 3]
    [alone] = run_ranks(step_gradients, 1, [*data, "--batch_size", "12"], which)
    world_size, how = shared
    for gradients in run_ranks(step_gradients, world_size, [*data, *how], which):
        for found, expected in zip(gradients, alone, strict=True):
            assert_close(found, expected)


def fail_for_good() -> None:
    """As on a GPU: after this error, each call that needs the device raises it."""
    error = RuntimeError("CUDA error: device-side assert triggered")
    parts = parts_of([*POINTS, "--batch_size", "2"])
    stepper = stepper_of(parts)
    windows = iter(parts.train_loader.windows(0, 0))
    stepper.train_step(*next(windows))
    with (
        mock.patch.object(stepper.gradient, "run", side_effect=error),
        mock.patch.object(parts.replica.buffers, "put_back", side_effect=error),
        pytest.raises(StepError, match=r"rank 0, step 1, .*, samples \[\d+, \d+\]: .*assert"),
    ):
        stepper.train_step(*next(windows))
    assert not stepper.live.is_at_boundary, "its buffers are those of the step that failed"
    stepper.live.is_at_boundary = True
    # Where a forward fails, what is sent for it fails, too: the first error is the one to tell.
    failure = Failure("error", "rank 0, step 1, forward: model.py:7: device-side assert")
    with (
        mock.patch.object(stepper.gradient, "run", return_value=failure),
        mock.patch.object(stepper.gradient, "reduce", side_effect=error),
        pytest.raises(StepError, match=r"forward: model.py:7"),
    ):
        stepper.train_step(*next(windows))
    # What fails after the gradient of a step that was given up has a cause of its own.
    attempt = stepper.compute_gradient(*next(windows))
    attempt.failure = failure
    with (
        mock.patch.object(parts.optimizer, "step", side_effect=RuntimeError("no such schedule")),
        pytest.raises(StepError, match="no such schedule"),
    ):
        stepper.commit(attempt)
    assert not stepper.live.is_at_boundary, "some of the weights may be updated, and others not"
    parts.close()
    parts.group.close()


def test_an_error_after_which_nothing_can_be_undone_names_rank_step_and_samples() -> None:
    run_ranks(fail_for_good, 1)


def test_samples_left_out_leave_the_mean_over_the_others() -> None:
    """Broken samples 3 and 7: the gradient is that of the step without them."""
    broken = [*POINTS, "--dataset_args", "{size: 12, broken: [3, 7]}", "--continue_on_error"]
    [alone] = run_ranks(step_gradients, 1, [*broken, "--batch_size", "12"], [0])
    pair = run_ranks(step_gradients, 2, [*broken, "--batch_size", "6"], [0])
    [expected] = run_ranks(mean_without, 1, (3, 7))
    assert_close(alone[0], expected)
    for gradients in pair:
        assert_close(gradients[0], expected)


def mean_without(left_out: tuple[int, ...]) -> torch.Tensor:
    parts = parts_of([*POINTS, "--dataset_args", "{size: 12}", "--batch_size", "12"])
    kept = [index for index in range(12) if index not in left_out]
    samples = [parts.data.train[index] for index in kept]
    logits = parts.replica.module(torch.stack([point for point, _ in samples]))
    targets = torch.tensor([label for _, label in samples])
    torch.nn.functional.cross_entropy(logits, targets).backward()
    return torch.cat([p.grad.flatten() for p in parts.replica.module.parameters()])


def count_evaluated(argv: list[str]) -> tuple[int, float, float]:
    parts = parts_of(argv)
    evaluation = evaluate(parts, parts.eval_loader)
    parts.group.close()
    return evaluation.num_samples, evaluation.figures["accuracy"], evaluation.figures["loss"]


@pytest.mark.parametrize("world_size", slow_after(1, [3, 4]))
def test_evaluation_counts_every_sample_once(world_size: int) -> None:
    argv = [*POINTS, "--eval_batch_size", "5"]  # the test set has 17 points
    [alone] = run_ranks(count_evaluated, 1, [*POINTS])
    for count, accuracy, loss in run_ranks(count_evaluated, world_size, argv):
        assert count == 17
        assert accuracy == alone[1]
        assert loss == pytest.approx(alone[2], rel=1e-6)


def test_broken_samples_are_named_counted_and_left_out(tmp_path: Path) -> None:
    argv = [*POINTS, "--dataset_args", "{size: 40, broken: [3, 17]}", "--continue_on_error"]
    argv += ["--epochs", "2", "--batch_size", "8", "--output_dir", str(tmp_path)]
    train(argv, 2).ok()
    folder = only_run(tmp_path)
    entries = [json.loads(line) for line in (folder / "skipped_samples.jsonl").open()]
    assert sorted(entry["index"] for entry in entries) == [3, 3, 17, 17]
    assert all("broken file" in entry["error"] for entry in entries)
    assert read_summary(folder)["num_left_out"] == 4


@pytest.mark.slow
def test_more_errors_than_allowed_stop_all_ranks_with_the_reason(tmp_path: Path) -> None:
    argv = [*POINTS, "--dataset_args", "{size: 40, broken: [3, 17]}", "--continue_on_error"]
    argv += ["--max_errors", "1", "--batch_size", "4", "--output_dir", str(tmp_path)]
    finished = train(argv, 2)
    assert finished.statuses == (1, 1)
    assert finished.output.count("more than max_errors 1") == 1
    [skipped] = tmp_path.glob("*/skipped_samples.jsonl")
    assert {json.loads(line)["index"] for line in skipped.open()} == {3, 17}
    assert "Traceback" not in finished.output


def test_a_step_with_nan_is_left_out_under_continue_on_error(tmp_path: Path) -> None:
    argv = [*POINTS, "--model", "tests.plugins:Faulty", "--model_args", "{first: 9}"]
    argv += ["--continue_on_error", "--batch_size", "4", "--epochs", "2", "--rollback_after", "0"]
    finished = train([*argv, "--eval_every", "0", "--output_dir", str(tmp_path)], 2).ok()
    assert "left out the whole step" in finished.output


VARIANTS = [
    "--amp bf16 --gradient_checkpointing --channels_last --num_workers 1 --prefetch_factor 1",
    "--comm_hook bf16 --no_gradient_as_bucket_view --bucket_cap_mb 0.01 --optimizer sgd"
    " --learning_rate 0.05 --lr_schedule linear --warmup_steps 2",
    "--optimizer adam --lr_schedule step --clip_grad_norm 0.5 --augment --label_smoothing 0.1"
    " --drop_last --deterministic",
]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_way_of_training_learns(tmp_path: Path, variant: str) -> None:
    argv = ["--cpu_only", "--epochs", "2", "--batch_size", "16", *variant.split()]
    train([*argv, "--output_dir", str(tmp_path)], 2).ok()
    assert read_summary(only_run(tmp_path))["test_accuracy"] > 0.5
