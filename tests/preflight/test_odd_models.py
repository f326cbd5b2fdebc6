"""Models and data that can't be trained as they are: one clear error each, on all ranks.

Parameters that are complex, sparse or without a shape; collectives in a model's forward, of which
every rank runs as many, or the run is refused at its start.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import DataError, HardenedError, ModelError
from hardened_ddp.model.replica import NO_COLLECTIVES, ForwardCollectives, check_same_model
from hardened_ddp.model.zoo import place_model
from hardened_ddp.preflight.probe import check_evaluation
from hardened_ddp.settings.config import DataConfig, ModelConfig
from hardened_ddp.streams import views
from tests.harness.ranks import Finished, run_ranks, train
from tests.marks import sections, slow_after
from tests.ranks.test_shared_sum import rendezvous
from tests.run_folder import last_tensors, only_run, read_summary

CPU = torch.device("cpu")


class Net(nn.Module):
    """A linear layer; kind says what is odd, after so many forwards or on rank 1."""

    def __init__(self, num_classes: int = 2, kind: str = "", after: int = 12) -> None:
        super().__init__()
        is_odd = os.environ.get("RANK") == "1"
        self.hidden = nn.Linear(3, 4 + (is_odd and kind == "shape"))
        self.layer = nn.Linear(self.hidden.out_features, num_classes)
        self.kind, self.after, self.num_calls = kind, after, 0
        match kind:
            case "more" if is_odd:
                self.other = nn.Linear(1, 1)
            case "frozen here" if is_odd:
                self.hidden.bias.requires_grad_(False)
            case "buffer" if is_odd:
                self.register_buffer("table", torch.zeros(2))
            case "order" if is_odd:
                self.hidden, hidden = nn.Identity(), self.hidden  # type: ignore[assignment]
                del self.hidden
                self.hidden = hidden
            case "unfrozen":
                self.hidden.weight.requires_grad_(False)
            case "expanded":
                self.scale = nn.Parameter(torch.ones(1).expand(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == self.after and self.training:
            if self.kind == "unfrozen":
                self.hidden.weight.requires_grad_(True)
            if self.kind == "frozen":
                self.hidden.weight.requires_grad_(False)
            if self.kind == "replaced":
                self.hidden.weight = nn.Parameter(self.hidden.weight.detach() * 2)
        return self.layer(self.hidden(inputs))


DIFFERENT = sections(Path(__file__).with_name("different.txt"))


def build_on_ranks(kinds: list[str]) -> list[str]:
    group = rendezvous(60)
    found = []
    for kind in kinds:
        try:
            check_same_model(Net(kind=kind), group)
            found.append("equal")
        except HardenedError as error:
            found.append(f"{error.code} {error.message}")
    group.close()
    return found


def test_models_that_differ_between_ranks_are_refused_by_what_differs() -> None:
    for found in run_ranks(build_on_ranks, 2, ["", *DIFFERENT]):
        assert found[0] == "equal"
        for text, told in zip(found[1:], DIFFERENT.values(), strict=True):
            assert text.startswith("DDP-G02"), text
            assert told.strip() in text


def test_a_parameter_whose_values_share_memory_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"share memory, .*: scale") as caught:
        place_model(Net(kind="expanded"), ModelConfig(), device=CPU, world_size=1)
    assert caught.value.fix


def test_sync_batchnorm_without_a_gpu_says_what_to_leave_out() -> None:
    with pytest.raises(ModelError, match="sync_batchnorm needs a GPU on every rank") as caught:
        place_model(Net(), ModelConfig(sync_batchnorm=True), device=CPU, world_size=2)
    assert "leave --sync_batchnorm out" in caught.value.fix


@pytest.mark.parametrize("case", slow_after(1, [("unfrozen", 2), ("replaced", 1)]), ids=str)
def test_a_parameter_that_becomes_trainable_in_mid_run_is_refused_by_name(
    case: tuple[str, int], tmp_path: Path
) -> None:
    kind, world_size = case
    done = train(command(kind, tmp_path), world_size)
    assert all(status == 2 for status in done.statuses), done.output
    assert "became trainable, or were made anew: hidden.weight" in done.output
    assert "Traceback" not in done.output


def test_where_a_parameter_is_frozen_in_mid_run_the_others_train_on(tmp_path: Path) -> None:
    train([*command("frozen", tmp_path), "--no_shared_memory"], 2).ok()


def command(kind: str, output: Path) -> list[str]:
    argv = ["--cpu_only", "--no_config", "--num_workers", "0", "--dataset", "tests.plugins:points"]
    argv += ["--dataset_args", "{size: 160}", "--batch_size", "4", "--epochs", "1"]
    argv += ["--model", "tests.preflight.test_odd_models:Net", "--model_args", f"{{kind: {kind}}}"]
    return [*argv, "--eval_every", "0", "--log_interval", "5", "--output_dir", str(output)]


class Endless:
    """A stream; its test part has no end."""

    num_shards, num_classes = 2, 2

    def __init__(self, train: bool) -> None:
        if train:
            self.sizes = [4, 4]

    def open(self, shard: int, *, epoch: int, state: Any) -> Iterator[Any]:
        numbers = range(4) if hasattr(self, "sizes") else itertools.count()
        return ((torch.ones(3), number % 2) for number in numbers)


def test_an_endless_test_stream_is_refused_if_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MOST_COUNTED", 100)
    config = DataConfig(dataset="tests.preflight.test_odd_models:Endless")
    with pytest.raises(DataError, match="has given 100 samples, and goes on") as caught:
        build_data(config)
    assert "--eval_every 0" in caught.value.fix
    assert build_data(config, evaluates=False).test is None


WORK = ["--cpu_only", "--no_config", "--num_workers", "0"]
WORK += ["--model", "tests.preflight.test_odd_models:Waves"]
WORK += ["--dataset", "tests.plugins:points", "--task", "classification", "--optimizer", "sgd"]


class Sparse(nn.Module):
    """Rounds its inputs to 8 words, and gives those of an embedding."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(8, num_classes, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        numbers = (inputs.gt(0) * torch.tensor([4, 2, 1])).sum(dim=1)
        return self.words(numbers)


class Waves(nn.Module):
    """Has a matrix of complex numbers; is_lazy: and a layer without a shape."""

    def __init__(self, num_classes: int, is_lazy: bool = False) -> None:
        super().__init__()
        self.first: nn.Module = nn.LazyLinear(8) if is_lazy else nn.Linear(3, 8)
        self.waves = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) * 0.3)
        self.last = nn.Linear(8, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(inputs).to(torch.complex64) @ self.waves).abs())


def run(folder: Path, name: str, num_ranks: int, *more: str) -> Finished:
    flags = [*WORK, "--output_dir", str(folder), "--run_name", name, *more]
    return train(flags, num_ranks)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    tensors, _ = load_checkpoint(open_checkpoint(run))
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


@pytest.mark.slow
def test_a_complex_model_is_trained_alike_on_any_ranks_and_evaluated(tmp_path: Path) -> None:
    run(tmp_path, "one", 1, "--epochs", "2", "--batch_size", "8").ok()
    every = ["--epochs", "2", "--checkpoint_every_epochs", "1", "--batch_size", "4"]
    run(tmp_path, "two", 2, *every).ok()
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert one["model.first.weight"].shape == (8, 3)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)
    first = min((tmp_path / "two" / "checkpoints").glob("step-*"))
    run(tmp_path, "two", 2, *every, "--resume", str(first)).ok()
    again = weights_of(tmp_path / "two")
    assert all(torch.equal(tensor, again[name]) for name, tensor in two.items())
    assert "accuracy" in train(["evaluate", str(tmp_path / "two")]).ok().output


def wrapped(num_classes: int) -> nn.Module:
    return nn.DataParallel(Sparse(num_classes))


COLLECTIVE = ["--cpu_only", "--dataset", "tests.plugins:points", "--batch_size", "4"]
COLLECTIVE += ["--epochs", "2", "--num_workers", "0", "--hang_after_s", "5", "--timeout_s", "30"]
NORMING, GATHERING = ("--model", "tests.plugins:Norming"), ("--model", "tests.plugins:Gathering")
SUMMING = ("--model", "tests.plugins:Summing")
COMPILED = ("--compile", "--model", "tests.plugins:NormingTestsCompiled")

UNEVEN = [("allreduce", NORMING), ("allreduce", (*NORMING, "--no_shared_memory"))]
UNEVEN += [("allgather", ("--model", "tests.plugins:GatheringMeans"))]


@pytest.mark.parametrize("case", slow_after(1, UNEVEN), ids=str)
def test_unequal_shares_run_as_often(case: tuple[str, tuple[str, ...]], tmp_path: Path) -> None:
    # Steps of 16 and 9 samples: 5 and 4 of the last one, so 2 micro-batches and 1.
    name, flags = case
    argv = [*COLLECTIVE, *flags, "--accumulation_steps", "2", "--output_dir", tmp_path]
    finished = train([*argv, "--dataset_args", "{size: 25}"], 2).ok()
    assert finished.outputs[0].count("the model's forward runs collectives (") == 1
    assert f"{name} in plugins.py:" in finished.output
    assert read_summary(only_run(tmp_path))["step"] == 4


BY_ONE = ("--eval_batch_size", "1")
REFUSED = [
    # A last step of 1 sample: rank 1 has none.
    (33, (*NORMING,), "rank 1 has 0 for the 1 forwards", "--drop_last"),
    (25, (*SUMMING, "--accumulation_steps", "2"), "need equal sizes", "--drop_last"),
    (25, (*GATHERING, "--accumulation_steps", "2"), "need equal sizes", "--drop_last"),
    (24, (*NORMING, "--continue_on_error"), "left out", "--continue_on_error"),
    (24, (*NORMING, "--global_batch_size", "1"), "each step has 1", "a multiple of 2"),
    # 17 samples to test on, 16 at once: one rank has 9 of them, in one batch, and the other 8.
    (24, (*NORMING, *BY_ONE, "--model_args", "{all_modes: true}"), "8 for", "--eval"),
    (24, ("--model", "tests.plugins:NormingTests", *BY_ONE), "8 for", "--eval"),
    (24, (*COMPILED, *BY_ONE), "8 for", "--eval"),
]


@pytest.mark.parametrize("case", slow_after(1, REFUSED), ids=str)
def test_a_run_in_which_a_rank_would_lack_a_forward_is_refused_before_it_trains(
    case: tuple[int, tuple[str, ...], str, str], tmp_path: Path
) -> None:
    size, flags, problem, fix = case
    argv = [*COLLECTIVE, *flags, "--dataset_args", f"{{size: {size}}}", "--output_dir", tmp_path]
    finished = train(argv, 2)
    assert all(finished.statuses)
    output = finished.output
    assert "[DDP-M01] the model's forward runs collectives (" in output
    assert problem in output
    assert fix in output.partition("wait for each other: ")[2].partition(problem)[2]
    assert output.count("DDP-M01") == 1  # one rank tells it
    assert "Traceback" not in output
    if fix == "--drop_last":
        train([*argv, "--drop_last"], 2).ok()


@pytest.mark.slow
def test_an_error_of_one_rank_in_such_a_forward_ends_it_and_loses_no_step(tmp_path: Path) -> None:
    argv = [*COLLECTIVE, *NORMING, "--dataset_args", "{size: 24}", "--output_dir", tmp_path]
    fails = ["--model_args", "{fails_at: 8}"]
    finished = train([*argv, *fails], 2)
    assert finished.statuses == (75, 1)
    assert "a fault of this model" in finished.output
    assert "is saved; to resume" in finished.output
    train([*argv, "--resume", only_run(tmp_path)], 2).ok()
    train([*argv, "--output_dir", tmp_path / "undisturbed"], 2).ok()
    assert last_tensors(tmp_path) == last_tensors(tmp_path / "undisturbed")


def test_the_trial_of_the_test_set_is_left_out_where_a_rank_could_wait_in_it() -> None:
    found = ForwardCollectives(in_evaluation=("allreduce in mine.py:1",))
    parts: Any = SimpleNamespace(  # with nothing that a trial needs: it would raise
        config=SimpleNamespace(loop=SimpleNamespace(evaluates=True)),
        eval_loader=object(),
        group=None,
        replica=SimpleNamespace(collectives=found),
    )
    check_evaluation(parts)
    parts.replica.collectives = NO_COLLECTIVES
    with pytest.raises(AttributeError):
        check_evaluation(parts)
