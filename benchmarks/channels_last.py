#!/usr/bin/env python3
"""Channels last or not: how fast is each on the CPU, and what does the rule of a run say?

    python benchmarks/channels_last.py                    25 models and batches: about 3 minutes
    python benchmarks/channels_last.py --only resnet18

Each model does whole steps (forward, backward, SGD) in turns with and without channels last, on one
thread. gain: the ratio of the fastest quarters. values: of the images before and after the
convolutions of a micro-batch, as a multiple of the weights in kernels larger than 1x1; from 1.0 on
`--channels_last auto` uses channels last. The exit status is 1 if it then is slower than 0.95 x.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import describe
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.foreign_code import import_torchvision
from hardened_ddp.model.precision import Precision
from hardened_ddp.model.zoo import SimpleCNN
from hardened_ddp.preflight.memory_format import count_values, pays
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.task.classification import Classification

CPU = torch.device("cpu")
_SLOWEST = 0.95
"""WHY not 1: two runs of one model differ by a few percent on a machine in use."""


def wide(channels: int, kernel: int) -> nn.Module:
    """Four convolutions of as many channels."""
    layers: list[nn.Module] = []
    for before in (3, channels, channels, channels):
        layers += [nn.Conv2d(before, channels, kernel, padding=kernel // 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def cases() -> Mapping[str, tuple[Callable[[], nn.Module], tuple[int, int, int], list[int]]]:
    """Return by name: the model, the shape of an image, and the batches."""
    import_torchvision()  # before its parts: it may be built for another torch
    from torchvision import models

    def named(name: str) -> Callable[[], nn.Module]:
        more = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
        return lambda: models.get_model(name, num_classes=10, **more)

    return {
        "simple_cnn": (
            lambda: SimpleCNN(num_classes=10, input_shape=(1, 28, 28)),
            (1, 28, 28),
            [8, 64],
        ),
        "resnet18": (named("resnet18"), (3, 64, 64), [2, 8, 32]),
        "resnet18 of 32x32": (named("resnet18"), (3, 32, 32), [8, 128]),
        "resnet18 of 224x224": (named("resnet18"), (3, 224, 224), [4]),
        "resnet50": (named("resnet50"), (3, 64, 64), [2, 16]),
        "vgg11": (named("vgg11"), (3, 64, 64), [4]),
        "densenet121": (named("densenet121"), (3, 64, 64), [4]),
        "googlenet": (named("googlenet"), (3, 96, 96), [4]),
        "mobilenet_v3_small": (named("mobilenet_v3_small"), (3, 96, 96), [2, 8]),
        "efficientnet_b0": (named("efficientnet_b0"), (3, 96, 96), [8]),
        "shufflenet_v2_x1_0": (named("shufflenet_v2_x1_0"), (3, 96, 96), [8]),
        "squeezenet1_1": (named("squeezenet1_1"), (3, 96, 96), [8]),
        "convnext_tiny": (named("convnext_tiny"), (3, 96, 96), [2]),
        "512 channels of 4x4": (lambda: wide(512, 3), (3, 4, 4), [4, 16]),
        "256 channels, 5x5 kernels": (lambda: wide(256, 5), (3, 8, 8), [8]),
        "512 channels, 1x1 kernels": (lambda: wide(512, 1), (3, 4, 4), [4]),
        "8 channels, 7x7 kernels": (lambda: wide(8, 7), (3, 32, 32), [16]),
    }


def measure(model: nn.Module, batch: Batch, seconds: float) -> float:
    """Return the speed with channels last relative to that without."""
    steps = {}
    for is_last in (False, True):
        own, inputs = copy.deepcopy(model), batch.inputs
        if is_last:
            own = own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        steps[is_last] = (own, inputs, torch.optim.SGD(own.parameters(), lr=0.01))
    times: dict[bool, list[float]] = {False: [], True: []}
    ends_at = time.perf_counter() + seconds
    while time.perf_counter() < ends_at or len(times[True]) < 5:
        for is_last, (own, inputs, optimizer) in steps.items():
            started_at = time.perf_counter()
            loss = nn.functional.cross_entropy(own(inputs), batch.targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch
            optimizer.step()
            times[is_last].append(time.perf_counter() - started_at)
    fast = {key: sorted(values[1:])[len(values) // 4] for key, values in times.items()}
    return fast[False] / fast[True]


def main() -> int:
    """Measure, print, and say whether the rule held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--seconds", type=float, default=6.0, help="per model and batch")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(", ".join(f"{name} {value}" for name, value in describe().items()), flush=True)
    rows = []
    for name, (build, shape, sizes) in cases().items():
        if options.only not in name:
            continue
        for size in sizes:
            torch.manual_seed(0)
            model = build()
            targets = torch.arange(size) % 10
            batch = Batch(torch.randn(size, *shape), targets, torch.arange(size))
            task, group = Classification(num_classes=10), Group(Launch(), CPU)
            trial = Trial(model, task, Precision("off", CPU), group)
            [(num_weights, num_values)] = count_values(trial, batch)
            is_used = pays(trial, num_weights, num_values)
            gain = measure(model, batch, options.seconds)
            rows.append({"model": name, "batch": size, "is_used": is_used, "gain": gain})
            rows[-1]["values"] = values = num_values / max(1, num_weights)
            used = "used" if is_used else "not used"
            print(f"{name:26}{size:4}  values {values:8.2f}  {used:9} gain {gain:.2f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    return 1 if any(row["is_used"] and row["gain"] < _SLOWEST for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
