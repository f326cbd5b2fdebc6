"""Models and data that can't be trained as they are: one clear error each, on all ranks."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.errors import DataError, HardenedError, ModelError
from hardened_ddp.model.replica import check_same_model
from hardened_ddp.model.zoo import place_model
from hardened_ddp.settings.config import DataConfig, ModelConfig
from hardened_ddp.streams import views
from tests.harness.ranks import run_ranks, train
from tests.marks import slow_after
from tests.ranks.test_shared_sum import rendezvous

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
        logits: torch.Tensor = self.layer(self.hidden(inputs))
        return logits


DIFFERENT = {
    "shape": "1 has hidden.weight (5, 3) torch.float32, rank 0 has hidden.weight (4, 3) torch.fl",
    "more": "rank 1 has other.weight (1, 1) torch.float32, rank 0 has nothing",
    "frozen here": "rank 1 has hidden.bias (4,) torch.float32, frozen, rank 0 has hidden.bias (4,)",
    "buffer": "rank 1 has table (2,) torch.float32, rank 0 has hidden.weight (4, 3) torch.float32",
    "order": "rank 1 has layer.weight (2, 4) torch.float32, rank 0 has hidden.weight (4, 3) torch",
}


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
            assert told in text


def test_a_parameter_whose_values_share_memory_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"share memory, .*: scale") as caught:
        place_model(Net(kind="expanded"), ModelConfig(), device=CPU, world_size=1)
    assert caught.value.fix


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


def test_an_endless_test_stream_is_refused_and_not_counted_without_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(views, "MOST_COUNTED", 100)
    config = DataConfig(dataset="tests.preflight.test_odd_models:Endless")
    with pytest.raises(DataError, match="has given 100 samples, and goes on") as caught:
        build_data(config)
    assert "--eval_every 0" in caught.value.fix
    assert build_data(config, evaluates=False).test is None


def test_a_drop_last_that_would_leave_no_step_is_told(tmp_path: Path) -> None:
    argv = ["--batch_size", "64", "--drop_last", "--max_steps", "1", "--dataset_args", "{size: 24}"]
    done = train([*command("", tmp_path), *argv], launcher="none").ok()
    assert "drop_last: off, because all 24 samples are fewer than the 64 of a step" in done.output
