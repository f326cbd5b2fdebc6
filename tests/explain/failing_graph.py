"""Programs whose model or graph does not fit DDP."""

import torch
from torch import nn
from torch.distributed import get_rank
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.explain.reproducers import reproduces


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
def graph_unused_on_one() -> None:
    model = DistributedDataParallel(TwoLayers(), find_unused_parameters=False)
    if torch.distributed.get_rank() == 1:
        train(model, both=False)
    else:
        train(model)


@reproduces("graph-unused", num_ranks=2)
def graph_unused_in_detail() -> None:
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    train(DistributedDataParallel(TwoLayers()), both=False)


@reproduces("graph-static-changed", num_ranks=1, group=True)
def graph_static_changed() -> None:
    model = DistributedDataParallel(TwoLayers(), static_graph=True)
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(2):
        model(torch.ones(2, 4), both=False).sum().backward()


@reproduces("graph-ready-twice", num_ranks=1, group=True)
def graph_ready_twice() -> None:
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
def graph_inplace() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y += 1
    y.sum().backward()


@reproduces("graph-backward-twice")
def graph_backward_twice() -> None:
    loss = nn.Linear(2, 2)(torch.ones(1, 2)).exp().sum()
    loss.backward()
    loss.backward()


@reproduces("graph-inference-mode")
def graph_inference_mode() -> None:
    with torch.inference_mode():
        inputs = torch.ones(2, 4)
    nn.Linear(4, 1)(inputs).sum().backward()


@reproduces("graph-checkpoint-differs")
def graph_checkpoint_differs() -> None:
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp().exp() if len(calls) == 1 else x.exp()

    x = torch.ones(2, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()


reproduces("graph-models-differ", num_ranks=2)(
    lambda: DistributedDataParallel(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(get_rank() + 1)))
    )
)
reproduces("graph-models-differ", num_ranks=2)(
    lambda: DistributedDataParallel(nn.Linear(4, 4 + get_rank()))
)
reproduces("graph-syncbn", num_ranks=2)(lambda: nn.SyncBatchNorm(4)(torch.ones(3, 4)))
reproduces("graph-no-grad")(lambda: torch.ones(2).sum().backward())
reproduces("graph-batchnorm-single")(lambda: nn.BatchNorm1d(4)(torch.ones(1, 4)))
reproduces("graph-nothing-to-train", group=True)(
    lambda: DistributedDataParallel(TwoLayers().requires_grad_(False))
)
reproduces("graph-ddp-device", group=True)(
    lambda: DistributedDataParallel(TwoLayers(), device_ids=[0])
)
reproduces("graph-lazy", group=True)(lambda: DistributedDataParallel(nn.LazyLinear(3)))
reproduces("graph-shapes")(lambda: nn.Linear(784, 10)(torch.ones(8, 3, 28)))
