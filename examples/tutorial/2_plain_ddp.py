"""Chapter 2: the same training on two ranks, with DDP.

torchrun --standalone --nproc_per_node=2 examples/tutorial/2_plain_ddp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")  # with GPUs: "nccl", and one GPU for each rank
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
sampler = DistributedSampler(data)  # each rank gets its own half of the samples
loader = DataLoader(data, batch_size=32, sampler=sampler)  # 2 ranks x 32 = 64 as in chapter 1

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(3):
    sampler.set_epoch(epoch)  # another order in each epoch
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # here DDP averages the gradients over the ranks
        optimizer.step()
    if dist.get_rank() == 0:
        with torch.no_grad():  # .module: a forward that only one rank does must not go through DDP
            accuracy = (model.module(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean()
        print(f"epoch {epoch + 1}: accuracy {accuracy:.1%}")
del model  # DDP must not be the last that holds the process group
dist.destroy_process_group()
