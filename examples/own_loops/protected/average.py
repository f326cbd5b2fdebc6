"""Accumulation, a learning rate of one's own, an average of the weights, and a generator."""

import copy

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from hardened_ddp import protect

EVERY = 4

dist.init_process_group("gloo")
torch.manual_seed(0)
points = torch.randn(640, 16)
data = TensorDataset(points, points[:, :4].argmax(dim=1))
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 4)))
opt = torch.optim.AdamW(model.parameters(), 1e-2)
average = copy.deepcopy(model.module)
rng = np.random.default_rng(0)
best = {"loss": 9.0}
loader = DataLoader(data, 10)
with protect("runs/average", model=model, opt=opt, average=average, rng=rng, best=best) as run:
    for epoch in run.epochs(5):
        for x, y in run.batches(loader):
            loss = nn.functional.cross_entropy(model(x + rng.uniform(0, 0.1)), y) / EVERY
            loss.backward()
            if (run.batch + 1) % EVERY == 0:
                opt.param_groups[0]["lr"] = 1e-2 / (1 + run.step / 10)
                opt.step()
                opt.zero_grad()
                with torch.no_grad():
                    for a, w in zip(average.parameters(), model.parameters(), strict=True):
                        a.lerp_(w, 0.1)
                total = loss.detach().clone()
                dist.all_reduce(total)
                best["loss"] = min(best["loss"], total.item())
                run.commit()
        if dist.get_rank() == 0:
            print(epoch, best, flush=True)
