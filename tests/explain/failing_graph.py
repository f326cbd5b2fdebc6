"""Programs whose model or graph does not fit DDP."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed import get_rank
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.explain.reproducers import reproduce, reproduces


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        return self.second(y) if both else y


def train(model: nn.Module, **given: bool) -> None:
    for _ in range(2):
        model(torch.ones(2, 4), **given).sum().backward()


@reproduces("graph-unused", num_ranks=2, guilty=1)
def graph_unused_on_one(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(TwoLayers(), find_unused_parameters=False)
    if rank == 1:
        train(model, both=False)
    else:
        train(model)


@reproduces("graph-unused", num_ranks=2)
def graph_unused_in_detail(rank: int, folder: Path) -> None:
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    train(DistributedDataParallel(TwoLayers()), both=False)


@reproduces("graph-static-changed", num_ranks=1, group=True)
def graph_static_changed(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(TwoLayers(), static_graph=True)
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(2):
        model(torch.ones(2, 4), both=False).sum().backward()


@reproduces("graph-ready-twice", num_ranks=1, group=True)
def graph_ready_twice(rank: int, folder: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.layer, x, use_reentrant=True)
            return checkpoint(self.layer, x, use_reentrant=True)  # type: ignore[no-any-return]

    model = DistributedDataParallel(Twice(), find_unused_parameters=True)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()


@reproduces("graph-inplace", num_ranks=1, group=True)
def graph_inplace(rank: int, folder: Path) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y += 1
    y.sum().backward()


@reproduces("graph-backward-twice")
def graph_backward_twice(rank: int, folder: Path) -> None:
    loss = nn.Linear(2, 2)(torch.ones(1, 2)).exp().sum()
    loss.backward()
    loss.backward()


@reproduces("graph-inference-mode")
def graph_inference_mode(rank: int, folder: Path) -> None:
    with torch.inference_mode():
        inputs = torch.ones(2, 4)
    nn.Linear(4, 1)(inputs).sum().backward()


@reproduces("graph-checkpoint-differs")
def graph_checkpoint_differs(rank: int, folder: Path) -> None:
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp().exp() if len(calls) == 1 else x.exp()

    x = torch.ones(2, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()


reproduce(
    "graph-unused",
    lambda folder: train(DistributedDataParallel(TwoLayers()), both=False),
    num_ranks=2,
)
reproduce(
    "graph-models-differ",
    lambda folder: DistributedDataParallel(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(get_rank() + 1)))
    ),
    num_ranks=2,
)
reproduce(
    "graph-models-differ",
    lambda folder: DistributedDataParallel(nn.Linear(4, 4 + get_rank())),
    num_ranks=2,
)
reproduce("graph-syncbn", lambda folder: nn.SyncBatchNorm(4)(torch.ones(3, 4)), num_ranks=2)
reproduce("graph-no-grad", lambda folder: torch.ones(2).sum().backward())
reproduce("graph-batchnorm-single", lambda folder: nn.BatchNorm1d(4)(torch.ones(1, 4)))
reproduce(
    "graph-nothing-to-train",
    lambda folder: DistributedDataParallel(TwoLayers().requires_grad_(False)),
    group=True,
)
reproduce(
    "graph-ddp-device",
    lambda folder: DistributedDataParallel(TwoLayers(), device_ids=[0]),
    group=True,
)
reproduce("graph-lazy", lambda folder: DistributedDataParallel(nn.LazyLinear(3)), group=True)
reproduce("graph-shapes", lambda folder: nn.Linear(784, 10)(torch.ones(8, 3, 28)))
