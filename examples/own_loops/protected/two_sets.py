"""Two data sets: few labeled samples, again and again, beside many without labels."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from hardened_ddp import protect

dist.init_process_group("gloo")
torch.manual_seed(0)
points = torch.randn(700, 16)
labels = points[:, :4].argmax(dim=1)
model = DDP(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)))
log = {"loss": 0.0}
opt = torch.optim.AdamW(model.parameters(), 1e-2)
few, many = TensorDataset(points[:60], labels[:60]), TensorDataset(points[60:])
labeled, unlabeled = DataLoader(few, 10), DataLoader(many, 32)
with protect("runs/two_sets", model=model, opt=opt) as run:
    for epoch in run.epochs(5):
        again = run.batches(labeled, name="labeled", repeat=True)
        for (x, y), (z,) in zip(again, run.batches(unlabeled), strict=False):
            guess = model(torch.cat([x, z]))
            sure = guess[len(x) :].softmax(dim=1)
            entropy = -(sure * sure.log()).sum(dim=1).mean()
            loss = nn.functional.cross_entropy(guess[: len(x)], y) + 0.1 * entropy
            opt.zero_grad()
            loss.backward()
            opt.step()
            log["loss"] = loss.item()
            run.commit()
        if dist.get_rank() == 0:
            print(epoch, log, flush=True)
