"""What forward changes beside gradients is found, put back at a retry, saved and resumed.

Tensors first; then plain attributes, which end as in an undisturbed run after a kill or a retry.
"""

import json
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
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
from hardened_ddp.errors import CheckpointMismatchError
from hardened_ddp.model.effects import InputEffects, untouched
from hardened_ddp.model.moving_attributes import MovingAttributes
from hardened_ddp.model.moving_buffers import MovingBuffers
from hardened_ddp.model.plain_values import as_json, copy_of, from_json
from hardened_ddp.model.replica import Replica
from hardened_ddp.step.gradient import Writes
from tests import moving_models as moving
from tests.drills.forked import forked_drills
from tests.harness.ranks import train
from tests.marks import slow_after

FLAGS = ("--batch_size=12", "--num_workers=0", "--max_steps=25", "--eval_every=0")
FAILS_AT = 8  # the forward in which a drill's fault happens, from 1


def work_of(model: type, *flags: str, **arguments: Any) -> Work:
    return Work(
        model=f"{model.__module__}:{model.__name__}",
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
def test_a_step_whose_changes_nobody_can_put_back_is_left_for_a_checkpoint(tmp_path: Path) -> None:
    work = work_of(moving.DataTarget, every=FAILS_AT)
    says = {"says": ("what a forward has changed can't be put back: going back",)}
    check(tmp_path / "raise", work, "raise-backward-one", **says)
    check(tmp_path / "kill", work, "kill-backward")


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
    "new in containers": (lambda m: m.held["a"].append(m.held["a"].pop() * 2), {"held['a'][0]"}),
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
    for tensor in (model.layer.bias, model.buffer, model.frozen):
        torch.nn.init.normal_(tensor)
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


class Mixed(nn.Module):
    """Classifies points; what it multiplies by depends on what it keeps beside its tensors."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_classes)
        self.build()

    def build(self) -> None:
        """Make what is kept."""

    def factor(self, inputs: torch.Tensor) -> float:
        raise NotImplementedError

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        factor = self.factor(inputs) if self.training else 1.0
        return self.layer(inputs) * factor


class Drawing(Mixed):
    def build(self) -> None:
        self.own, self.old = random.Random(3), np.random.RandomState(4)
        self.sources = [np.random.default_rng(1), np.random.Generator(np.random.Philox(2))]
        self.of_torch = {"noise": torch.Generator().manual_seed(5)}

    def factor(self, inputs: torch.Tensor) -> float:
        numbers = [source.random() for source in (self.own, *self.sources)]
        numbers += [self.own.gauss(0, 0.1), float(self.old.normal())]
        return 1.0 + sum(numbers) + float(torch.rand((), generator=self.of_torch["noise"]))


class Remembering(Mixed):
    def build(self) -> None:
        self.recent: deque[float] = deque([1.0, 2.0], maxlen=4)
        self.counts: Counter[str] = Counter()
        self.seen: set[int] = set()
        self.table: dict[Any, Any] = OrderedDict({(1, 2): [0.5, None]})

    def factor(self, inputs: torch.Tensor) -> float:
        self.recent.append(sum(self.recent) / 3)
        self.counts["forward"] += 1
        self.seen.add(self.counts["forward"] % 5)
        self.table[1, 2][0] *= 1.25
        self.table[self.counts["forward"]] = True
        return 1.0 + self.recent[0] + len(self.seen) / 9 + len(self.table) / 50


class Phase(Enum):
    FIRST = "first"
    SECOND = "second"


class Turning(Mixed):
    def build(self) -> None:
        self.phase, self.last, self.means = Phase.FIRST, float("nan"), np.zeros(3)
        self.pair: tuple[Any, ...] = (1, [2])

    def factor(self, inputs: torch.Tensor) -> float:
        self.phase = Phase.SECOND if self.phase is Phase.FIRST else Phase.FIRST
        self.pair[1][0] += 1
        self.pair = (self.pair[0] + 1, self.pair[1])
        self.last = -0.0 if self.last != self.last else self.last - 0.25
        self.means += np.arange(3) / 7
        value = self.pair[0] / 9 + self.pair[1][0] / 8 + self.last / 100 + float(self.means.sum())
        return value + (self.phase is Phase.FIRST)


@dataclass(slots=True)
class Slotted:
    temperature: float = 2.0


class Clock:
    """An object of the user's, with a generator, an object with slots and a list to consume."""

    def __init__(self) -> None:
        self.ticks, self.source = 0, random.Random(9)
        self.state, self.schedule = Slotted(), [0.5 + number / 7 for number in range(9)]

    def tick(self) -> float:
        self.ticks += 1
        self.state.temperature *= 0.9
        self.schedule.append(self.schedule.pop(0))
        return self.ticks / 5 + self.source.random() + self.state.temperature + self.schedule[0]


class Holding(Mixed):
    def build(self) -> None:
        self.clock, self.clocks = Clock(), [Clock()]

    def factor(self, inputs: torch.Tensor) -> float:
        return 1.0 + self.clock.tick() + self.clocks[0].tick()


class Late(Mixed):
    """Begins to count in a call that no trial makes, and draws from its generator only then."""

    def build(self) -> None:
        self.num_calls, self.num_late = 0, 0
        self.source = random.Random(1)

    def factor(self, inputs: torch.Tensor) -> float:
        self.num_calls += 1
        if self.num_calls % 4 == 0:
            self.num_late += 1
            self.source.random()
        return 1.0 + self.num_late / 3 + self.source.getstate()[1][-1] / 700


class Lazy(Mixed):
    """Makes what it keeps in its first forward."""

    def factor(self, inputs: torch.Tensor) -> float:
        if not hasattr(self, "made"):
            self.made = {"calls": 0, "source": random.Random(2)}
        self.made["calls"] += 1
        return 1.0 + self.made["calls"] / 5 + self.made["source"].random()


class Inner(nn.Module):
    def __init__(self, own: random.Random) -> None:
        super().__init__()
        self.own, self.num_calls = own, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return inputs * (1.0 + self.own.random() + self.num_calls / 9)


class Nested(Mixed):
    """Two modules draw from one generator."""

    def build(self) -> None:
        own = random.Random(8)
        self.parts = nn.Sequential(Inner(own), nn.Sequential(Inner(own)))

    def factor(self, inputs: torch.Tensor) -> float:
        return float(self.parts(torch.ones(())))


class Together(Mixed):
    """Has parts of all kinds."""

    def build(self) -> None:
        kinds = (Drawing, Nested, Remembering, Turning, Holding, Lazy)
        self.kinds = nn.ModuleList(kind() for kind in kinds)

    def factor(self, inputs: torch.Tensor) -> float:
        return sum(kind.factor(inputs) for kind in self.kinds)


@pytest.mark.parametrize("model", slow_after(1, [Together, Late]))
def test_a_fault_leaves_the_attributes_as_in_the_undisturbed_run(
    model: type[nn.Module], tmp_path: Path
) -> None:
    # seven windows of 12 samples, and one of a single sample: one rank has none
    work = work_of(model, "--batch_size=6", "--max_steps=15", "--eval_every=1")
    work = replace(work, dataset_args={"size": 85})
    check(tmp_path, work, "raise-backward-one", "kill-forward")


VALUES: list[Any] = [
    *(None, True, 3, -(2**80), "text", 0.1, -0.0, float("nan"), float("-inf")),
    *([1, [2.5]], (1, (None,)), {1, 2}, frozenset({"a"}), deque([1], maxlen=2)),
    {"a": 1, (1, 2): [3], None: {4}},
    np.arange(6.0).reshape(2, 3),
    np.float32(0.1),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_the_same_after_json(value: Any) -> None:
    copy = copy_of(value)
    again = from_json(json.loads(json.dumps(as_json(copy))), None)
    assert type(again) is type(value)
    assert copy_of(again) == copy
    assert repr(again) == repr(value)


class Counting(Mixed):
    """Counts by keys of which no file can say what they are."""

    def build(self) -> None:
        self.counts: dict[Any, int] = {Phase.FIRST: 0, (Phase.SECOND, 1): 0}
        self.more: dict[Any, int] = {}


def test_keys_that_json_does_not_give_back_are_those_of_the_model_or_refused() -> None:
    first, second = Counting(), Counting()
    kept, other = MovingAttributes(first), MovingAttributes(second)
    first.counts[Phase.FIRST] = 3
    other.load(json.loads(json.dumps(kept.state())))
    assert second.counts == {Phase.FIRST: 3, (Phase.SECOND, 1): 0}
    first.more[Phase.SECOND] = 1
    assert kept.changes()[2] == ["more"], "what can't be saved is named"
    with pytest.raises(CheckpointMismatchError, match="attribute more does not fit"):
        other.load(json.loads(json.dumps(kept.state())))


DAMAGED = [["list"], ["no such", 1], ["float", "x"], [[], 1], ["random", 3]]
DAMAGED += [["numpy generator", ["dict", [["bit_generator", "seed"]]]]]


@pytest.mark.parametrize("data", DAMAGED)
def test_what_was_not_written_so_is_refused(data: Any) -> None:
    with pytest.raises(CheckpointMismatchError, match="num_calls"):
        MovingAttributes(Late()).load({"num_calls": data})


class Opaque(Mixed):
    """Changes what can't be copied, and what differs on each rank."""

    def build(self) -> None:
        self.numbers, self.tensors, self.rows = iter(range(9**9)), [torch.zeros(())], 0.0

    def factor(self, inputs: torch.Tensor) -> float:
        self.tensors.append(self.tensors[-1] + 1)
        self.numbers = iter(range(next(self.numbers) + 5, 9**9))
        self.rows += float(inputs.detach().double().sum())
        return 1.0


def test_what_cannot_be_saved_or_differs_is_named_before_the_first_step(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--no_config", "--num_workers", "0", "--dataset", "tests.plugins:points"]
    argv += ["--model", "tests.model.test_effects:Opaque", "--batch_size", "4"]
    argv += ["--max_steps", "2", "--eval_every", "0", "--output_dir", str(tmp_path)]
    done = train(argv, 2).ok()
    lines = done.output.splitlines()
    unsaved, *_ = [line for line in lines if "which no checkpoint holds" in line]
    assert ": numbers." in unsaved
    [made] = [line for line in lines if "No checkpoint saves them" in line]
    assert ": tensors[1]." in made
    [own] = [line for line in lines if "to other values on each rank" in line]
    assert ": rows." in own
    first = next(place for place, line in enumerate(lines) if "epoch 1/" in line)
    assert max(lines.index(unsaved), lines.index(own), lines.index(made)) < first


class OfProcess:
    """Has a number that is right in this process only, beside one that changes."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.count, self.inner = descriptor, 0, Clock()


def test_what_an_object_has_as_it_was_built_is_no_part_of_a_checkpoint() -> None:
    models = [nn.Sequential(Mixed()) for _ in range(2)]
    kept = []
    for descriptor, model in enumerate(models, start=7):
        model[0].log = OfProcess(descriptor)
        kept.append(MovingAttributes(model))
    models[0][0].log.count = 3
    models[0][0].log.inner.extra = [4]
    kept[1].load(json.loads(json.dumps(kept[0].state())))
    log = models[1][0].log
    assert (log.descriptor, log.count, log.inner.extra) == (8, 3, [4])
