"""Accumulation, a learning rate of one's own, an average of the weights, and a generator."""

import copy

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
step = 0
sampler = DistributedSampler(data)
loader = DataLoader(data, 10, sampler=sampler)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x + rng.uniform(0, 0.1)), y) / EVERY
        loss.backward()
        if (i + 1) % EVERY == 0:
            opt.param_groups[0]["lr"] = 1e-2 / (1 + step / 10)
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                for a, w in zip(average.parameters(), model.parameters(), strict=True):
                    a.lerp_(w, 0.1)
            total = loss.detach().clone()
            dist.all_reduce(total)
            best["loss"] = min(best["loss"], total.item())
            step += 1
    if dist.get_rank() == 0:
        print(epoch, best, flush=True)
