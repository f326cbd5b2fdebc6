"""Models whose parameters have no shape yet, are complex, or have sparse gradients."""

from pathlib import Path

import pytest
import torch
from torch import nn

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from tests.harness.ranks import Finished, train

WORK = ["--cpu_only", "--no_config", "--num_workers", "0"]
WORK += ["--model", "tests.model.test_unusual_parameters:Waves"]
WORK += ["--dataset", "tests.plugins:points", "--task", "classification", "--optimizer", "sgd"]


class Sparse(nn.Module):
    """Rounds its inputs to 8 words, and gives those of an embedding."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(8, num_classes, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        numbers = (inputs.gt(0) * torch.tensor([4, 2, 1])).sum(dim=1)
        logits: torch.Tensor = self.words(numbers)
        return logits


class Waves(nn.Module):
    """Has a matrix of complex numbers; is_lazy: and a layer without a shape."""

    def __init__(self, num_classes: int, is_lazy: bool = False) -> None:
        super().__init__()
        self.first: nn.Module = nn.LazyLinear(8) if is_lazy else nn.Linear(3, 8)
        self.waves = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) * 0.3)
        self.last = nn.Linear(8, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(
            (self.first(inputs).to(torch.complex64) @ self.waves).abs()
        )
        return logits


def run(folder: Path, name: str, num_ranks: int, *more: str) -> Finished:
    flags = [*WORK, "--output_dir", str(folder), "--run_name", name, *more]
    return train(flags, num_ranks)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    tensors, _ = load_checkpoint(open_checkpoint(run))
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


@pytest.mark.slow
def test_a_complex_model_is_trained_alike_on_any_number_of_ranks_resumed_and_evaluated(
    tmp_path: Path,
) -> None:
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
