"""What forward writes beside gradients is found, put back at a retry, saved and resumed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_drills.faults import find
from ddp_drills.work import Work
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.nesting import dense_parts, tensors_of
from hardened_ddp.model.effects import InputEffects, untouched
from hardened_ddp.model.moving_attributes import MovingAttributes
from hardened_ddp.model.moving_buffers import MovingBuffers
from hardened_ddp.model.replica import Replica
from hardened_ddp.step.gradient import Writes
from tests import moving_models as moving
from tests.drills.forked import forked_drills
from tests.marks import slow_after

FLAGS = ("--batch_size=12", "--num_workers=0", "--max_steps=25", "--eval_every=0")
FAILS_AT = 8  # the forward in which a drill's fault happens, from 1


def work_of(model: type, *flags: str, **arguments: Any) -> Work:
    return Work(
        model=f"tests.moving_models:{model.__name__}",
        model_args=arguments,
        dataset="tests.plugins:points",
        dataset_args={"size": 360},
        flags=(*FLAGS, *flags),
    )


def check(folder: Path, work: Work, *faults: str, **expected: Any) -> str:
    """Run these drills; give what their runs printed."""
    drills, told = forked_drills(folder, work=work), ""
    for name in faults:
        found = find(name)
        assert found is not None
        found = replace(found, **expected)
        verdict = drills.run(found)
        told += drills.output_of(found)
        assert verdict.passed, f"{verdict}\n{told}"
    return told


@pytest.mark.parametrize("model", slow_after(1, moving.MOVING))
def test_what_forward_moves_is_that_of_the_undisturbed_run_after_any_fault(
    model: type, tmp_path: Path
) -> None:
    flags: tuple[str, ...] = ()
    faults = ["raise-backward-one", "kill-forward"]
    if model is moving.Together:  # and gradients are sent within backward
        flags = ("--no_shared_memory", "--accumulation_steps=2")
        faults += ["nan-once", "kill-sum", "kill-backward", "raise-forward-all"]
    told = check(tmp_path, work_of(model, *flags), *faults)
    if model is moving.Together:
        assert "can't be put back" not in told, "one of its parts would hide the others"


@pytest.mark.slow
def test_what_a_hook_of_the_optimizer_moves_costs_no_step(tmp_path: Path) -> None:
    work = work_of(moving.AfterUpdates)
    told = check(tmp_path, work, "raise-backward-one", "nan-once", "kill-forward")
    assert "can't be put back" not in told
    assert "for the first time" not in told


@pytest.mark.parametrize("model", [moving.ZeroedTarget, moving.DataTarget])
@pytest.mark.slow
def test_a_step_whose_changes_nobody_can_put_back_is_left_for_a_checkpoint(
    model: type, tmp_path: Path
) -> None:
    says = {"says": ("what a forward has changed can't be put back: going back",)}
    check(tmp_path / "raise", work_of(model, every=FAILS_AT), "raise-backward-one", **says)
    check(tmp_path / "kill", work_of(model, every=FAILS_AT), "kill-backward")


@pytest.mark.slow
def test_without_such_a_checkpoint_it_stops_and_the_same_command_continues(tmp_path: Path) -> None:
    work = work_of(moving.HiddenTarget, every=FAILS_AT)
    stops = {"ends": "stops", "code": "DDP-S01", "says": ("can't be retried",)}
    check(tmp_path / "raise", work, "raise-backward-one", **stops)
    check(tmp_path / "kill", work, "kill-backward")


@pytest.mark.parametrize("model", slow_after(1, moving.CHANGING))
def test_inputs_that_forward_changes_are_those_of_the_dataset_in_a_retry(
    model: type, tmp_path: Path
) -> None:
    check(tmp_path, work_of(model), "raise-backward-one", "memory-forward")


@pytest.mark.parametrize("model", moving.CHANGING_IN_PARTS)
@pytest.mark.slow
def test_so_they_are_where_a_step_has_several_batches(model: type, tmp_path: Path) -> None:
    flags = ("--accumulation_steps=2", "--continue_on_error", "--eval_every=1", "--epochs=2")
    check(tmp_path, work_of(model, *flags), "nan-once", "memory-backward")


class Writing(nn.Module):
    """Writes its tensors in the way that is given."""

    def __init__(self, write: Callable[["Writing"], object]) -> None:
        super().__init__()
        self.write = write
        self.layer = nn.Linear(4, 4)
        nn.init.zeros_(self.layer.bias)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(4))
        self.plain, self.held = torch.zeros(4), {"a": [torch.zeros(4)]}
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self)
        return self.norm(self.layer(inputs)) + self.plain


STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
WAYS: dict[str, tuple[Callable[[Any], object], set[str]]] = {
    "nothing": (lambda m: m.frozen * 2, set()),
    "in place": (lambda m: m.frozen.lerp_(m.layer.bias, 0.1), {"frozen"}),
    "all at once": (lambda m: torch._foreach_mul_([m.frozen, m.buffer], 2), {"frozen", "buffer"}),
    "a view": (lambda m: m.buffer[1:].copy_(m.frozen[1:]), {"buffer"}),
    "data": (lambda m: m.frozen.data.mul_(2), {"frozen"}),
    "numpy": (lambda m: torch.from_numpy(m.frozen.numpy()).mul_(2), {"frozen"}),
    "numpy alone": (lambda m: np.add(m.buffer.numpy(), 1, out=m.buffer.numpy()), {"buffer"}),
    "dlpack": (lambda m: torch.from_dlpack(m.buffer).mul_(2), {"buffer"}),
    "new memory": (lambda m: setattr(m.frozen, "data", torch.zeros(4)), {"frozen"}),
    "another buffer": (lambda m: setattr(m, "buffer", m.buffer * 2), {"buffer"}),
    "a weight": (lambda m: m.layer.bias.mul_(2), {"layer.bias"}),
    "a weight's data": (lambda m: m.layer.weight.data.clamp_(-1, 1), {"layer.weight"}),
    "an attribute": (lambda m: m.plain.mul_(2), {"plain"}),
    "another attribute": (lambda m: setattr(m, "plain", m.plain * 2), {"plain"}),
    "in containers": (lambda m: m.held["a"][0].mul_(2), {"held['a'][0]"}),
    "another in containers": (
        lambda m: m.held["a"].__setitem__(0, m.held["a"][0] * 2),
        {"held['a'][0]"},
    ),
}


def by_numpy(tensor: torch.Tensor) -> None:
    dense_parts(tensor)[-1].numpy()[:] = 7.0


INPUTS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "coo": (lambda: torch.eye(3).to_sparse(), by_numpy),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), by_numpy),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), by_numpy),
    "numpy": (lambda: torch.eye(3), by_numpy),
    "in containers": (lambda: {"a": [{"b": torch.eye(3)}]}, lambda i: i["a"][0]["b"].mul_(2)),
    "data": (lambda: torch.eye(3), lambda inputs: inputs.data.exp_()),
    "a view": (lambda: torch.eye(3), lambda inputs: inputs.t()[0].neg_()),
    "out": (lambda: torch.eye(3), lambda inputs: torch.sub(inputs, 1, out=inputs)),
    "dropout": (lambda: torch.eye(3), lambda inputs: nn.Dropout(0.3, inplace=True)(inputs)),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state)")
@pytest.mark.parametrize("way", INPUTS)
def test_an_input_of_any_layout_that_is_written_in_any_way_is_seen(way: str) -> None:
    make, write = INPUTS[way]
    effects = InputEffects(Batch(make(), torch.zeros(3), torch.arange(3)))
    assert not effects.are_changed()
    write(effects.batch.inputs)
    assert effects.are_changed()
    for mine, its in zip(tensors_of(effects.original.inputs), tensors_of(make()), strict=True):
        assert all(map(torch.equal, dense_parts(mine), dense_parts(its))), "a copy of its own"


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_is_found_whatever_the_values_and_undone(way: str) -> None:
    write, expected = WAYS[way]
    model, batch = Writing(write), Batch(torch.randn(6, 4), torch.zeros(6), torch.arange(6))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with untouched(model) as effects:
        model(batch.inputs).sum().backward()
        effects.run(lambda: model(batch.inputs).sum().backward(), InputEffects(batch), batch)
        assert effects.moving() == expected | STATISTICS
    trained = {"layer.weight", "layer.bias"}
    for name in before.keys() - trained:
        assert torch.equal(model.state_dict()[name], before[name]), name
    assert not any(bool(tensor.any()) for tensor in (model.plain, model.held["a"][0]))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "nothing"])
def test_what_moves_is_put_back_and_loaded_into_a_model_built_anew(way: str) -> None:
    write, expected = WAYS[way]
    model = Writing(lambda m: None)
    model.plain, model.held["a"][0] = torch.randn(4), torch.randn(4)
    torch.nn.init.normal_(model.layer.bias)
    torch.nn.init.normal_(model.buffer)
    torch.nn.init.normal_(model.frozen)
    buffers = MovingBuffers(model, sorted(expected | STATISTICS))
    copies = buffers.copies()
    saved = {name: tensor.clone() for name, tensor in buffers.to_save().items()}
    for _ in range(2):
        with torch.no_grad():
            write(model)
        buffers.put_back(copies)
        now = buffers.to_save()
        assert all(torch.equal(now[name], saved[name]) for name in saved)
    other = MovingBuffers(Writing(write), [])
    other.load(saved)
    assert all(torch.equal(other.to_save()[name], saved[name]) for name in saved)


def test_a_norm_that_begins_to_count_late_is_taken_up_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    buffers = MovingBuffers(model, [])
    assert buffers.take_up_written([]) == []
    expected = sorted(f"1.{name.removeprefix('norm.')}" for name in STATISTICS)
    assert sorted(buffers.take_up_written([model[1].num_batches_tracked])) == expected


def test_a_batch_and_a_weight_that_a_forward_writes_late_are_told() -> None:
    model = nn.Linear(4, 4)
    replica = Replica(model, MovingBuffers(model, []), MovingAttributes(model))
    writes = Writes(replica)
    batch = Batch({"a": [torch.zeros(6, 4)]}, torch.zeros(6), torch.arange(6))
    writes.begin([batch])
    model(batch.inputs["a"][0]).sum().backward()
    writes.note(reads_bits=True)
    assert writes.unsafe(num_forwards=2) == []
    batch.inputs["a"][0].add_(1)
    with torch.no_grad():
        model.bias.add_(1)
    writes.note(reads_bits=True)
    assert writes.unsafe(num_forwards=1) == ["the batch", "bias"]
    assert replica.inputs.are_copied
    writes.begin([batch])
    assert len(replica.buffers.copies()) == 1
    assert writes.unsafe(num_forwards=1) == []
