"""Plain attributes that change in forward end as in an undisturbed run, after a kill or a retry."""

import random
from collections import Counter, OrderedDict, deque
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from drills.faults import find
from drills.work import Work
from tests.forked_drills import forked_drills


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
        logits: torch.Tensor = self.layer(inputs) * factor
        return logits


class Counting(Mixed):
    def build(self) -> None:
        self.num_calls = 0

    def factor(self, inputs: torch.Tensor) -> float:
        self.num_calls += 1
        return 1.0 + self.num_calls / 7


class Drawing(Mixed):
    def build(self) -> None:
        self.own = random.Random(3)

    def factor(self, inputs: torch.Tensor) -> float:
        return 1.0 + self.own.random() + self.own.gauss(0, 0.1)


class DrawingByNumpy(Mixed):
    def build(self) -> None:
        self.sources = [np.random.default_rng(1), np.random.Generator(np.random.Philox(2))]
        self.old = np.random.RandomState(4)

    def factor(self, inputs: torch.Tensor) -> float:
        numbers = [source.random() for source in self.sources]
        return 1.0 + sum(numbers) + float(self.old.normal())


class DrawingByTorch(Mixed):
    def build(self) -> None:
        self.sources = {"noise": torch.Generator().manual_seed(5)}

    def factor(self, inputs: torch.Tensor) -> float:
        return 1.0 + float(torch.rand((), generator=self.sources["noise"]))


class Averaging(Mixed):
    def build(self) -> None:
        self.mean, self.last = 0.0, float("nan")

    def factor(self, inputs: torch.Tensor) -> float:
        self.mean = 0.9 * self.mean + 0.1 * float(self.num_rows)
        self.last = -0.0 if self.last != self.last else self.last - 0.25
        return 1.0 + self.mean + self.last / 100

    num_rows = 6


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
        self.phase, self.is_on, self.label, self.nothing = Phase.FIRST, False, "a", None
        self.pair: tuple[Any, ...] = (1, [2])

    def factor(self, inputs: torch.Tensor) -> float:
        self.phase = Phase.SECOND if self.phase is Phase.FIRST else Phase.FIRST
        self.is_on = not self.is_on
        self.label = chr(97 + (ord(self.label) - 96) % 26)
        self.nothing = None if self.nothing is not None else 3  # type: ignore[assignment]
        self.pair[1][0] += 1
        self.pair = (self.pair[0] + 1, self.pair[1])
        value = ord(self.label) / 40 + self.pair[0] / 9 + self.pair[1][0] / 8
        return value + (self.phase is Phase.FIRST) + 2 * self.is_on + (self.nothing or 0)


class Clock:
    """An object of the user's, with a generator of its own."""

    def __init__(self) -> None:
        self.ticks, self.source = 0, random.Random(9)

    def tick(self) -> float:
        self.ticks += 1
        return self.ticks / 5 + self.source.random()


class Holding(Mixed):
    def build(self) -> None:
        self.clock, self.clocks = Clock(), [Clock()]

    def factor(self, inputs: torch.Tensor) -> float:
        return 1.0 + self.clock.tick() + self.clocks[0].tick()


class Arrays(Mixed):
    def build(self) -> None:
        self.mean = np.zeros(3)
        self.most = np.float32(0.5)

    def factor(self, inputs: torch.Tensor) -> float:
        self.mean += np.arange(3) / 7
        self.most = np.float32(self.most * 1.5 % 3)
        return 1.0 + float(self.mean.sum()) + float(self.most)


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


MODELS = [Counting, Drawing, Nested, Late, DrawingByNumpy, DrawingByTorch, Averaging, Remembering]
MODELS += [Turning, Holding, Arrays, Lazy]
FAULTS = ["raise-backward-one", "kill-forward", "nan-once", "kill-all"]


CASES = [("raise-backward-one", Remembering), ("kill-all", DrawingByNumpy)]
CASES += [(f, m) for f in FAULTS for m in MODELS if (f, m) not in CASES]


@pytest.mark.parametrize(
    ("fault", "model"),
    CASES[:2] + [pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:]],
)
def test_a_fault_leaves_the_attributes_as_in_the_undisturbed_run(
    fault: str, model: type[nn.Module], tmp_path: Path
) -> None:
    work = Work(
        model=f"tests.test_moving_attributes:{model.__name__}",
        dataset="tests.plugins:points",
        # 30 windows of 12 and one of 7: uneven; one of 1: without a sample for a rank
        dataset_args={"size": 85},
        flags=("--batch_size=6", "--num_workers=0", "--max_steps=15", "--eval_every=1"),
    )
    found = find(fault)
    assert found is not None, fault
    verdict = forked_drills(tmp_path, work=work).run(found)
    assert verdict.passed, verdict
