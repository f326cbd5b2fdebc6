"""A GAN: two models, two optimizers, and two updates in each body."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
angles = torch.linspace(0, 6.28, 600)
data = torch.stack([angles.cos(), angles.sin()], dim=1)  # a circle
G = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
G, D = DDP(G), DDP(D)
opt_G = torch.optim.Adam(G.parameters(), 1e-3, betas=(0.5, 0.99))
opt_D = torch.optim.AdamW(D.parameters(), 1e-3, betas=(0.5, 0.99), fused=True)
log = {"D": 0.0, "G": 0.0}
bce = nn.functional.binary_cross_entropy_with_logits
sampler = DistributedSampler(data)
loader = DataLoader(data, 50, sampler=sampler)
for epoch in range(5):
    sampler.set_epoch(epoch)
    for real in loader:
        fake = G(torch.randn(len(real), 4))
        is_real = (torch.arange(2 * len(real)) < len(real)).float()[:, None]
        loss_D = bce(D(torch.cat([real, fake.detach()])), is_real)
        opt_D.zero_grad()
        loss_D.backward()
        opt_D.step()
        loss_G = bce(D(fake), torch.ones(len(fake), 1))
        opt_G.zero_grad()
        loss_G.backward()
        opt_G.step()
        log |= {"D": loss_D.item(), "G": loss_G.item()}
    if dist.get_rank() == 0:
        print(epoch, log, flush=True)
