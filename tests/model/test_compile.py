"""--compile: with every setting of DDP, and no more compilations than training and testing need."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from hardened_ddp.model.replica import compile_model
from tests.harness.ranks import import_in_server, train
from tests.run_folder import only_run, read_summary

DIGITS = ["--cpu_only", "--no_shared_memory", "--compile", "--no_tensorboard"]
DIGITS += ["--model", "tests.plugins:Compiled", "--bucket_cap_mb", "1"]
EPOCH = [*DIGITS, "--epochs", "1", "--batch_size", "128"]


@pytest.fixture(autouse=True)
def the_compiler_is_imported_once() -> None:
    import_in_server("torch._inductor.compile_fx")


def compilations(text: str) -> list[str]:
    """Return what torch compiled: the number of a part of the model, each time."""
    return re.findall(r"^compiled part (\d+)", text, re.MULTILINE)


@pytest.mark.slow
def test_an_epoch_compiles_for_training_for_its_last_batch_and_for_the_test(tmp_path: Path) -> None:
    finished = train([*EPOCH, "--output_dir", tmp_path], 2).ok()
    found = compilations(finished.outputs[0])
    assert len(set(found)) == 1
    assert len(found) <= 3  # for training, its last batch of another size, and the test


@pytest.mark.parametrize(
    "flags",
    [
        ["--find_unused_parameters", "on", "--step_retry", "off", "--comm_hook", "fp16"],
        ["--model_args", "{spare: true}", "--no_gradient_as_bucket_view"],
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_compiled_it_trains_as_plain_whatever_ddp_does(flags: list[str], tmp_path: Path) -> None:
    short = [*EPOCH, "--max_steps", "2", "--accumulation_steps", "2", "--eval_every", "0", *flags]
    plain = [word for word in short if word != "--compile"]
    compiled = train([*short, "--output_dir", tmp_path / "compiled"], 2).ok()
    assert compilations(compiled.outputs[0])
    train([*plain, "--output_dir", tmp_path / "plain"], 2).ok()
    losses = [read_summary(only_run(tmp_path / n))["train_loss"] for n in ("compiled", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_container_of_torch_itself_is_compiled_too() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    names = list(model.state_dict())
    inputs = torch.randn(3, 4)
    expected = model(inputs)
    graphs = []

    def note(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compile_model(model, backend=note)
    assert torch.allclose(model(inputs), expected)
    assert len(graphs) == 1
    assert list(model.state_dict()) == names
