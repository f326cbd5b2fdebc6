"""--compile: with every setting of DDP, and no more compilations than training and testing need."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from hardened_ddp.model.compiling import compile_model, uncompiled
from tests.compiled_models import BACKEND, Compiled
from tests.harness.ranks import import_in_server, train
from tests.harness.run_folder import only_run, read_summary

DIGITS = ["--cpu_only", "--no_shared_memory", "--compile", "--no_tensorboard"]
DIGITS += ["--model", "tests.compiled_models:Compiled", "--bucket_cap_mb", "1"]
EPOCH = [*DIGITS, "--epochs", "1", "--batch_size", "128"]


@pytest.fixture(autouse=True)
def the_compiler_is_imported_once() -> None:
    import_in_server("torch._inductor.compile_fx")


def told(text: str) -> tuple[int, int]:
    """Return the parts that were compiled, and how often one was compiled again."""
    found = re.search(r"compile: (\d+) parts? of the model compiled, and (\d+) times again", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


@pytest.mark.slow
def test_an_epoch_compiles_for_training_for_its_last_batch_and_for_the_test(
    tmp_path: Path,
) -> None:
    finished = train([*EPOCH, "--output_dir", tmp_path], 2).ok()
    num_parts, num_again = told(finished.outputs[0])
    assert num_parts == 1
    assert num_again <= 2  # a last batch of another size, and the test
    assert "compiled no part" not in finished.outputs[0]


@pytest.mark.slow
def test_compile_refuses_buckets_that_the_compiler_can_not_take(tmp_path: Path) -> None:
    argv = [*EPOCH, "--bucket_cap_mb", "0.3", "--output_dir", tmp_path]
    finished = train(argv, 2)
    assert "--compile true with --bucket_cap_mb 0.3" in finished.output
    assert "1 MB at least" in finished.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        ["--static_graph"],
        ["--find_unused_parameters", "on"],
        ["--model_args", "{spare: true}"],
        ["--no_gradient_as_bucket_view", "--accumulation_steps", "2"],
        ["--comm_hook", "fp16"],
        ["--comm_hook", "powersgd", "--step_retry", "off"],
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_a_compiled_run_trains_as_the_plain_one_with_every_setting_of_ddp(
    flags: list[str], tmp_path: Path
) -> None:
    short = [*EPOCH, "--max_steps", "3", "--eval_every", "0", *flags]
    plain = [word for word in short if word != "--compile"]
    told(train([*short, "--output_dir", tmp_path / "compiled"], 2).ok().outputs[0])
    train([*plain, "--output_dir", tmp_path / "plain"], 2).ok()
    losses = [read_summary(only_run(tmp_path / n))["train_loss"] for n in ("compiled", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_container_of_torch_itself_is_compiled_too() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    names = list(model.state_dict())
    inputs = torch.randn(3, 4)
    expected = model(inputs)
    compilations = compile_model(model, backend=BACKEND)
    with uncompiled():
        model(inputs)
    assert compilations.num_parts == 0
    assert torch.allclose(model(inputs), expected)
    assert (compilations.num_parts, compilations.num_again) == (1, 0)
    assert list(model.state_dict()) == names


@pytest.mark.slow
def test_many_shapes_and_nothing_compiled_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hardened_ddp")
    model = Compiled(2)
    compilations = compile_model(model)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model.to(dtype)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                model(torch.randn(3, 64, dtype=dtype))
    compilations.tell()
    compilations.tell()
    assert caplog.text.count("one part was compiled 6 times") == 1
    other = compile_model(Compiled(2))
    other.tell()
    assert "compiled no part" in caplog.text
