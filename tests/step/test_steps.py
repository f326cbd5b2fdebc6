"""One optimizer step, for real: what gradient comes of its samples or of the labels that count."""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_training
from hardened_ddp.errors import StepError
from hardened_ddp.gradients.by_ddp import ByDdp
from hardened_ddp.ranks.group import open_group
from hardened_ddp.ranks.launch import read_launch
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.reporting.events import Events
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.layers import resolve
from hardened_ddp.step.failure import Failure
from hardened_ddp.step.gradient import Outcome
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress
from hardened_ddp.step.step import Stepper
from hardened_ddp.training.evaluation import evaluate
from tests.harness.ranks import run_ranks, train
from tests.marks import slow_after
from tests.ranks.test_shared_sum import rendezvous
from tests.run_folder import find_checkpoints, only_run, read_summary, step_of

CPU = torch.device("cpu")
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


def keeping_gradients(parts: Parts) -> tuple[Stepper, list[torch.Tensor]]:
    """Make a stepper that leaves the weights as they are; and a list, which gets its gradients."""
    found: list[torch.Tensor] = []

    def keep() -> None:
        gradients = [p.grad for p in parts.gradients.local.by_name.values() if p.grad is not None]
        found.append(torch.cat([gradient.flatten() for gradient in gradients]).clone())

    parts.optimizer.step = lambda: None  # type: ignore[assignment]
    return stepper_of(parts, keep), found


def step_gradients(argv: list[str], which: list[int]) -> list[torch.Tensor]:
    """Give the gradient of some steps of epoch 0, all at the initial weights."""
    parts = parts_of(argv)
    stepper, found = keeping_gradients(parts)
    windows = list(parts.train_loader.windows(0, 0))
    for number in which:
        window, batches = windows[number]
        stepper.progress.step = 0
        stepper.train_step(window, batches)
    parts.group.close()
    return found


def assert_close(of_ranks: Any, wanted: list[torch.Tensor], tolerance: float = 2e-6) -> None:
    """Compare gradients of each rank: sums in another order, relative to the largest entry."""
    for gradients in of_ranks:
        for found, expected in zip(gradients, wanted, strict=True):
            assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def how_summed(flags: list[str]) -> tuple[str, list[str]]:
    """Do a step; say how gradients are summed, and what is called for a forward."""
    parts = parts_of([*POINTS, "--batch_size", "4", *flags])
    called: list[str] = []
    parts.gradients.call.register_forward_hook(lambda m, *_: called.append(type(m).__name__))
    stepper_of(parts).train_step(*next(iter(parts.train_loader.windows(0, 0))))
    parts.close()
    parts.group.close()
    return parts.gradients.how, called


SUMS = [([], "summed through shared memory after backward (--no_shared_memory: by DDP)", "MLP")]
SUMS += [(["--debug"], "summed by DDP during backward", "DistributedDataParallel")]


@pytest.mark.parametrize(("flags", "how", "called"), SUMS, ids=["default", "debug"])
def test_with_debug_ranks_on_one_cpu_use_ddp_too(flags: list[str], how: str, called: str) -> None:
    assert run_ranks(how_summed, 2, flags) == [(how, [called])] * 2


SHARED = [
    (3, ["--batch_size", "4"]),
    (3, ["--batch_size", "2", "--accumulation_steps", "2", "--no_shared_memory"]),
    (2, ["--batch_size", "6", "--continue_on_error", "--no_shared_memory"]),
]


@pytest.mark.parametrize("shared", slow_after(1, SHARED), ids=str)
def test_any_sharing_gives_the_gradient_of_one_big_batch(shared: tuple[int, list[str]]) -> None:
    # 37 samples in steps of 12: the last has 1 sample, so all ranks but one have none.
    data = ["--dataset", "tests.plugins:points", "--dataset_args", "{size: 37}", "--model", "mlp"]
    which = [0, 2, 3]
    [alone] = run_ranks(step_gradients, 1, [*data, "--batch_size", "12"], which)
    world_size, how = shared
    assert_close(run_ranks(step_gradients, world_size, [*data, *how], which), alone)


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
    expected = run_ranks(mean_without, 1, (3, 7))
    for world_size, size in ((1, "12"), (2, "6")):
        found = run_ranks(step_gradients, world_size, [*broken, "--batch_size", size], [0])
        assert_close(found, expected)


def mean_without(left_out: tuple[int, ...]) -> torch.Tensor:
    parts = parts_of([*POINTS, "--dataset_args", "{size: 12}", "--batch_size", "12"])
    kept = [index for index in range(12) if index not in left_out]
    points, labels = zip(*(parts.data.train[index] for index in kept), strict=True)
    cross_entropy(parts.replica.module(torch.stack(points)), torch.tensor(labels)).backward()
    return torch.cat([p.grad.flatten() for p in parts.replica.module.parameters()])


def count_evaluated(argv: list[str]) -> tuple[int, float, float]:
    parts = parts_of(argv)
    evaluation = evaluate(parts, parts.eval_loader)
    parts.group.close()
    return evaluation.num_samples, evaluation.figures["accuracy"], evaluation.figures["loss"]


def test_evaluation_counts_every_sample_once() -> None:
    argv = [*POINTS, "--eval_batch_size", "5"]  # the test set has 17 points
    [alone] = run_ranks(count_evaluated, 1, [*POINTS])
    for count, accuracy, loss in run_ranks(count_evaluated, 3, argv):
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
    argv = [*POINTS, "--model", "tests.plugins:Faulty", "--model_args", "{first: 6}"]
    argv += ["--continue_on_error", "--batch_size", "4", "--epochs", "2", "--rollback_after", "0"]
    argv += ["--checkpoint_every_epochs", "1", "--checkpoint_every_steps", "3"]
    finished = train([*argv, "--eval_every", "0", "--output_dir", str(tmp_path)], 2).ok()
    assert "left out the whole step" in finished.output
    # of weights that may be the cause only the last one
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [3, 10]


VARIANTS = [
    "--amp bf16 --gradient_checkpointing --channels_last --num_workers 1 --prefetch_factor 1"
    " --multiprocessing_context fork",  # a worker that imports torch takes 5 s of CPU time
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


DATA = ["--dataset", "tests.token_data:sequences", "--model", "tests.token_data:TinyLM"]
DATA += ["--num_workers", "0"]
# Windows of 12 of 40 sequences: the last one has 4.
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
        ids, labels = (torch.stack([s[name] for s in samples]) for name in ("ids", "labels"))
        module = parts.replica.module
        logits = module.head(module.mix(module.embed(ids)).tanh())
        outputs = logits[:, : logits.shape[1] - shift].flatten(0, 1)
        cross_entropy(outputs, labels[:, shift:].flatten()).backward()
        found.append(torch.cat([p.grad.flatten() for p in module.parameters()]).clone())
        module.zero_grad()
    return found


OF_TOKENS = [
    (2, True, ["--batch_size", "3", "--accumulation_steps", "2"]),
    (3, True, ["--batch_size", "2", "--accumulation_steps", "2", "--no_shared_memory"]),
    (1, True, ["--batch_size", "4", "--accumulation_steps", "3"]),
    (2, True, ["--batch_size", "6", "--no_shared_memory", "--step_retry", "off"]),
    (4, False, ["--batch_size", "3", "--continue_on_error"]),
    (3, False, ["--batch_size", "4", "--no_shared_memory", "--find_unused_parameters=on"]),
]


@pytest.mark.parametrize("shared", slow_after(2, OF_TOKENS), ids=str)
def test_any_sharing_gives_the_mean_of_counted_tokens(shared: tuple[int, bool, list[str]]) -> None:
    world_size, double, how = shared
    which = [0, 1, 3]
    argv = arguments(double)
    [wanted] = run_ranks(whole_batch_gradients, 1, argv, which, 0)
    found = run_ranks(step_gradients, world_size, [*argv, *how], which)
    assert_close(found, wanted, 1e-12 if double else 1e-6)


USES = [(task, "loss logits", 1, ["--no_shared_memory"]) for task in ("tokens", "own")]
USES += [("own", "loss", 0, [])]


@pytest.mark.parametrize("case", slow_after(1, USES), ids=str)
def test_labels_are_counted_as_the_model_uses_them(case: tuple[str, str, int, list[str]]) -> None:
    task, names, shift, how = case
    argv = arguments(True, *how)
    argv[argv.index("tests.token_data:TinyLM")] = "tests.token_data:OwnLM"
    argv[argv.index("{double: true}")] = f"{{double: true, shift: {shift}, names: {names}}}"
    argv[argv.index("tokens")] = task
    [wanted] = run_ranks(whole_batch_gradients, 1, argv, [0, 2], shift)
    # OwnLM's loss in fp64; task own multiplies it in the same precision
    found = run_ranks(step_gradients, 2, [*argv, "--batch_size", "6"], [0, 2])
    assert_close(found, wanted, 1e-12)


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
    group = rendezvous(shared_memory=False)
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
def test_the_count_is_exact_and_costs_no_sum_of_its_own_but_beside_16_bits(types: Any) -> None:
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
