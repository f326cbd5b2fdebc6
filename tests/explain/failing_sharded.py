"""Failures of FSDP, on one rank with gloo."""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.explain.reproducers import reproduces


@reproduces("fsdp-requires-grad", group=True)
def fsdp_requires_grad() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False)


@reproduces("fsdp-past-wrapper", group=True)
def fsdp_past_wrapper() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    model[0](torch.ones(2, 4))
