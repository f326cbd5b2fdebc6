"""Programs whose checkpoint can't be read or written."""

import errno
import os
import pickle
from pathlib import Path

import torch
from torch import nn

from tests.explain.reproducers import reproduce, reproduces, throw


class Settings:
    """Something that weights_only does not allow."""


@reproduces("checkpoint-module-prefix")
def checkpoint_module_prefix(rank: int, folder: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    nn.Linear(2, 2).load_state_dict({f"module.{name}": value for name, value in state.items()})


@reproduces("checkpoint-module-prefix")
def checkpoint_module_missing(rank: int, folder: Path) -> None:
    model = nn.Sequential()
    model.add_module("module", nn.Linear(2, 2))
    model.load_state_dict(nn.Linear(2, 2).state_dict())


@reproduces("checkpoint-compile-prefix")
def checkpoint_compile_prefix(rank: int, folder: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    nn.Linear(2, 2).load_state_dict({f"_orig_mod.{name}": value for name, value in state.items()})


@reproduces("checkpoint-weights-only")
def checkpoint_weights_only(rank: int, folder: Path) -> None:
    torch.save({"settings": Settings()}, folder / "a.pt")
    torch.load(folder / "a.pt")


@reproduces("checkpoint-device")
def checkpoint_device(rank: int, folder: Path) -> None:
    torch.save({"weight": torch.ones(2)}, folder / "a.pt")
    torch.load(folder / "a.pt", map_location="cuda:0")


@reproduces("checkpoint-corrupt")
def checkpoint_corrupt(rank: int, folder: Path) -> None:
    torch.save({"weight": torch.ones(1000)}, folder / "a.pt")
    os.truncate(folder / "a.pt", 900)
    torch.load(folder / "a.pt")


@reproduces("checkpoint-corrupt")
def checkpoint_empty(rank: int, folder: Path) -> None:
    (folder / "a.pt").write_bytes(b"")
    with (folder / "a.pt").open("rb") as file:
        pickle.load(file)


@reproduces("checkpoint-many-writers")
def checkpoint_many_writers(rank: int, folder: Path) -> None:
    os.mkdir(folder / "checkpoints")
    os.mkdir(folder / "checkpoints")


@reproduces("checkpoint-disk-full")
def checkpoint_disk_full(rank: int, folder: Path) -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


@reproduces("checkpoint-optimizer")
def checkpoint_optimizer(rank: int, folder: Path) -> None:
    state = torch.optim.SGD(nn.Linear(2, 2).parameters()).state_dict()
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).load_state_dict(state)


@reproduces("checkpoint-sharded")
def checkpoint_sharded(rank: int, folder: Path) -> None:
    from torch.distributed import checkpoint

    checkpoint.load({"weight": torch.ones(2)}, checkpoint_id=folder / "none", no_dist=True)


reproduce(
    "checkpoint-size", lambda folder: nn.Linear(2, 5).load_state_dict(nn.Linear(2, 2).state_dict())
)
reproduce(
    "checkpoint-keys",
    lambda folder: nn.Linear(2, 2).load_state_dict({"head.weight": torch.ones(2, 2)}),
)
reproduce("checkpoint-permission", lambda folder: torch.save({}, folder / "no" / "such" / "a.pt"))
reproduce("checkpoint-device", lambda folder: torch.set_rng_state(torch.ones(3)))
reproduce(
    "checkpoint-permission",
    lambda folder: throw(
        PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/scratch/runs/a.pt")
    ),
)
