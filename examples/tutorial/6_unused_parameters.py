"""Chapter 6: parameters without gradient.

torchrun --standalone --nproc_per_node=2 examples/tutorial/6_unused_parameters.py
With --break DDP is not told that some parameters may get no gradient.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH = 64
parser = argparse.ArgumentParser()
parser.add_argument("--break", dest="is_broken", action="store_true")
is_broken = parser.parse_args().is_broken


class Net(nn.Module):
    """Has one layer that forward never uses, and one that it uses for some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.old_head = nn.Linear(64, 10)
        self.for_dark = nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs).relu()
        if inputs.mean() < 0.3:
            hidden = hidden + self.for_dark(hidden).relu()
        return self.head(hidden)


def unused(net: Net, inputs: torch.Tensor) -> list[str]:
    """Name the parameters that get no gradient from a backward of this batch."""
    net(inputs).sum().backward()
    names = [name for name, weight in net.named_parameters() if weight.grad is None]
    net.zero_grad()
    return names


dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
arrays = load_digits(return_X_y=True)
images, labels = torch.tensor(arrays[0] / 16, dtype=torch.float32), torch.tensor(arrays[1])
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))

net = Net()
if not is_broken:  # before DDP, so on each rank by itself
    names = unused(net, images[order[rank:BATCH:num_ranks]])
    print(f"rank {rank}: no gradient for {', '.join(names)}", flush=True)
    net.old_head.requires_grad_(False)  # never used: DDP need not know of it
model = DistributedDataParallel(net, find_unused_parameters=not is_broken)  # for_dark: searched for
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)

for step, whole in enumerate(order.split(BATCH)):
    mine = whole[rank::num_ranks]
    try:
        loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum")
    except RuntimeError as error:
        print(f"rank {rank} fails in step {step}: {str(error)[:95]}", flush=True)
        raise
    optimizer.zero_grad()
    (loss * num_ranks / len(whole)).backward()
    optimizer.step()
if rank == 0:
    print("finished")
del model  # DDP must not be the last that holds the process group
dist.destroy_process_group()
