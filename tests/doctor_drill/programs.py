"""Programs to drill. Two ranks are forked from one process: one import of torch for each start."""

LOOP = """\
import multiprocessing, os, socket, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torch._dynamo  # here: otherwise each rank imports it, in its first step

SAVED = os.path.abspath("last.pt")  # also an absolute path stays in the program's own folder


def train(rank, port):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    done = 0
    if os.path.exists(SAVED):
        saved = torch.load(SAVED)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    model = DDP(net)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            step += 1
            if step <= done:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if step % 5 == 0 and rank == 0:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, SAVED + ".tmp")
                os.replace(SAVED + ".tmp", SAVED)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train, args=(rank, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks):
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.kill()
        time.sleep(0.02)
    sys.exit(any(rank.exitcode for rank in ranks))
"""
"""18 steps, saved after every fifth with all that a resumed run needs."""

STREAM = """\
class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data, rank):
        self.data, self.rank = data, rank

    def __iter__(self):
        return iter([self.data[i] for i in range(self.rank, 96, 2)])


"""
STREAMED = LOOP.replace("def train(", f"{STREAM}def train(")
STREAMED = STREAMED.replace(
    "DataLoader(data, 8, sampler=sampler)", "DataLoader(Stream(data, rank), 8)"
)
"""The same of a dataset that can only be gone through, and that divides itself among the ranks."""

WITH_ACCELERATE = """\
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
net = nn.Linear(8, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, 8))
for inputs, labels in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(net(inputs), labels))
    optimizer.step()
accelerator.end_training()
"""
"""6 steps, and nothing is saved."""

SILENT = "import time\ntime.sleep(600)\n"
NO_RANKS = """\
import torch
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""
