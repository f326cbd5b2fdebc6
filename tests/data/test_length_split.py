"""Micro-batches in two parts of similar lengths: less padding, and the same step."""

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from hardened_ddp.data.batches.batch import Batch, apart, take
from hardened_ddp.data.batches.checks import Checks
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.length_split import LengthSplit
from hardened_ddp.data.batches.loader import TrainLoader
from hardened_ddp.data.batches.sampler import WindowSampler
from hardened_ddp.model.precision import Precision
from hardened_ddp.model.replica import NO_COLLECTIVES, ForwardCollectives
from hardened_ddp.preflight.padding import choose_split
from hardened_ddp.preflight.probe import Findings
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.settings.config import Config, DataConfig, DdpConfig, ModelConfig
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.progress import Progress
from hardened_ddp.step.step import Stepper
from hardened_ddp.task.task import Task
from hardened_ddp.task.tokens import Tokens
from hardened_ddp.training import start_summary
from hardened_ddp.training.state import collect_meta
from tests.data.scripted import make_stream, read
from tests.harness.marks import slow_after
from tests.harness.ranks import run_ranks
from tests.step.test_steps import parts_of
from tests.token_data import Ragged, TinyLM, pad

CPU = torch.device("cpu")
HERE = ("all_reduce in mine.py:1",)
ALWAYS = LengthSplit(least_values=0)
TOLERANCES = {False: 1e-6, True: 1e-12}


def of_lengths(*lengths: int) -> list[Any]:
    return [(torch.zeros(length), torch.zeros(length)) for length in lengths]


@pytest.mark.parametrize(
    ("samples", "least", "expected"),
    [
        (of_lengths(9, 2, 9, 2, 9, 2, 9, 2), 0, ([1, 3, 5, 7], [0, 2, 4, 6])),
        (of_lengths(9, 2, 9, 2, 9, 2, 9, 2), 56, ([1, 3, 5, 7], [0, 2, 4, 6])),
        (of_lengths(9, 2, 9, 2, 9, 2, 9, 2), 57, None),  # 4 x 7 positions, each with two values
        (of_lengths(2, 2, 2, 90, 2, 2, 2, 2), 0, ([0, 1, 2, 4, 5, 6], [3, 7])),  # never one alone
        (of_lengths(9, 2, 9, 2, 9, 2, 9), 0, None),  # too few
        (of_lengths(*[5] * 8), 0, None),
        (of_lengths(*[9, 8] * 4), 0, None),  # saves 5 %
        ([{"input_ids": [7] * n, "label": 1} for n in (3, 9) * 4], 0, ([0, 2, 4, 6], [1, 3, 5, 7])),
        ([torch.zeros(3, n).numpy() for n in (9, 3) * 4], 0, ([1, 3, 5, 7], [0, 2, 4, 6])),
        ([torch.zeros(3, 4), torch.zeros(3)] * 4, 0, None),  # nothing to compare
        ([("a word", n) for n in range(8)], 0, None),
    ],
)
def test_where_a_micro_batch_is_cut_follows_from_its_shapes(
    samples: list[Any], least: int, expected: tuple[list[int], list[int]] | None
) -> None:
    assert LengthSplit(least).places(samples) == expected


class Faulty(Ragged):
    """Sample 5 can't be read, 7 has a label that is none."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 5:
            raise ValueError("broken")
        sample = super().__getitem__(index)
        return {**sample, "weight": sample["ids"] / (0.0 if index == 7 else 1.0)}

    @staticmethod
    def collate_fn(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        weights = [sample["weight"] for sample in samples]
        return {**pad(samples), "weight": pad_sequence(weights, batch_first=True)}


def loader_of(dataset: Ragged, num_workers: int = 0, **how: Any) -> TrainLoader:
    sampler = WindowSampler(dataset, num_replicas=1, rank=0, seed=1, global_batch=16, batch_size=16)
    stream = make_stream(dataset, num_workers, checks=Checks(inputs=True), **how)
    stream.fetcher.collate = dataset.collate_fn
    loader = TrainLoader(sampler, stream)
    loader.split_by_length(ALWAYS)
    return loader


def described(batches: list[Batch]) -> list[tuple[Any, ...]]:
    return [
        (b.indices.tolist(), b.inputs["ids"].tolist(), b.targets.tolist(), b.bad) for b in batches
    ]


@pytest.mark.parametrize("shares", [True, False])
def test_workers_cut_as_the_rank_itself_does(shares: bool) -> None:
    here = read(loader_of(Faulty(40)))
    loader = loader_of(Faulty(40), 2)
    fetcher = pickle.loads(pickle.dumps(loader.reader.fetcher))  # as spawned workers get it
    assert fetcher.split == ALWAYS
    fallback = loader.reader.fallback
    fallback.level = replace(fallback.level, shares_memory=shares)
    found = read(loader)
    assert loader.reader.num_workers == 2  # no answer was refused
    loader.close()
    assert described(found) == described(here)
    assert [len(batch.indices) for batch in here] != [16, 16, 8]
    assert sum(batch.num_samples for batch in here) == 38
    assert sorted(bad.index for batch in here for bad in batch.bad) == [5, 7]
    widths = [batch.inputs["ids"].shape[1] for batch in here]
    assert widths[0] < widths[1]


def test_samples_that_the_collate_cannot_take_cost_themselves_only() -> None:
    def refuse_long(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if any(len(sample["ids"]) > 38 for sample in samples):
            raise ValueError("too long")
        return pad(samples)

    dataset = Ragged(40)
    by_length = sorted(range(40), key=lambda i: len(dataset[i]["ids"]))
    request, too_long = torch.tensor([*by_length[:10], *by_length[-2:]]), set(by_length[-2:])
    assert ALWAYS.places([dataset[int(i)] for i in request]) == (list(range(10)), [10, 11])
    fetcher = Fetcher(dataset, seed=0, collate=refuse_long)
    fetcher.split = ALWAYS
    [batch] = apart([fetcher[(0, request)]])
    assert {bad.index for bad in batch.bad} == too_long
    assert batch.indices.tolist() == by_length[:10]


def test_a_part_of_a_batch_that_was_cut_is_one_batch() -> None:
    for batch in read(loader_of(Ragged(40))):
        part = take(batch, range(batch.num_samples))
        assert apart([part]) == [part]
        assert torch.equal(part.inputs["ids"], batch.inputs["ids"])
        assert torch.equal(part.indices, batch.indices)


def gradients(argv: list[str], is_uniform: bool) -> list[tuple[int, torch.Tensor]]:
    """Give for two steps this rank's number of batches, and the gradient."""
    parts = parts_of(argv)
    found: list[torch.Tensor] = []

    def keep() -> None:
        values = [p.grad for p in parts.gradients.local.by_name.values() if p.grad is not None]
        found.append(torch.cat([gradient.flatten() for gradient in values]).clone())

    saver = SimpleNamespace(reads_weights=True, before_update=keep)
    stepper = Stepper(parts, Progress(), left_out=LeftOut(parts), saver=saver)
    parts.optimizer.step = lambda: None  # type: ignore[assignment]  # the weights stay
    if is_uniform:  # on rank 1
        assert isinstance(parts.data.train, Ragged)
        parts.data.train.uniform |= set(parts.sampler.order(0).take(8, 16).tolist())
    numbers = []
    for (window, batches), _ in zip(parts.train_loader.windows(0, 0), range(2), strict=False):
        numbers.append(len(batches))
        stepper.train_step(window, batches)
    tokens = stepper.read_totals()
    parts.group.close()
    assert tokens["loss"] > 0
    return list(zip(numbers, found, strict=True))


def told(argv: list[str]) -> list[tuple[str, int | None]]:
    """Give what the start says of auto, and what a checkpoint keeps, with auto and without."""
    found = []
    for how in ([], ["--no_split_by_length"]):
        parts = parts_of([*argv, *how])
        kept = collect_meta(parts, Progress())["split_by_length"]
        found.append((start_summary._auto_line(parts), kept))
    return found


def test_a_run_that_cuts_says_so_and_keeps_it_in_its_checkpoints() -> None:
    argv = ["--dataset", "tests.token_data:ragged", "--model", "tests.token_data:TinyLM"]
    [[on, off]] = run_ranks(told, 1, [*argv, "--model_args", "{width: 512}", "--task", "tokens"])
    assert "split_by_length on" in on[0]
    assert on[1] is not None
    assert 0 < on[1] < 1000
    assert "split_by_length" not in off[0]
    assert off[1] is None


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    "run",
    slow_after(
        2,
        [
            (2, "ragged", ["--no_shared_memory"]),
            (2, "ragged_stream", []),
            (1, "ragged", []),
            (2, "ragged", ["--find_unused_parameters", "on", "--no_shared_memory"]),
            (2, "ragged", ["--continue_on_error"]),
            (1, "ragged_stream", []),
        ],
    ),
    ids=str,
)
def test_the_gradient_is_that_of_whole_micro_batches(
    run: tuple[int, str, list[str]], double: bool
) -> None:
    world_size, data, how = run
    argv = ["--dataset", f"tests.token_data:{data}", "--model", "tests.token_data:TinyLM"]
    argv += ["--model_args", f"{{double: {str(double).lower()}}}", "--task", "tokens", *how]
    argv += ["--batch_size", "8", "--num_workers", "0"]
    is_uniform = data == "ragged" and world_size == 2
    [whole, *_] = run_ranks(gradients, world_size, [*argv, "--no_split_by_length"], is_uniform)
    found = run_ranks(gradients, world_size, [*argv, "--split_by_length"], is_uniform)
    assert [number for number, _ in whole] == [1, 1]
    for rank, steps in enumerate(found):
        assert steps[0][0] == (1 if is_uniform and rank == 1 else 2)
        for (_, gradient), (_, expected) in zip(steps, whole, strict=True):
            difference = (gradient - expected).abs().max()
            assert difference <= TOLERANCES[double] * expected.abs().max()


class Mixed(TinyLM):
    """What a sample's logits depend on, besides its own tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__(dropout=0.1)
        self.kind = kind
        self.norm = nn.BatchNorm1d(8) if kind == "batch" else nn.Identity()
        self.recurrent = nn.GRU(8, 8, batch_first=True) if kind == "recurrent" else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        if self.kind == "padding":
            hidden = hidden + hidden.mean(dim=1, keepdim=True)
        if self.kind == "end":
            hidden = hidden + hidden[:, -1:]
        if self.kind == "samples":
            hidden = hidden - hidden.mean(dim=0, keepdim=True)
        if self.kind == "raises" and len(ids) == 1:
            raise ValueError("one sample is no batch")
        if self.recurrent is not None:
            hidden = self.recurrent(hidden)[0]
        logits: torch.Tensor = self.head(self.drop(self.mix(hidden).tanh()))
        return logits


def packed(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([s[name] for s in samples])[None] for name in ("ids", "labels")}


def to_40(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    longest = {"ids": torch.zeros(40).long(), "labels": torch.zeros(40).long() - 100}
    return {name: value[:-1] for name, value in pad([*samples, longest]).items()}


def chosen(
    model: nn.Module,
    *,
    config: Config | None = None,
    collate: Any = pad,
    saved: dict[str, Any] | None = None,
    moving: tuple[str, ...] = (),
    calls: ForwardCollectives = NO_COLLECTIVES,
    name: str = "tokens",
) -> LengthSplit | None:
    group = Group(Launch(), CPU)
    fetcher = Fetcher(Ragged(8), seed=0, collate=collate or pad)
    samples = [fetcher[(0, torch.arange(i, i + 2))] for i in (0, 2)]
    if collate is not None:
        samples = [fetcher.with_parts(batch, 0) for batch in samples]
    task: Task = Tokens()
    task.attach(model, name)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = choose_split(
        Trial(model, task, Precision("off", CPU), group),
        samples,
        Findings("", moving, calls),
        config=Config() if config is None else config,
        saved=saved,
    )
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    return found


def test_auto_cuts_where_padding_changes_nothing_and_small_models_need_more_of_it() -> None:
    small, wide = chosen(TinyLM(dropout=0.3)), chosen(TinyLM(dropout=0.3, width=256))
    assert small is not None
    assert wide is not None
    assert small.least_values > 8 * wide.least_values > 0


@pytest.mark.parametrize("kind", ["padding", "end", "samples", "recurrent", "raises"])
def test_auto_cuts_nothing_where_it_would_change_the_gradient_or_not_pay(kind: str) -> None:
    assert chosen(Mixed("plain")) is not None
    assert chosen(Mixed(kind)) is None


def test_auto_cuts_nothing_in_other_cases() -> None:
    assert chosen(TinyLM(), collate=None, config=asks(True)) is None
    assert chosen(TinyLM(), collate=packed) is None
    assert chosen(TinyLM(), collate=to_40) is None
    assert chosen(Mixed("batch"), moving=("norm.running_mean",)) is None
    for calls in (ForwardCollectives(HERE), ForwardCollectives(in_evaluation=HERE)):
        assert chosen(TinyLM(), calls=calls) is None
    assert chosen(TinyLM(), name="own") is None
    assert chosen(TinyLM(), config=Config(data=DataConfig(batch_size=7))) is None
    assert chosen(TinyLM(), config=Config(model=ModelConfig(compile=True))) is None
    assert chosen(TinyLM(), config=Config(ddp=DdpConfig(static_graph=True))) is None


def asks(wanted: bool) -> Config:
    return Config(data=DataConfig(split_by_length=wanted))


def test_what_was_asked_or_begun_with_is_not_tried() -> None:
    assert chosen(Mixed("padding"), config=asks(True)) == ALWAYS
    assert chosen(TinyLM(), config=asks(False)) is None
    assert chosen(Mixed("padding"), saved={"split_by_length": 40}) == LengthSplit(40)
    assert chosen(TinyLM(), saved={"split_by_length": None}) is None
    assert chosen(TinyLM(), saved={}) is None
    assert chosen(TinyLM(), saved={"split_by_length": 40}, config=asks(False)) is None
