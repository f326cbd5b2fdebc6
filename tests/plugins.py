"""Datasets and models that tests plug in by import path, as a user would.

What goes wrong in them is what goes wrong in drills: see with_fault. Those of --compile compile
without a C++ compiler, by torch's own tracing: all of torch.compile runs, but for its code.
"""

import gc
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from ddp_drills.injections import Injection
from ddp_drills.injectors import FAULTS, change_output, do, flip_bit
from hardened_ddp.guard.neighbours import Neighbour
from hardened_ddp.model.zoo import BUILT_IN


class Points(Dataset[tuple[torch.Tensor, int]]):
    """size points in a plane, of 2 classes; those listed in broken can't be read."""

    num_classes = 2

    def __init__(self, size: int, broken: tuple[int, ...] = (), said: str = "broken file") -> None:
        self.size, self.broken, self.said = size, broken, said

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.broken:
            raise ValueError(f"{self.said} {index}")
        generator = torch.Generator().manual_seed(index)
        point = torch.randn(3, generator=generator)
        return point, int(point[0] > 0)


def points(train: bool, size: int = 40, broken: tuple[int, ...] = ()) -> Points:
    return Points(size, tuple(broken)) if train else Points(17)


def points_without_a_package(train: bool) -> Points:
    """Give points, and keep a package from being imported, as programs do."""
    sys.modules["package_of_nobody"] = None  # type: ignore[assignment]  # Python's own way
    return points(train)


def points_that_write(train: bool) -> Points:
    """Give points of which none can be read, for a reason that writes to the terminal."""
    return Points(40, tuple(range(40)), "\x1b]0;owned\x07 it can't be read")


class Made(Dataset[tuple[Any, Any]]):
    """Samples that a function makes of random numbers and their index."""

    def __init__(self, size: int, make: Callable[..., Any], num_classes: int | None = None) -> None:
        self.size, self.make = size, make
        if num_classes is not None:
            self.num_classes = num_classes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.make(torch.Generator().manual_seed(index), index)


def points_to_test(train: bool, broken: tuple[int, ...] = (), none: bool = False) -> Points | None:
    """Give points of which test samples are broken, or none is there."""
    return Points(40) if train else None if none else Points(17, tuple(broken))


class SlowPoints(Points):
    """Take pause_s to read: all of them or the one at index, with pace while that file is there,
    with a marker once."""

    def __init__(
        self, size: int, pause_s: float, *, index: int = -1, pace: str = "", marker: str = ""
    ) -> None:
        super().__init__(size)
        self.pause_s, self.index, self.pace, self.marker = pause_s, index, pace, marker

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        is_slow = self.index in (-1, index) and (not self.pace or os.path.exists(self.pace))
        if is_slow and is_first_time(self.marker):
            time.sleep(self.pause_s)
        return super().__getitem__(index)


def paced_points(train: bool, pace: str) -> Points:
    return SlowPoints(400, 0.02, pace=pace) if train else Points(17)


def points_slow_to_test(train: bool, pace: str) -> Points:
    return Points(40) if train else SlowPoints(200, 0.5, pace=pace)


def points_that_hang(
    train: bool, index: int, marker: str = "", size: int = 40, pause_s: float = 1e6
) -> Points:
    return SlowPoints(size, pause_s, index=index, marker=marker) if train else Points(17)


def is_first_time(marker: str) -> bool:
    """Say whether the file marker is not there yet, and make it; always, without a name."""
    try:
        if marker:
            open(marker, "x").close()
    except FileExistsError:
        return False
    return True


def cause_fault(kind: str) -> None:
    """Have a fault of the drills happen in this process, without a report of faulthandler."""
    for number in (signal.SIGSEGV, signal.SIGBUS):
        signal.signal(number, signal.SIG_DFL)
    FAULTS[kind]()


class FaultyPoints(Points):
    """Points of which some are wrong: nan, infinite, label, half, broken. flags: of their files."""

    def __init__(self, size: int, faults: dict[int, str], flags: str) -> None:
        super().__init__(size)
        self.faults, self.flags = faults, flags
        self.files = [f"{flags}/point-{index}" for index in range(size)]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        point, label = super().__getitem__(index)
        match self.faults.get(index, ""):
            case "nan" | "infinite" as value:
                point[1] = float(value[:3])
            case "label":
                return point, 7
            case "half":
                return point, label + 0.5  # type: ignore[return-value]  # that is the fault
            case "broken":
                raise ValueError(f"broken file {index}")
        return point, label


def faulty_points(
    train: bool,
    flags: str,
    size: int = 40,
    faults: dict[int, str] | None = None,
    test_faults: dict[int, str] | None = None,
) -> Points:
    wanted = (faults if train else test_faults) or {}
    numbered = {int(index): kind for index, kind in wanted.items()}
    return FaultyPoints(size if train else 17, numbered, flags)


class Forwards:
    """The number of forwards of a model in this process, with those of retries and most trials.

    WHY no plain attribute: a retry would put it back, and the fault of one moment come again.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __get__(self, model: nn.Module, kind: type) -> int:
        return self._counts[id(model)]

    def __set__(self, model: nn.Module, count: int) -> None:
        # WHY: the trial that looks at each operator is one more, and only of some models
        callers = (frame.f_code.co_name for frame, _ in traceback.walk_stack(None))
        if not count or "_look_closer" not in callers:
            self._counts[id(model)] = count


class Plain(nn.Module):
    """One layer, which counts its forwards of training."""

    num_forwards = Forwards()

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer, self.num_forwards = nn.Linear(3, num_classes), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        return self.layer(inputs)


def with_fault(kind: str, values: torch.Tensor) -> torch.Tensor:
    """Have a fault of the drills happen to values of a forward, or in their backward."""
    if kind.endswith(" in backward"):
        fault = Injection(kind=kind.removesuffix(" in backward"), phase="backward")
        values.register_hook(lambda gradient: do(fault, None, 0, gradient))
        return values
    if kind == "nan":
        return change_output("nan", values)  # type: ignore[no-any-return]  # as it got a tensor
    if kind in ("sleep", "hold"):
        hang(kind)
    FAULTS[kind]()
    return values


def hang(how: str) -> None:
    """Never come back, asleep or with Python's lock in hand."""
    if how == "hold":
        re.match(r"(a?){64}a{64}", "a" * 64)
    FAULTS["hang"]()


class Faulty(Plain):
    """Has a fault in the forwards first to last, on one rank or on all; with a marker only once."""

    def __init__(
        self,
        num_classes: int,
        kind: str = "nan",
        rank: int | None = None,
        first: int = 8,
        last: int = 10**9,
        marker: str = "",
    ) -> None:
        super().__init__(num_classes)
        mine = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        self.is_it = rank is None or mine == str(rank)
        self.kind, self.first, self.last, self.marker = kind, first, last, marker

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits = super().forward(inputs)
        is_now = self.training and self.is_it and self.first <= self.num_forwards <= self.last
        return with_fault(self.kind, logits) if is_now and is_first_time(self.marker) else logits


def dying(num_classes: int, forward_number: int = 3) -> Faulty:
    return Faulty(num_classes, "kill itself", 1, forward_number, forward_number)


def hanging(
    num_classes: int, rank: int = 1, forward_number: int = 12, how: str = "sleep", marker: str = ""
) -> Faulty:
    return Faulty(num_classes, how, rank, forward_number, forward_number, marker)


def hanging_unseen(num_classes: int, **how: Any) -> Faulty:
    """The same, and the watch of rank 0 has run for too short a time to see that one is silent."""
    if os.environ.get("RANK") == "0":
        Neighbour.is_lost = property(lambda _: False)  # type: ignore[assignment,method-assign]
    return hanging(num_classes, **how)


class OwnLoss(nn.Module):
    """Computes its loss itself when it gets labels."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_classes)

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Fading(Plain):
    """Stops using its second layer after a number of forwards, on one rank only."""

    def __init__(self, num_classes: int, last: int = 8) -> None:
        super().__init__(num_classes)
        self.second, self.last = nn.Linear(num_classes, num_classes), last

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(inputs)
        if self.num_forwards > self.last and os.environ.get("RANK", "0") != "0":
            return hidden
        return self.second(hidden)


def paced(
    num_classes: int, input_shape: tuple[int, ...], inner: str = "simple_cnn", pause_s: float = 0.02
) -> nn.Module:
    """Give a built-in model that pauses before each forward in training.

    So a run of few steps lasts as long as it takes to cause a fault in it, on any machine.
    """
    model = BUILT_IN[inner](num_classes=num_classes, input_shape=input_shape)
    model.register_forward_pre_hook(lambda module, _: time.sleep(pause_s * module.training))
    return model


def paced_mlp(num_classes: int, input_shape: tuple[int, ...], pause_s: float = 0.02) -> nn.Module:
    return paced(num_classes, input_shape, "mlp", pause_s)


class FailingOnce(nn.Module):
    """Fails once in each forward that is listed for its rank, in one of several ways.

    It has dropout and BatchNorm: a step that is retried must get the same random numbers, and
    the statistics that it began with.
    """

    num_forwards = Forwards()

    def __init__(self, num_classes: int, faults: dict[str, dict[str, str]] | None = None) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.3)
        self.hidden, self.layer = nn.Linear(3, 8), nn.Linear(8, num_classes)
        mine = {str(rank): kinds for rank, kinds in (faults or {}).items()}
        mine = mine.get(os.environ.get("RANK", "0"), {})
        self.faults = {int(number): kind for number, kind in mine.items()}
        self.num_forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        kind = self.faults.get(self.num_forwards, "") if self.training else ""
        hidden = self.drop(self.hidden(self.norm(inputs)).relu())
        if kind.endswith(" in backward"):  # of the first layer: the second one's gradient is there
            hidden = with_fault(kind, hidden)
        logits: torch.Tensor = self.layer(hidden)
        if kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory, as a test has it")
        return with_fault(kind, logits) if kind and not kind.endswith(" in backward") else logits


class Greedy(Plain):
    """Has no memory for more than most samples at once, on rank 1, after its first forwards."""

    def __init__(self, num_classes: int, most: int = 1000, num_first: int = 8) -> None:
        super().__init__(num_classes)
        self.most = most if os.environ.get("RANK") == "1" else 1000
        self.num_first = num_first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits = super().forward(inputs)
        if self.num_forwards > self.num_first and self.training and len(inputs) > self.most:
            FAULTS["memory"]()
        return logits


class Hungry(nn.Module):
    """Takes a fifth of the GPU's free memory for each sample: four fit, and eight don't."""

    def __init__(self, num_classes: int, phase: str = "forward") -> None:
        super().__init__()
        self.layer = nn.Linear(3, num_classes)
        self.phase = phase
        self.sample_bytes = torch.cuda.mem_get_info()[0] // 5

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(inputs)
        if self.training and self.phase == "forward":
            self._take(len(inputs))
        elif self.training:
            logits.register_hook(lambda gradient: self._take(len(inputs)))
        return logits

    def _take(self, num_samples: int) -> None:
        torch.empty(num_samples * self.sample_bytes, dtype=torch.uint8, device="cuda")


class Picky(Plain):
    """Raises whenever one certain sample of Points is among its inputs."""

    def __init__(self, num_classes: int, sample: int = 13) -> None:
        super().__init__(num_classes)
        self.sample = Points(40)[sample][0]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and bool((inputs == self.sample).all(dim=1).any()):
            raise ValueError("I do not like this one")
        return super().forward(inputs)


class SlowAtFirst(Plain):
    """Takes two seconds for one of its first forwards, and for each one in an evaluation."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training or self.num_forwards == 4:
            time.sleep(2)
        return super().forward(inputs)


class Straggling(Plain):
    """Takes 40 ms for a forward on rank 1, and 10 ms on the others."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04 if os.environ.get("RANK") == "1" else 0.01)
        return super().forward(inputs)


class Spoiler(nn.Module):
    """Passes values on; while it is on, nan or a gradient of inf instead."""

    kind = ""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.kind == "gradient":
            values = values.clone()
            values.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
            return values.clone()  # so that the gradient of the output is right
        return values * float("nan") if self.kind == "nan" else values


class Spoiled(nn.Module):
    """Its second block spoils numbers in the forwards first to last, on one rank only."""

    num_forwards = Forwards()

    def __init__(
        self, num_classes: int, kind: str = "", rank: int = 1, first: int = 8, last: int = 10**9
    ) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 6), Spoiler(), nn.ReLU(inplace=True)) for size in (3, 6)
        )
        self.head = nn.Linear(6, num_classes)
        is_it = os.environ.get("RANK", "0") == str(rank)
        self.kind, self.first, self.last = kind if is_it else "", first, last
        self.num_forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        is_on = self.training and self.first <= self.num_forwards <= self.last
        self.blocks[1][1].kind = self.kind if is_on else ""
        hidden = self.drop(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        if is_on and self.kind == "own":
            hidden = hidden / 0 * 0
        return self.head(hidden)


class Flipping(nn.Module):
    """A bit of its memory flips at one forward, on one rank only: before it is used or after.

    what: weight; nan, the exponent's bit that makes the weight enormous; or state, a number that
    the optimizer keeps.
    """

    num_forwards = Forwards()

    def __init__(
        self,
        num_classes: int,
        at: int = 0,
        rank: int = 1,
        what: str = "weight",
        after: bool = False,
    ) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(3, 6), nn.Dropout(0.2)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, num_classes)
        is_it = os.environ.get("RANK", "0") == str(rank)
        self.at, self.what, self.after = at if is_it else -1, what, after
        self.num_forwards = 0
        # WHY there: nothing of this step needs the first layer's weight any more
        self.first.weight.register_hook(lambda gradient: self._flip(after=True))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        self._flip(after=False)
        return self.head(self.drop(self.norm(self.first(inputs)).relu()))

    def _flip(self, *, after: bool) -> None:
        if not self.training or self.num_forwards != self.at or after != self.after:
            return
        values = self.first.weight.data
        if self.what == "state":
            optimizers = (o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer))
            values = next(optimizers).state[self.first.weight]["exp_avg"]
        flip_bit(values, 30 if self.what == "nan" else 21)


def number(line: str) -> int:
    """Make a sample of a line: for --dataset_args '{transform: tests.plugins:number}'."""
    return int(line)


def length_of(line: str) -> tuple[torch.Tensor, int]:
    return torch.tensor([float(len(line))]), len(line) % 2


class Norming(nn.Module):
    """As SyncBatchNorm: a collective in each forward of training, whatever the size of the batch.

    fails_at: the forward of training, those of the trials too, in which rank 1 raises.
    """

    num_forwards = Forwards()

    def __init__(self, fails_at: int = -1, all_modes: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.fails_at, self.all_modes, self.num_forwards = fails_at, all_modes, 0

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.num_forwards += self.training
        if self.num_forwards == self.fails_at and dist.is_initialized() and dist.get_rank() == 1:
            raise ValueError("a fault of this model")
        if dist.is_initialized() and (self.training or self.all_modes):
            points = points - self.mean(points)
        return self.layer(points)

    def mean(self, points: torch.Tensor) -> torch.Tensor:
        sums = torch.stack([points.sum(), torch.tensor(float(points.numel()))])
        dist.all_reduce(sums)
        return sums[0] / sums[1]


class NormingTests(Norming):
    """The other way round: a collective in each forward of evaluation, and none in training."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and not self.training:
            dist.all_reduce(points.sum())
        return self.layer(points)


class Gathering(Norming):
    """As a contrastive loss: it gathers the features of all ranks' samples."""

    def mean(self, points: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(points) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, points)
        return torch.cat(parts).mean(0)


class Summing(Norming):
    """Gathers by a sum with zeros in the places of the other ranks, whose gradient torch knows."""

    def mean(self, points: torch.Tensor) -> torch.Tensor:
        parts = points.new_zeros(dist.get_world_size(), *points.shape)
        parts[dist.get_rank()] = points
        dist.all_reduce(parts)
        return parts.flatten(0, 1).mean(0)


class GatheringMeans(Norming):
    """Gathers a number of each rank, whatever the size of its batch."""

    def mean(self, points: torch.Tensor) -> torch.Tensor:
        means = [torch.empty(()) for _ in range(dist.get_world_size())]
        dist.all_gather(means, points.mean())
        return torch.stack(means).mean()


BACKEND = "aot_eager"


def tell(what: Any) -> None:
    """Print which part of a model was compiled. what: as torch describes it."""
    if what.callback_trigger.name == "DYNAMO":  # else the backward of such a part
        print("compiled part", what.compile_id.partition("/")[0], flush=True)


class Compiled(nn.Module):
    """A network for the digits, of 2 MB: so torch splits it by DDP's buckets."""

    def __init__(self, num_classes: int, *, width: int = 600, spare: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, num_classes)
        self.spare = nn.Linear(2, 2) if spare else None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        torch._dynamo.callback.on_compile_end(tell)
        super().compile(*args, **{**kwargs, "backend": BACKEND})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(images.flatten(1)).relu())


class NormingTestsCompiled(NormingTests):
    """A collective in each forward of evaluation, none in training, and all of it compiled."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **{**kwargs, "backend": BACKEND})
