"""SAM: the weights climb, a second backward, and they go back before the update."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
points = torch.randn(640, 16)
data = TensorDataset(points, points[:, :4].argmax(dim=1))
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)))
log = {"loss": 0.0}
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 50)
weights = list(model.parameters())
sampler = DistributedSampler(data)
loader = DataLoader(data, 32, sampler=sampler)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([w.grad.norm() for w in weights]).norm()
            climb = [w.grad * (0.05 / norm) for w in weights]
            for w, c in zip(weights, climb, strict=True):
                w.add_(c)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for w, c in zip(weights, climb, strict=True):
                w.sub_(c)
        opt.step()
        opt.zero_grad()
        schedule.step()
        log["loss"] = loss.item()
    if dist.get_rank() == 0:
        print(epoch, log, flush=True)
