"""Chapter 3: the same samples on each rank, and the last short batch.

torchrun --standalone --nproc_per_node=2 examples/tutorial/3_samples.py
The same with --break same, --break padded or --break short.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

BATCH = 64  # samples of one step, over all ranks

parser = argparse.ArgumentParser()
parser.add_argument("--break", dest="fault", choices=["same", "padded", "short"])
fault = parser.parse_args().fault

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
arrays = load_digits(return_X_y=True)
images, labels = torch.tensor(arrays[0] / 16, dtype=torch.float32), torch.tensor(arrays[1])
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))

alone = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model = DistributedDataParallel(copy.deepcopy(alone))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
used = torch.zeros(len(labels), dtype=torch.int64)


def batches() -> list[torch.Tensor]:
    """List the samples of this rank in each step of the epoch."""
    if fault == "same":  # what shuffle=True gives if all ranks have the same seed
        return list(order.split(BATCH // num_ranks))
    if fault == "padded":  # chapter 2: the sampler repeats samples until all have as many
        sampler = DistributedSampler(order.tolist(), seed=1)
        return list(torch.tensor(list(sampler)).split(BATCH // num_ranks))
    return [whole[rank::num_ranks] for whole in order.split(BATCH)]


for mine in batches():
    used[mine] += 1
    optimizer.zero_grad()
    if fault:
        loss = cross_entropy(model(images[mine]), labels[mine])
    else:
        # DDP divides the sum over the ranks by num_ranks; we want it divided by all samples
        count = torch.tensor(len(mine))
        dist.all_reduce(count)
        loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        loss = loss * num_ranks / count
    loss.backward()
    optimizer.step()

# what one process gets from the same batches
reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
for whole in order.split(BATCH):
    reference.zero_grad()
    cross_entropy(alone(images[whole]), labels[whole]).backward()
    reference.step()

dist.all_reduce(used)
if rank == 0:
    for times, num_samples in zip(*used.unique(return_counts=True), strict=True):
        print(f"{num_samples} samples were used {times} times")
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    difference = max((ours - one).abs().max().item() for ours, one in pairs)
    print(f"largest difference from the weights of one process: {difference:.0e}")
del model  # DDP must not be the last that holds the process group
dist.destroy_process_group()
