"""--ema: what is averaged, when, and that the averages are those that are measured and exported."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hardened_ddp.errors import ModelError
from hardened_ddp.export.export import export_model
from hardened_ddp.model.average import AVERAGE, WeightAverage
from tests.harness.ranks import run_program, start_training, train
from tests.plugins import Plain, is_first_time
from tests.run_folder import find_checkpoints, fingerprints, last_tensors, only_run, read_summary

Words = list[str | Path]
POINTS: Words = ["--dataset", "tests.plugins:points", "--cpu_only", "--batch_size", "4"]
POINTS += ["--num_workers", "0", "--lr_schedule", "constant", "--ema", "0.9"]
KEPT: Words = ["--checkpoint_every_steps", "1", "--keep_last", "40"]


class EndsInSecondEvaluation(Plain):
    """On rank 1, the evaluation after the first one of each epoch kills it, or never ends."""

    since_training = 0

    def __init__(self, num_classes: int, how: str, marker: str) -> None:
        super().__init__(num_classes)
        self.how, self.marker = how, marker

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        kind = type(self)
        kind.since_training = 0 if self.training else kind.since_training + 1
        is_here = kind.since_training == 2 and self.num_forwards > 8
        if is_here and os.environ.get("RANK") == "1" and is_first_time(self.marker):
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1e6)
        return super().forward(inputs)


def averages_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(checkpoint / "state.safetensors")
    return {n.removeprefix(AVERAGE): t for n, t in tensors.items() if n.startswith(AVERAGE)}


@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_averages_are_those_of_the_weights_after_each_step(every: int, tmp_path: Path) -> None:
    argv = [*POINTS, "--model", "tests.plugins:FailingOnce", "--ema_every", str(every)]
    argv += ["--run_name", "run", "--output_dir", tmp_path]
    before: dict[str, torch.Tensor] = {}
    for step in range(1, 5):
        train([*argv, "--max_steps", str(step)], 1).ok()
        newest = find_checkpoints(tmp_path)[-1]
        weights, now = load_file(newest / "state.safetensors"), averages_of(newest)
        new = 0.0 if step % every else 1 - min(0.9, (1 + step) / (10 + step)) ** every
        wanted = {n: a + new * (weights[f"model.{n}"] - a) for n, a in before.items()}
        if step > 1:
            torch.testing.assert_close(now, wanted)
            assert not torch.equal(now["layer.weight"], weights["model.layer.weight"])
        before = now
    assert "norm.running_mean" in before  # the statistics that belong to the weights


def test_tied_weights_have_one_average_and_half_floats_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    trained = dict(model.named_parameters())
    average = WeightAverage(model, trained=trained, moving=(), decay=0.5, every=1)
    assert str(average) == "averages of 1 tensors (--ema, 0.0 MiB)"
    assert average.tensors().keys() == {f"{AVERAGE}0.weight", f"{AVERAGE}1.weight"}
    half = {name: parameter for name, parameter in model.bfloat16().named_parameters()}
    with pytest.raises(ModelError, match=r"is torch\.bfloat16, which rounds"):
        WeightAverage(model, trained=half, moving=(), decay=0.5, every=1)


@pytest.mark.slow
def test_both_are_measured_and_the_averages_decide_and_are_exported(tmp_path: Path) -> None:
    argv: Words = [*POINTS, "--model", "mlp", "--epochs", "3", "--output_dir", tmp_path]
    output = train(argv, 2).ok().outputs[0]
    assert "averages of 4 tensors (--ema, " in output
    assert output.count("; averaged weights: loss ") == 4
    run = only_run(tmp_path)
    summary, best = read_summary(run), json.loads((run / "checkpoints" / "best.json").read_text())
    assert best["metric"] == "ema_accuracy"
    assert summary["test_ema_loss"] != summary["test_loss"]
    newest = find_checkpoints(tmp_path)[-1]
    reports = {}
    for weights in ("averaged", "trained"):
        place = tmp_path / f"{weights}.json"
        command = ["python", "ddp_training.py", "evaluate", str(newest), "--cpu_only"]
        run_program([*command, "--output", str(place), "--weights", weights], timeout_s=90).ok()
        reports[weights] = json.loads(place.read_text())
    assert reports["averaged"]["loss"] == pytest.approx(summary["test_ema_loss"], rel=1e-5)
    assert reports["trained"]["loss"] == pytest.approx(summary["test_loss"], rel=1e-5)
    assert (reports["averaged"]["is_averaged"], reports["trained"]["is_averaged"]) == (True, False)
    saved = load_file(newest / "state.safetensors")
    for averaged, prefix in ((True, AVERAGE), (False, "model.")):
        folder = export_model(newest, output=tmp_path / prefix, averaged=averaged)
        exported = load_file(folder / "model.safetensors")
        assert all(torch.equal(tensor, saved[f"{prefix}{n}"]) for n, tensor in exported.items())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["die", "hang"])
def test_an_end_while_the_averages_are_measured_saves_weights_and_averages(
    how: str, tmp_path: Path
) -> None:
    argv: Words = [*POINTS, "--epochs", "2", "--checkpoint_every_steps", "0", "--run_name", "run"]
    argv += ["--model", "tests.training.test_average:EndsInSecondEvaluation"]
    args = f"{{how: {how}, marker: {tmp_path / 'marker'}}}"
    (tmp_path / "no").touch()  # no fault
    none: Words = ["--model_args", f"{{how: {how}, marker: {tmp_path / 'no'}}}"]
    train([*argv, *KEPT, *none, "--output_dir", tmp_path / "whole"], 2).ok()
    faulty: Words = [*argv, "--model_args", args, "--output_dir", tmp_path / "faulty"]
    with start_training([*faulty, "--stop_grace_s", "3"], 2) as running:
        running.wait_for((tmp_path / "marker").exists, timeout_s=60, what="the second evaluation")
        if how == "hang":
            for rank in range(2):
                running.kill(rank, signal.SIGTERM)
        finished = running.wait(60)
    assert "is saved; to resume" in finished.output
    at_fault = find_checkpoints(tmp_path / "faulty")[-1]
    same = tmp_path / "whole" / "run" / "checkpoints" / at_fault.name
    assert fingerprints(at_fault / "state.safetensors") == fingerprints(same / "state.safetensors")
    train([*faulty, *none], 2).ok()
    assert last_tensors(tmp_path / "faulty") == last_tensors(tmp_path / "whole")


@pytest.mark.slow
def test_averages_that_a_continued_run_begins_or_ends_with(tmp_path: Path) -> None:
    argv: Words = [*POINTS, *KEPT, "--model", "mlp", "--output_dir", tmp_path, "--run_name", "run"]
    train([*argv, "--ema", "0", "--max_steps", "3"], 1).ok()
    output = train([*argv, "--max_steps", "5"], 1).ok().outputs[0]
    assert "the checkpoint has no averages: --ema begins with its weights" in output
    assert averages_of(find_checkpoints(tmp_path)[-1])
    train([*argv, "--ema", "0", "--max_steps", "7"], 1).ok()
    assert not averages_of(find_checkpoints(tmp_path)[-1])
