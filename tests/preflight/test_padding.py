"""What a trial finds to be quicker: padded micro-batches in two parts, and channels last.

Two parts of similar lengths have less padding, and the same gradient.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch, cut_by_length
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.model.precision import Precision
from hardened_ddp.model.replica import NO_COLLECTIVES, ForwardCollectives
from hardened_ddp.preflight import memory_format
from hardened_ddp.preflight.memory_format import choose_channels_last, pays
from hardened_ddp.preflight.padding import choose_least_padding
from hardened_ddp.preflight.probe import Findings
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.settings.config import Config, DataConfig, ModelConfig
from hardened_ddp.task.classification import Classification
from hardened_ddp.task.task import Task
from hardened_ddp.task.tokens import Tokens
from tests.harness.ranks import run_ranks, train
from tests.marks import slow_after
from tests.run_folder import last_tensors
from tests.step.test_steps import keeping_gradients, parts_of
from tests.token_data import Ragged, TinyLM, pad

CPU = torch.device("cpu")
PLAIN, ALONE = Config(), Group(Launch(), CPU)
HERE = ("all_reduce in mine.py:1",)


def of_lengths(*lengths: int, pad_to: int = 0) -> Batch:
    width = max(*lengths, pad_to)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        ids[row, :length], labels[row, :length] = torch.arange(1, length + 1), row
    mask = torch.ones(len(lengths), 1)  # another shape: its rows are taken as they are
    return Batch({"ids": ids, "mask": mask}, labels, torch.arange(10, 10 + len(lengths)))


@pytest.mark.parametrize(
    ("batch", "least", "expected"),
    [
        (of_lengths(9, 2, 9, 2, 9, 2, 9, 2), 27, [([1, 3, 5, 7], 2), ([0, 2, 4, 6], 9)]),
        (of_lengths(9, 2, 9, 2, 9, 2, 9, 2), 28, None),  # 4 x 7 places
        (of_lengths(2, 2, 2, 90), 1, [([0, 1, 2], 2), ([3], 90)]),
        (of_lengths(5, 5, 5, 5), 0, None),
        (of_lengths(9, 8, 9, 8), 0, [([1, 3], 8), ([0, 2], 9)]),
        (of_lengths(9, 8, 9, 8), 1, None),  # saves 5 %
        (of_lengths(5, 4, 5, 4, pad_to=16), 1, [([1, 3], 4), ([0, 2], 5)]),
        (replace(of_lengths(2, 9), indices=torch.arange(3)), 0, None),  # packed into two rows
    ],
)
def test_a_batch_is_cut_where_most_padding_is_left_out(
    batch: Batch, least: int, expected: list[tuple[list[int], int]] | None
) -> None:
    parts = cut_by_length(batch, -100, least)
    if expected is None:
        assert parts == [batch]
        return
    found = [(part.indices.sub(10).tolist(), part.targets.shape[1]) for part in parts]
    assert found == expected
    for part, (rows, width) in zip(parts, expected, strict=True):
        assert torch.equal(part.inputs["ids"], batch.inputs["ids"][rows, :width])
        assert torch.equal(part.targets, batch.targets[rows, :width])
        assert len(part.inputs["mask"]) == len(rows)


def test_an_input_without_a_label_is_no_padding() -> None:
    batch = of_lengths(9, 3, 9, 3)
    batch.targets[0, 4:] = -100
    short, long = cut_by_length(batch, -100, 0)
    assert (short.targets.shape, long.targets.shape) == ((2, 3), (2, 9))


def gradients(how: list[str], cuts: bool) -> list[tuple[list[int], torch.Tensor]]:
    """Give for two steps the lengths that this rank's forwards had, and the gradient."""
    data, *flags = how
    argv = ["--dataset", f"tests.token_data:{data}", "--model", "tests.token_data:TinyLM"]
    argv += ["--model_args", "{double: true}", "--task", "tokens"]
    parts = parts_of([*argv, "--batch_size", "8", "--num_workers", "0", *flags])
    assert parts.replica.inputs.least_padding > 0
    parts.replica.inputs = replace(parts.replica.inputs, least_padding=int(cuts))
    stepper, found = keeping_gradients(parts)
    lengths: list[list[int]] = []

    def note(module: nn.Module, inputs: Any) -> None:  # Any: of forward
        lengths[-1].append(inputs[0].shape[1])

    parts.replica.module.embed.register_forward_pre_hook(note)  # type: ignore[operator]
    if data == "ragged" and parts.group.launch.rank == 1:  # nothing to cut in the first step
        assert isinstance(parts.data.train, Ragged)
        parts.data.train.uniform |= set(parts.sampler.order(0).take(8, 16).tolist())
    for (window, batches), _ in zip(parts.train_loader.windows(0, 0), range(2), strict=False):
        lengths.append([])
        stepper.train_step(window, batches)
    parts.group.close()
    return list(zip(lengths, found, strict=True))


HOW = [["ragged", "--no_shared_memory"], ["ragged"], ["ragged_stream"]]
HOW += [["ragged", "--find_unused_parameters", "on", "--no_shared_memory"]]
HOW += [["ragged", "--continue_on_error"]]


@pytest.mark.parametrize("how", slow_after(2, HOW), ids=str)
def test_the_gradient_is_that_of_whole_micro_batches(how: list[str]) -> None:
    [whole, *_] = run_ranks(gradients, 2, how, False)
    found = run_ranks(gradients, 2, how, True)
    assert [len(lengths) for lengths, _ in whole] == [1, 1]
    for rank, steps in enumerate(found):
        is_uniform = how[0] == "ragged" and rank == 1
        assert [len(lengths) for lengths, _ in steps] == [1 if is_uniform else 2, 2]
        for (lengths, gradient), (_, expected) in zip(steps, whole, strict=True):
            assert sorted(lengths) == lengths
            assert (gradient - expected).abs().max() <= 1e-12 * expected.abs().max()


class Mixed(TinyLM):
    """What a sample's logits depend on, besides its own tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__(dropout=0.0 if "training" in kind else 0.1)
        self.kind = kind
        if kind == "counts calls":
            self.num_calls = 0
        self.recurrent = nn.GRU(8, 8, batch_first=True) if kind == "recurrent" else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        if self.kind == "padding":
            hidden = hidden + hidden.mean(dim=1, keepdim=True)
        if self.kind == "end":
            hidden = hidden + hidden[:, -1:]
        if self.kind == "samples" or (self.kind == "samples in training" and self.training):
            hidden = hidden - hidden.mean(dim=0, keepdim=True)
        if self.kind == "raises" and len(ids) == 1:
            raise ValueError("one sample is no batch")
        if self.kind == "counts calls":
            self.num_calls += 1
        if self.recurrent is not None:
            hidden = self.recurrent(hidden)[0]
        return self.head(self.drop(self.mix(hidden).tanh()))


def packed(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([s[name] for s in samples])[None] for name in ("ids", "labels")}


def with_ages(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Add numbers of each sample: of a batch whose length is theirs, they would have its shape."""
    return {**pad(samples), "ages": torch.zeros(len(samples), 16)}


class Aged(TinyLM):
    """Takes numbers of each sample, too."""

    def forward(self, ids: torch.Tensor, ages: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)


def chosen(
    model: nn.Module, config: Config = PLAIN, collate: Any = pad, saved: Any = None, **found: Any
) -> int:
    fetcher = Fetcher(Ragged(8), seed=0, collate=collate)
    samples = [fetcher[(0, torch.arange(i, i + 2))] for i in (0, 2)]
    task = found.pop("task", Tokens())
    task.attach(model, "tokens")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trial = Trial(model, task, Precision("off", CPU), ALONE)
    least = choose_least_padding(trial, samples, Findings(**found), config=config, saved=saved)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    return least


def test_small_models_need_more_padding_and_a_resumed_run_cuts_as_it_began() -> None:
    assert chosen(TinyLM(dropout=0.3)) > 8 * chosen(TinyLM(dropout=0.3, width=256)) > 0
    assert chosen(Mixed("padding"), saved={"least_padding": 40}) == 40
    assert chosen(TinyLM(), saved={}) == 0  # a checkpoint of a version without


KINDS = ["padding", "end", "samples", "samples in training", "recurrent", "raises", "counts calls"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_cut_where_it_would_change_the_gradient_or_not_pay(kind: str) -> None:
    assert chosen(Mixed("plain")) > 0
    assert chosen(Mixed(kind)) == 0


def test_nothing_is_cut_in_other_cases() -> None:
    assert chosen(TinyLM(), collate=packed) == 0
    assert chosen(Aged(), collate=with_ages) == 0
    assert chosen(TinyLM(), moving_buffers=("norm.running_mean",)) == 0
    assert chosen(TinyLM(), own_tensors=("cache",)) == 0
    for calls in (ForwardCollectives(HERE), ForwardCollectives(in_evaluation=HERE)):
        assert chosen(TinyLM(), collectives=calls) == 0
    assert chosen(TinyLM(), collectives=NO_COLLECTIVES, task=Task()) == 0
    assert chosen(TinyLM(), config=Config(model=ModelConfig(compile=True))) == 0


@pytest.mark.slow
def test_a_run_in_two_parts_cut_and_retried_ends_with_the_same_weights(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--num_workers", "0", "--epochs", "4", "--checkpoint_every_steps", "0"]
    argv += ["--dataset", "tests.token_data:ragged", "--task", "tokens", "--run_name", "run"]
    argv += ["--global_batch_size", "16", "--lr_schedule", "constant"]
    argv += ["--model", "tests.token_data:FailingLM", "--model_args"]
    fails = ["{forward_number: 9, how: raise, width: 512}", "--output_dir", str(tmp_path / "cut")]
    first = train([*argv, *fails, "--max_steps", "7"], 2).ok()
    assert "in two parts" in first.outputs[0]
    assert "retrying step" in first.outputs[0]
    halfway = last_tensors(tmp_path / "cut")
    train([*argv, *fails, "--max_steps", "15"], 2).ok()
    whole = ["{width: 512}", "--output_dir", str(tmp_path / "whole"), "--max_steps", "15"]
    train([*argv, *whole], 2).ok()
    assert halfway != last_tensors(tmp_path / "cut") == last_tensors(tmp_path / "whole")


class Net(nn.Module):
    """A convolution with a BatchNorm. needs: what needs the usual order of memory."""

    def __init__(self, kernel: int = 3, needs: str = "") -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, kernel, padding=kernel // 2), nn.BatchNorm2d(4)
        self.head, self.needs = nn.Linear(4 * 36, 3), needs

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.needs == "random":  # nobody can tell
            images = images + torch.randn_like(images)
        features = self.norm(self.conv(images))
        if self.needs == "strides":  # turned images, as in the usual order
            features = features.as_strided(features.shape, (144, 36, 1, 6))
        uses_view = self.needs == "view" or (self.needs == "view in training" and self.training)
        flat = features.view(len(images), -1) if uses_view else features.flatten(1)
        return self.head(flat)


def choose(
    model: nn.Module, config: Config = PLAIN, began_with: Any = None, group: Group = ALONE
) -> bool:
    batch = Batch(torch.randn(2, 3, 6, 6), torch.tensor([0, 2]), torch.arange(2))
    random = torch.get_rng_state()
    trial = Trial(model, Classification(num_classes=3), Precision("off", CPU), group)
    found = choose_channels_last(trial, batch, config=config, began_with=began_with)
    assert torch.equal(torch.get_rng_state(), random)
    return found


# A sample is 3 x 36 values before the convolution and 4 x 36 after it: 252.
# A kernel of 3 x 3 has 3 * 4 * 9 = 108 weights, one of 11 x 11 has 1,452, one of 1 x 1 none.
@pytest.mark.parametrize(
    ("kernel", "batch_size", "is_faster"), [(3, 1, True), (11, 5, False), (11, 6, True)]
)
def test_values_of_images_decide_against_weights_of_kernels_and_the_trial_leaves_no_trace(
    kernel: int, batch_size: int, is_faster: bool
) -> None:
    model = Net(kernel=kernel)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert choose(model, Config(data=DataConfig(batch_size=batch_size))) == is_faster
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last) == is_faster
    assert model.conv.weight.is_contiguous() != is_faster
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.conv._forward_hooks


def test_on_a_gpu_it_goes_with_16_bits() -> None:
    group = Group(Launch(), CPU)
    group.device = torch.device("cuda")
    for num_values, amp, is_faster in ((1, "bf16", True), (1, "off", False), (0, "bf16", False)):
        trial = Trial(Net(), Classification(num_classes=3), Precision(amp, CPU), group)
        assert pays(trial, 9, num_values) == is_faster


def test_one_rank_where_it_is_slower_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [{"found": [True]}, {"found": [[10**9, 1]]}]
    monkeypatch.setattr(Group, "gather_json", lambda group, mine: [mine, others.pop(0)])
    group = Group(Launch(), CPU)
    group.world_size = 2
    assert not choose(Net(), group=group)
    assert not others  # nothing else decided it


@pytest.mark.parametrize("asked", [True, False])
def test_what_was_asked_for_is_not_tried(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    monkeypatch.setattr(memory_format, "pays", lambda trial, *numbers: not asked)
    assert choose(Net(), Config(model=ModelConfig(channels_last=asked))) == asked
    assert choose(Net(), began_with=asked) == asked


def test_without_images_or_when_compiled_or_needed_the_usual_order_stays() -> None:
    assert not choose(nn.Sequential(nn.Flatten(), nn.Linear(108, 3)))
    assert not choose(Net(), Config(model=ModelConfig(compile=True)))
    for needs in ("view", "view in training", "strides", "random"):
        assert not choose(model := Net(needs=needs))
        assert model.conv.weight.is_contiguous()


def test_a_rank_calls_the_model_as_often_until_all_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    # WHY: in a model with collectives, ranks that find otherwise would wait for each other.
    calls: list[object] = []
    agreed_after: list[int] = []

    def gather(group: Group, mine: object) -> list[object]:
        agreed_after.append(len(calls))
        return [mine]

    monkeypatch.setattr(Group, "gather_json", gather)
    for model in (Net(), Net(needs="strides"), Net(needs="random")):
        calls.clear()
        model.register_forward_hook(lambda *call: calls.append(call))
        choose(model)
    assert agreed_after == [2, 3, 2, 2]
