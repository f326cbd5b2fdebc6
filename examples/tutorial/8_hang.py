"""Chapter 8: a rank hangs, and who is to blame.

torchrun --standalone --nproc_per_node=2 examples/tutorial/8_hang.py
Rank 1 hangs in step 20. With --break nobody looks where each rank is.
"""

import argparse
import faulthandler
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH, PATIENCE_S, TIMEOUT_S = 64, 4, 10
parser = argparse.ArgumentParser()
parser.add_argument("--break", dest="is_broken", action="store_true")
is_broken = parser.parse_args().is_broken

dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
arrays = load_digits(return_X_y=True)
images, labels = torch.tensor(arrays[0] / 16, dtype=torch.float32), torch.tensor(arrays[1])
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
stacks = Path(f"tutorial-stacks-of-rank-{rank}.txt")


def read(indices: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the samples of a step; the storage of rank 1 does not answer in step 20."""
    if rank == 1 and step == 20:
        time.sleep(1000)
    return images[indices], labels[indices]


with stacks.open("w") as file:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    for step, whole in enumerate(order.split(BATCH)):
        if not is_broken:
            # a step takes milliseconds: after 4 s without the next one, write where this rank is
            faulthandler.dump_traceback_later(PATIENCE_S, file=file)
        inputs, targets = read(whole[rank::num_ranks], step)
        loss = cross_entropy(model(inputs), targets, reduction="sum")
        optimizer.zero_grad()
        try:
            (loss * num_ranks / len(whole)).backward()
        except RuntimeError as error:
            print(f"rank {rank} fails in step {step}: {error}", flush=True)
            if not is_broken:
                for path in sorted(Path().glob("tutorial-stacks-of-rank-*.txt")):
                    [last] = [
                        line
                        for line in path.read_text().splitlines()
                        if Path(__file__).name in line
                    ][:1]
                    print(f"{path.stem}: {last.strip()}", flush=True)
            os._exit(1)
        optimizer.step()
del model  # DDP must not be the last that holds the process group
dist.destroy_process_group()
