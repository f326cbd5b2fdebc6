"""Models whose parameters get a shape in a first forward, are complex, or have sparse gradients."""

from pathlib import Path

import pytest
import torch
from torch import nn

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.preflight.first_forward import shape_by_weights
from tests.harness.ranks import Finished, train

WORK = [
    "--cpu_only",
    "--no_config",
    "--num_workers",
    "0",
    "--model",
    "tests.model.test_unusual_parameters:LazyWaves",
]
WORK += ["--dataset", "tests.plugins:points", "--task", "classification", "--optimizer", "sgd"]


class Sparse(nn.Module):
    """Rounds its inputs to 8 words; looks: up by a function, whose gradient stays sparse."""

    def __init__(self, num_classes: int, looks: bool = False, sparse: bool = True) -> None:
        super().__init__()
        self.words, self.looks = nn.Embedding(8, num_classes, sparse=sparse), looks

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        numbers = (inputs.gt(0) * torch.tensor([4, 2, 1])).sum(dim=1)
        if self.looks:
            return nn.functional.embedding(numbers, self.words.weight, sparse=True)
        logits: torch.Tensor = self.words(numbers)
        return logits


class LazyWaves(nn.Module):
    """Has a layer without a shape, and a matrix of complex numbers."""

    def __init__(self, num_classes: int, fails: bool = False, forgets: bool = False) -> None:
        super().__init__()
        self.fails, self.forgets = fails, forgets
        self.first, self.forgotten = nn.LazyLinear(8), nn.LazyLinear(2)
        if not forgets:
            self.forgotten = nn.Identity()
        self.waves = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) * 0.3)
        self.last = nn.Linear(8, num_classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("a fault of this model")
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


def test_a_model_of_lazy_and_complex_parameters_is_trained_alike_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    run(tmp_path, "one", 1, "--epochs", "2", "--batch_size", "8").ok()
    run(tmp_path, "two", 2, "--epochs", "2", "--batch_size", "4").ok()
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert one["model.first.weight"].shape == (8, 3)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_lazy_model_is_resumed_evaluated_and_a_start_for_another(tmp_path: Path) -> None:
    every = ["--epochs", "2", "--checkpoint_every_epochs", "1", "--batch_size", "4"]
    run(tmp_path, "whole", 2, *every).ok()
    first = min((tmp_path / "whole" / "checkpoints").glob("step-*"))
    whole = weights_of(tmp_path / "whole")
    run(tmp_path, "whole", 2, *every, "--resume", str(first)).ok()
    again = weights_of(tmp_path / "whole")
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert "accuracy" in train(["evaluate", str(tmp_path / "whole")]).ok().output
    begun = run(tmp_path, "begun", 2, "--init_from", str(tmp_path / "whole"), "--max_steps", "1")
    assert "missing" not in begun.ok().output


def test_what_the_weights_lack_gets_a_shape_that_the_comparison_names() -> None:
    model = LazyWaves(2, forgets=True)
    shape_by_weights(model, {"first.weight": torch.zeros(8, 3), "first.bias": torch.zeros(8)})
    assert model.first.weight.shape == (8, 3)
    assert model.forgotten.weight.shape == (0,)


def test_sparse_gradients_of_embeddings_are_made_dense_and_others_refused(tmp_path: Path) -> None:
    sparse = ["--model", "tests.model.test_unusual_parameters:Sparse", "--max_steps", "3"]
    said = run(tmp_path, "sparse", 2, *sparse).ok().output
    assert said.count("made dense, to be summed over the ranks: words") == 1
    run(tmp_path, "dense", 2, *sparse, "--model_args", "{sparse: false}").ok()
    dense = weights_of(tmp_path / "dense")
    assert all(torch.equal(t, dense[name]) for name, t in weights_of(tmp_path / "sparse").items())
    refused = run(tmp_path, "function", 1, *sparse, "--model_args", "{looks: true}")
    assert refused.statuses == (2,)
    assert "the gradients of words.weight are sparse" in refused.output


def wrapped(num_classes: int) -> nn.Module:
    return nn.DataParallel(Sparse(num_classes))


def not_a_number(num_classes: int) -> nn.Module:
    model = Sparse(num_classes, sparse=False)
    nn.init.constant_(model.words.weight, float("nan"))
    return model
