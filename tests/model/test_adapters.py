"""Adapters: a frozen base of a file is in no checkpoint, is checked by its hash, is exported."""

import importlib.util
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from hardened_ddp.checkpoint.folder import load_checkpoint, open_checkpoint
from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.errors import CheckpointMismatchError, HardenedError, PeerLostError
from hardened_ddp.export.export import export_model
from hardened_ddp.export.formats import write_model
from hardened_ddp.model.huggingface import build_from_config
from hardened_ddp.training.weights import model_tensors, rebuild_model
from tests.harness.ranks import import_in_server, train
from tests.model.test_hub_text import Sentences, saved
from tests.plugins import is_first_time
from tests.run_folder import find_checkpoints, last_tensors, only_run, samples_by_step

Words = list[str | Path]
WIDTH = 600
PLAIN: Words = ["--cpu_only", "--global_batch_size", "48", "--num_workers", "0", "--ledger"]
PLAIN += ["--lr_schedule", "constant"]
needs_peft = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "peft"))),
    reason="needs requirements-extras.txt",
)


class Adapted(nn.Module):
    """A large frozen layer, a small adapter beside it, a head; the base has tied names."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.base, self.same = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.same.weight = self.base.weight
        for parameter in (*self.base.parameters(), *self.same.parameters()):
            parameter.requires_grad_(False)
        self.down, self.up = nn.Linear(64, WIDTH), nn.Linear(WIDTH, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.down(images.flatten(1))
        return self.up(hidden + self.same(self.base(hidden).relu()))


def base_file(folder: Path) -> Path:
    torch.manual_seed(1)
    model = Adapted(10)
    state = model.state_dict()
    path = folder / "base.safetensors"
    save_file({n: state[n] for n in ("base.weight", "base.bias", "same.bias")}, path)
    return path


ADAPTED: Words = [*PLAIN, "--model", "tests.model.test_adapters:Adapted", "--run_name", "run"]


def test_a_frozen_base_is_left_out_and_a_cut_run_goes_on_to_the_same_weights(
    tmp_path: Path,
) -> None:
    argv = [*ADAPTED, "--init_from", base_file(tmp_path), "--output_dir"]
    train([*argv, tmp_path / "cut", "--max_steps", "7"], 2).ok()
    train([*argv, tmp_path / "cut", "--max_steps", "20"], 2).ok()
    train([*argv, tmp_path / "whole", "--max_steps", "20"], 2).ok()
    assert last_tensors(tmp_path / "cut") == last_tensors(tmp_path / "whole")
    newest = find_checkpoints(tmp_path / "whole")[-1]
    tensors, meta = load_checkpoint(open_checkpoint(newest))
    assert not [name for name in tensors if name.startswith(("model.base", "model.same"))]
    base: Any = meta["base"]
    assert base["source"] == str(tmp_path / "base.safetensors")
    assert sorted(base["sha256"]) == ["base.bias", "base.weight", "same.bias", "same.weight"]
    # What it is used for later has all of it again.
    source = load_file(tmp_path / "base.safetensors")
    folder = export_model(newest, output=tmp_path / "export")
    exported = load_file(folder / "model.safetensors")
    assert torch.equal(exported["base.weight"], source["base.weight"])
    assert rebuild_model(model_tensors(tensors, meta), meta) is not None


def test_another_base_is_refused_by_name_at_a_resume_and_at_an_export(tmp_path: Path) -> None:
    path = base_file(tmp_path)
    argv = [*ADAPTED, "--init_from", path, "--output_dir", tmp_path / "runs"]
    train([*argv, "--max_steps", "3"], 1).ok()
    source = load_file(path)
    source["base.bias"][5] += 1e-6
    save_file(source, path)
    output = train([*argv, "--max_steps", "6"], 1).outputs[0]
    assert f"was trained on the frozen weights of {path}" in output
    assert "1 of their 4 tensors are others now: base.bias" in output
    with pytest.raises(CheckpointMismatchError, match=r"others now: base\.bias"):
        export_model(find_checkpoints(tmp_path / "runs")[-1], output=tmp_path / "export")


@pytest.mark.slow
def test_frozen_weights_of_no_file_are_saved_as_before(tmp_path: Path) -> None:
    train([*ADAPTED, "--max_steps", "3", "--output_dir", tmp_path], 1).ok()
    assert "model.base.weight" in last_tensors(tmp_path)


def sentences(train: bool, board: str = "", fails_at: int = 0, dies_at: int = 0) -> Sentences:
    """Give the data; and to rank 1, in the forward of a step, an exception, and of one a SIGKILL.

    board: a folder, where it is noted that they have been.
    """
    if not (train and board and os.environ["RANK"] == "1"):
        return Sentences()
    step = 0

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nonlocal step
        step = max(int(state["step"]) for state in optimizer.state.values())

    def misbehave(module: nn.Module, inputs: object) -> None:
        if not module.training or type(module).__name__ != "TextModel":
            return
        if step == fails_at and is_first_time(f"{board}/failed"):
            raise RuntimeError("a fault inside of the step")
        if step == dies_at and is_first_time(f"{board}/died"):
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
    register_module_forward_pre_hook(misbehave)
    return Sentences()


NUM_STEPS, GPT2 = 9, "GPT2LMHeadModel"
LORA: Words = ["--adapter", "{r: 1, target_modules: [c_attn]}"]


def text_run(base: Path, output: Path, *, num_steps: int = NUM_STEPS, **faults: Any) -> Words:
    model = f"hf:{base / GPT2}"
    if not (base / GPT2).is_dir():
        saved(base, GPT2, vocab_size=400, n_embd=128, n_layer=4, n_head=4)
    words: Words = [*PLAIN, "--dataset", "tests.model.test_adapters:sentences", "--task", "tokens"]
    words += ["--model", model, "--run_name", "run", "--global_batch_size", "8"]
    words += ["--optimizer", "adamw", "--dataset_args", json.dumps(faults)]
    return [*words, "--max_steps", str(num_steps), "--output_dir", output]


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the base and the undisturbed run, in lora/."""
    for module in ("transformers.models.gpt2.modeling_gpt2", "peft"):
        import_in_server(module)
    folder = tmp_path_factory.mktemp("lora")
    train([*text_run(folder, folder / "lora"), *LORA], 2).ok()
    return folder


@needs_peft
@pytest.mark.slow
def test_lora_that_is_killed_in_a_random_step_and_retries_one_loses_nothing(
    lora: Path, tmp_path: Path
) -> None:
    fails_at, dies_at = sorted(random.Random("lora").sample(range(1, NUM_STEPS - 2), 2))
    faults = {"board": str(tmp_path), "fails_at": fails_at, "dies_at": dies_at}
    argv = [*text_run(lora, tmp_path / "cut", **faults), *LORA]
    first = train(argv, 2)
    assert first.statuses == (PeerLostError.exit_status, -signal.SIGKILL), first.describe()
    assert f"retrying step {fails_at}" in first.outputs[0]
    shutil.copytree(tmp_path / "cut", tmp_path / "resized")
    train(argv, 2).ok()
    assert last_tensors(tmp_path / "cut") == last_tensors(lora / "lora")
    # On other numbers of ranks it takes the same samples.
    for world_size, last in ((3, NUM_STEPS - 1), (1, NUM_STEPS)):
        argv = text_run(lora, tmp_path / "resized", num_steps=last, **faults)
        train([*argv, *LORA], world_size).ok()
    whole = samples_by_step(lora / "lora" / "run")
    assert len(whole) == NUM_STEPS
    assert samples_by_step(tmp_path / "cut" / "run") == whole
    assert samples_by_step(tmp_path / "resized" / "run") == whole


@needs_peft
@pytest.mark.parametrize("has_old_head", [True, False])
def test_an_export_of_adapters_leaves_out_no_new_head(tmp_path: Path, has_old_head: bool) -> None:
    transformers = import_extra("transformers", what="this test")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    sizes |= {"intermediate_size": 16, "architectures": ["BertForSequenceClassification"]}
    kind = "SequenceClassification" if has_old_head else "MaskedLM"
    base = getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**sizes))
    base.save_pretrained(tmp_path / "base")
    described = transformers.BertConfig(**sizes, num_labels=4)
    model = build_from_config(
        described.to_dict(), input_shape=(), adapter={"r": 1, "target_modules": ["query"]}
    )
    meta = {"model": f"hf:{tmp_path / 'base'}", "hub_config": described.to_dict()}
    meta |= {"adapter": {"r": 1, "target_modules": ["query"]}, "input_shape": []}
    with pytest.raises(HardenedError) as caught:
        write_model(tmp_path, "peft", model.state_dict(), meta)
    assert "--format huggingface writes a head that was trained, too" in caught.value.fix


@needs_peft
@pytest.mark.slow
def test_lora_is_a_small_checkpoint_exported_alone_and_merged(lora: Path, tmp_path: Path) -> None:
    train(text_run(lora, tmp_path / "full", num_steps=3), 2).ok()
    shutil.copytree(lora, tmp_path, dirs_exist_ok=True)
    newest = [find_checkpoints(tmp_path / name)[-1] for name in ("lora", "full")]
    small, full = ((path / "state.safetensors").stat().st_size for path in newest)
    assert small < 0.02 * full
    run = only_run(tmp_path / "lora")
    merged = export_model(run, output=tmp_path / "merged", form="huggingface")
    alone = export_model(run, output=tmp_path / "alone", form="peft")
    assert json.loads((alone / "adapter_config.json").read_text())["r"] == 1
    assert (alone / "adapter_model.safetensors").stat().st_size < 0.05 * full
    transformers, peft = (import_extra(n, what="this test") for n in ("transformers", "peft"))
    ids = torch.arange(12).view(2, 6)
    base = transformers.GPT2LMHeadModel.from_pretrained(lora / GPT2)
    before = base(ids).logits.detach()
    with_adapter = peft.PeftModel.from_pretrained(base, alone).eval()(ids).logits
    whole = transformers.GPT2LMHeadModel.from_pretrained(merged).eval()(ids).logits
    torch.testing.assert_close(whole, with_adapter, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(whole, before)
    train(["evaluate", run, "--cpu_only", "--output", tmp_path / "report.json"]).ok()
