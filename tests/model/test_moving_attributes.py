"""Plain attributes that change in forward end as in an undisturbed run, after a kill or a retry."""

import json
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddp_drills.work import Work
from hardened_ddp.errors import CheckpointMismatchError
from hardened_ddp.model.moving_attributes import MovingAttributes
from hardened_ddp.model.plain_values import as_json, copy_of, from_json
from tests.harness.ranks import train
from tests.marks import slow_after
from tests.model.test_effects import check


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


FAULTS = ("raise-backward-one", "kill-forward", "nan-once", "kill-all")
CASES = [(Remembering, FAULTS[:1]), (Drawing, FAULTS[-1:]), (Together, FAULTS), (Late, FAULTS[:2])]


@pytest.mark.parametrize("case", slow_after(2, CASES), ids=lambda case: case[0].__name__)
def test_a_fault_leaves_the_attributes_as_in_the_undisturbed_run(
    case: tuple[type[nn.Module], Sequence[str]], tmp_path: Path
) -> None:
    model, faults = case
    work = Work(
        model=f"tests.model.test_moving_attributes:{model.__name__}",
        dataset="tests.plugins:points",
        # seven windows of 12 samples, and one of a single sample: one rank has none
        dataset_args={"size": 85},
        flags=("--batch_size=6", "--num_workers=0", "--max_steps=15", "--eval_every=1"),
    )
    check(tmp_path, work, *faults)


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


@pytest.mark.parametrize(
    "data",
    [
        ["list"],
        ["no such", 1],
        ["float", "x"],
        [[], 1],
        ["random", 3],
        ["numpy generator", ["dict", [["bit_generator", "seed"]]]],
    ],
)
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
    argv += ["--model", "tests.model.test_moving_attributes:Opaque", "--batch_size", "4"]
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
