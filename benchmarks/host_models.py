"""The models and samples of host_time.py, and its bare loop: tiny tensors, many of them."""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.gpu import works
from benchmarks.host_time import BATCH_SIZE, STEPS, WARM_UP, Clock
from hardened_ddp.step import async_device, parts

_NORMS, _WIDTH = 53, 4  # as many as a ResNet-50 has
_GPT = works.Size(batch_size=BATCH_SIZE, length=16, vocabulary=64, width=32, depth=12)


class Norms(nn.Module):
    """160 parameters, and 159 buffers that each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        widths = [works.INPUTS, *[_WIDTH] * _NORMS]
        self.layers = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(before, _WIDTH, bias=False), nn.BatchNorm1d(_WIDTH))
                for before in widths[:-1]
            ]
        )
        self.head = nn.Linear(_WIDTH, works.CLASSES, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        logits: torch.Tensor = self.head(self.layers(inputs))
        return logits


class HostEvent:
    """An event on the CPU, which runs its work at once."""

    def is_reached(self) -> bool:
        """Return that the device is past it."""
        return True

    def wait(self) -> None:
        """Do not wait."""


class Samples(works.Samples):
    """Samples for one of the models, by --dataset."""

    def __init__(self, *, train: bool, work: str) -> None:
        kind = "gpt" if work == "gpt" else "mlp"
        num_samples = (WARM_UP + STEPS) * BATCH_SIZE * int(os.environ.get("WORLD_SIZE", "1"))
        super().__init__(train=train, work=kind, small=True, num_samples=num_samples)


def build(work: str) -> nn.Module:
    """Build a model and begin to measure, for --model; the run takes a GPU's branches."""
    parts.ASYNC_DEVICES = (*parts.ASYNC_DEVICES, "cpu")
    async_device.Event = HostEvent  # type: ignore[misc, assignment]
    _measure()
    return _model(work)


def bare_loop(work: str) -> None:
    """Train as DDP's tutorial does."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.FileStore(tempfile.NamedTemporaryFile(delete=False).name, 1)  # noqa: SIM115
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    _measure()
    samples = Samples(train=True, work=work)
    network = DistributedDataParallel(_model(work))
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    sampler: DistributedSampler[Any] = DistributedSampler(samples)
    for inputs, labels in DataLoader(samples, batch_size=BATCH_SIZE, sampler=sampler):
        optimizer.zero_grad()
        loss = cross_entropy(network(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


def _model(work: str) -> nn.Module:
    return works.Gpt(_GPT) if work == "gpt" else Norms()


def _measure() -> None:
    register_optimizer_step_post_hook(Clock().after_step)
