"""Chapter 5: one rank raises, and the others hang.

torchrun --standalone --nproc_per_node=2 examples/tutorial/5_one_rank_raises.py
With --break the rank that can't read a sample goes on with its next step.
"""

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH, BAD_SAMPLE = 64, 777
parser = argparse.ArgumentParser()
parser.add_argument("--break", dest="is_broken", action="store_true")
is_broken = parser.parse_args().is_broken

# the default timeout is 30 minutes: too long to wait for in a tutorial
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
arrays = load_digits(return_X_y=True)
images, labels = torch.tensor(arrays[0] / 16, dtype=torch.float32), torch.tensor(arrays[1])
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
began_at = time.monotonic()


def read(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the samples of a step; one of them is in a damaged file."""
    if BAD_SAMPLE in indices:
        raise OSError(f"sample {BAD_SAMPLE}: the file is truncated")
    return images[indices], labels[indices]


order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
try:
    for whole in order.split(BATCH):
        mine = whole[rank::num_ranks]
        try:
            inputs, targets = read(mine)
        except OSError as error:
            print(f"rank {rank} leaves out a batch: {error}", flush=True)
            if is_broken:
                continue  # the other rank now waits for a gradient that never comes
            inputs, targets = read(mine[:0])  # take part in the step, without samples
        count = torch.tensor(len(targets))
        if not is_broken:
            dist.all_reduce(count)  # the mean is over the samples that could be read
        loss = cross_entropy(model(inputs), targets, reduction="sum")
        optimizer.zero_grad()
        (loss * num_ranks / count).backward()
        optimizer.step()
    dist.barrier()
except RuntimeError as error:
    print(f"rank {rank} fails after {time.monotonic() - began_at:.0f} s: {error}", flush=True)
    raise
if rank == 0:
    print("finished")
del model  # DDP must not be the last that holds the process group
dist.destroy_process_group()
