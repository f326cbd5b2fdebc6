"""Chapter 4: kill -9 in the middle of an epoch, and resume.

torchrun --standalone --nproc_per_node=2 examples/tutorial/4_kill_and_resume.py
With --kill rank 1 kills itself in step 45; then start it again with --resume. With --break it
saves as many scripts do: the weights alone, at the end of each epoch.
"""

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH, EPOCHS = 64, 3
parser = argparse.ArgumentParser()
parser.add_argument("--break", dest="is_broken", action="store_true")
parser.add_argument("--kill", action="store_true")
parser.add_argument("--resume", action="store_true")
given = parser.parse_args()
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
arrays = load_digits(return_X_y=True)
images, labels = torch.tensor(arrays[0] / 16, dtype=torch.float32), torch.tensor(arrays[1])
steps_per_epoch = -(-len(labels) // BATCH)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
checkpoint = Path("tutorial-broken.pt" if given.is_broken else "tutorial-checkpoint.pt")


def save(step: int) -> None:
    """Write what the next start needs; at every moment the file is complete or absent."""
    state = {"step": step, "model": model.module.state_dict()}
    if not given.is_broken:
        state["optimizer"] = optimizer.state_dict()
    aside = checkpoint.with_suffix(".partial")
    with aside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(checkpoint)


first_step = 0
if given.resume and checkpoint.exists():
    state = torch.load(checkpoint, weights_only=True)
    first_step = state["step"]
    model.module.load_state_dict(state["model"])
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    if rank == 0:
        print(f"rank 0 continues at step {first_step}")

for step in range(first_step, EPOCHS * steps_per_epoch):
    epoch, place = divmod(step, steps_per_epoch)  # the step says which samples come next
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    whole = order[place * BATCH : (place + 1) * BATCH]
    mine = whole[rank::num_ranks]
    if given.kill and rank == 1 and step == 45:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum")
    optimizer.zero_grad()
    (loss * num_ranks / len(whole)).backward()
    optimizer.step()
    if rank == 0 and (step + 1) % (steps_per_epoch if given.is_broken else 10) == 0:
        save(step + 1)

if rank == 0:
    weights = torch.cat([weight.flatten() for weight in model.parameters()]).detach()
    print(f"finished; the weights are {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]}")
    checkpoint.unlink()
del model  # DDP must not be the last that holds the process group
dist.destroy_process_group()
