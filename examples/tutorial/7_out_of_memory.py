"""Chapter 7: a rank without memory, accumulation, and the right mean.

torchrun --standalone --nproc_per_node=2 examples/tutorial/7_out_of_memory.py
With --break memory a step is one batch; with --break mean it is the mean of the means of its parts.
"""

import argparse
import contextlib
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH, STEPS, WIDTH = 1200, 2, 40_000  # 600 samples of a rank x 40,000 x 4 bytes = 96 MB
parser = argparse.ArgumentParser()
parser.add_argument("--break", dest="fault", choices=["memory", "mean"])
fault = parser.parse_args().fault

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
arrays = load_digits(return_X_y=True)
images, labels = torch.tensor(arrays[0] / 16, dtype=torch.float32), torch.tensor(arrays[1])
net = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)


def backward(mine: torch.Tensor, count: int, size: int) -> None:
    """Add up the gradient of this rank's samples, in parts of size; the last part is sent."""
    # an empty last part sends and needs no memory: a failure comes before any rank waits for us
    parts = mine.split(size) if fault else (*mine.split(size), mine[:0])
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():  # forward belongs inside
            if fault == "mean":
                loss = cross_entropy(model(images[part]), labels[part]) / len(parts)
            else:
                loss = cross_entropy(model(images[part]), labels[part], reduction="sum")
                loss = loss * num_ranks / count
            loss.backward()


size = BATCH // num_ranks if fault != "mean" else 250
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
for step in range(STEPS):
    whole = order[:BATCH]
    mine = whole[rank::num_ranks]
    if step == 1 and rank == 1 and fault != "mean":  # from here on rank 1 has 170 MB left
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 170_000_000, resource.RLIM_INFINITY))
    while True:
        optimizer.zero_grad()
        try:
            backward(mine, len(whole), size)
            break
        except RuntimeError as error:
            if "can't allocate memory" not in str(error) or fault or size < 2:
                raise
            size //= 2
            print(f"rank {rank} has no memory for {size * 2} samples: {size} at a time", flush=True)
    if step == 0 and rank == 0:  # what one process gets from the whole batch
        ours = [weight.grad.clone() for weight in net.parameters()]
        alone = cross_entropy(net(images[whole]), labels[whole])
        alone = torch.autograd.grad(alone, list(net.parameters()))
        error = max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, alone, strict=True))
        print(f"the gradient differs from that of one big batch by {error:.0e}", flush=True)
    optimizer.step()
if rank == 0:
    print("finished")
del model  # DDP must not be the last that holds the process group
dist.destroy_process_group()
