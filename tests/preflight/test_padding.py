"""Padded micro-batches in two parts of similar lengths: less padding, and the same gradient."""

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
from hardened_ddp.preflight.padding import choose_least_padding
from hardened_ddp.preflight.probe import Findings
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.settings.config import Config, ModelConfig
from hardened_ddp.task.task import Task
from hardened_ddp.task.tokens import Tokens
from tests.harness.ranks import run_ranks, train
from tests.marks import slow_after
from tests.run_folder import last_tensors
from tests.step.test_steps import parts_of, stepper_of
from tests.token_data import Ragged, TinyLM, pad

CPU = torch.device("cpu")
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


def gradients(double: bool, how: list[str], cuts: bool) -> list[tuple[list[int], torch.Tensor]]:
    """Give for two steps the lengths that this rank's forwards had, and the gradient."""
    data, *flags = how
    argv = ["--dataset", f"tests.token_data:{data}", "--model", "tests.token_data:TinyLM"]
    argv += ["--model_args", f"{{double: {str(double).lower()}}}", "--task", "tokens"]
    parts = parts_of([*argv, "--batch_size", "8", "--num_workers", "0", *flags])
    assert parts.replica.inputs.least_padding > 0
    parts.replica.inputs = replace(parts.replica.inputs, least_padding=int(cuts))
    found: list[torch.Tensor] = []
    lengths: list[list[int]] = []

    def keep() -> None:
        values = [p.grad for p in parts.gradients.local.by_name.values() if p.grad is not None]
        found.append(torch.cat([gradient.flatten() for gradient in values]).clone())

    def note(module: nn.Module, inputs: Any) -> None:  # Any: of forward
        lengths[-1].append(inputs[0].shape[1])

    parts.replica.module.embed.register_forward_pre_hook(note)  # type: ignore[operator]
    stepper = stepper_of(parts, keep)
    parts.optimizer.step = lambda: None  # type: ignore[assignment]  # the weights stay
    if data == "ragged" and parts.group.launch.rank == 1:  # nothing to cut in the first step
        assert isinstance(parts.data.train, Ragged)
        parts.data.train.uniform |= set(parts.sampler.order(0).take(8, 16).tolist())
    for (window, batches), _ in zip(parts.train_loader.windows(0, 0), range(2), strict=False):
        lengths.append([])
        stepper.train_step(window, batches)
    parts.group.close()
    return list(zip(lengths, found, strict=True))


HOW = [
    ["ragged", "--no_shared_memory"],
    ["ragged"],
    ["ragged_stream"],
    ["ragged", "--find_unused_parameters", "on", "--no_shared_memory"],
    ["ragged", "--continue_on_error"],
]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("how", slow_after(2, HOW), ids=str)
def test_the_gradient_is_that_of_whole_micro_batches(how: list[str], double: bool) -> None:
    [whole, *_] = run_ranks(gradients, 2, double, how, False)
    found = run_ranks(gradients, 2, double, how, True)
    assert [len(lengths) for lengths, _ in whole] == [1, 1]
    for rank, steps in enumerate(found):
        is_uniform = how[0] == "ragged" and rank == 1
        assert [len(lengths) for lengths, _ in steps] == [1 if is_uniform else 2, 2]
        for (lengths, gradient), (_, expected) in zip(steps, whole, strict=True):
            assert sorted(lengths) == lengths
            difference = (gradient - expected).abs().max()
            assert difference <= (1e-12 if double else 1e-6) * expected.abs().max()


class Mixed(TinyLM):
    """What a sample's logits depend on, besides its own tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__(dropout=0.0 if "training" in kind else 0.1)
        self.kind = kind
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
        if self.recurrent is not None:
            hidden = self.recurrent(hidden)[0]
        return self.head(self.drop(self.mix(hidden).tanh()))


class Counting(TinyLM):
    """Its forward counts calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(ids)


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
    model: nn.Module,
    *,
    config: Config | None = None,
    collate: Any = pad,
    saved: dict[str, Any] | None = None,
    task: Task | None = None,
    **found: Any,
) -> int:
    fetcher = Fetcher(Ragged(8), seed=0, collate=collate)
    samples = [fetcher[(0, torch.arange(i, i + 2))] for i in (0, 2)]
    task = task or Tokens()
    task.attach(model, "tokens")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trial = Trial(model, task, Precision("off", CPU), Group(Launch(), CPU))
    config = config or Config()
    least = choose_least_padding(trial, samples, Findings(**found), config=config, saved=saved)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    return least


def test_small_models_need_more_padding_and_a_resumed_run_cuts_as_it_began() -> None:
    assert chosen(TinyLM(dropout=0.3)) > 8 * chosen(TinyLM(dropout=0.3, width=256)) > 0
    assert chosen(Mixed("padding"), saved={"least_padding": 40}) == 40
    assert chosen(TinyLM(), saved={}) == 0  # a checkpoint of a version without


KINDS = ["padding", "end", "samples", "samples in training", "recurrent", "raises"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_cut_where_it_would_change_the_gradient_or_not_pay(kind: str) -> None:
    assert chosen(Mixed("plain")) > 0
    assert chosen(Mixed(kind)) == 0


def test_nothing_is_cut_in_other_cases() -> None:
    assert chosen(TinyLM(), collate=packed) == 0
    assert chosen(Aged(), collate=with_ages) == 0
    assert chosen(TinyLM(), moving_buffers=("norm.running_mean",)) == 0
    assert chosen(TinyLM(), own_tensors=("cache",)) == 0
    assert chosen(Counting()) == 0
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
