"""Programs whose checkpoint can't be read or written."""

import errno
import os
import pickle
from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint

from tests.explain.reproducers import reproduces, throw


class Settings:
    """Something that weights_only does not allow."""


def load_one(name: str) -> None:
    nn.Linear(2, 2).load_state_dict({name: torch.ones(2, 2)})


@reproduces("checkpoint-weights-only")
def checkpoint_weights_only() -> None:
    torch.save({"settings": Settings()}, "a.pt")
    torch.load("a.pt")


@reproduces("checkpoint-device")
def checkpoint_device() -> None:
    torch.save({"weight": torch.ones(2)}, "a.pt")
    torch.load("a.pt", map_location="cuda:0")


@reproduces("checkpoint-corrupt")
def checkpoint_corrupt() -> None:
    torch.save({"weight": torch.ones(1000)}, "a.pt")
    os.truncate("a.pt", 900)
    torch.load("a.pt")


@reproduces("checkpoint-optimizer")
def checkpoint_optimizer() -> None:
    state = torch.optim.SGD(nn.Linear(2, 2).parameters()).state_dict()
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).load_state_dict(state)


reproduces("checkpoint-size")(lambda: nn.Linear(2, 5).load_state_dict(nn.Linear(2, 2).state_dict()))
reproduces("checkpoint-corrupt")(lambda: pickle.loads(b""))
reproduces("checkpoint-permission")(lambda: torch.save({}, "no/such/a.pt"))
reproduces("checkpoint-device")(lambda: torch.set_rng_state(torch.ones(3)))
reproduces("checkpoint-permission")(
    lambda: throw(PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/scratch/runs/a.pt"))
)
reproduces("checkpoint-keys")(lambda: load_one("head.weight"))
reproduces("checkpoint-module-prefix")(lambda: load_one("module.weight"))
reproduces("checkpoint-compile-prefix")(lambda: load_one("_orig_mod.weight"))
reproduces("checkpoint-disk-full")(lambda: Path("/dev/full").write_text("x"))
reproduces("checkpoint-many-writers")(lambda: [os.mkdir("checkpoints") for _ in range(2)])
reproduces("checkpoint-sharded")(
    lambda: checkpoint.load({"weight": torch.ones(2)}, checkpoint_id="none", no_dist=True)
)
