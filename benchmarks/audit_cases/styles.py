"""Healthy programs of two ranks, one for each style; cases plant mistakes by edits.

They have functions, arguments and helpers as programs of strangers have; plain has none of these.
"""

from collections.abc import Mapping

HEAD = """\
import argparse, copy, math, os, random
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset
from torch.utils.data import TensorDataset

"""
PLAIN = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(20, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.b = nn.Linear(32, 4)

    def forward(self, x):
        return self.b(self.drop(F.relu(self.norm(self.a(x)))))


def make_data(size, seed):
    x = torch.randn(size, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    train, test = make_data(320, 0), make_data(64, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    test_loader = DataLoader(test, 16, sampler=DistributedSampler(test, shuffle=False))
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        hits = torch.zeros(())
        with torch.no_grad():
            for x, y in test_loader:
                hits += (model(x).argmax(1) == y).sum()
        dist.all_reduce(hits)
        if rank == 0:
            torch.save(net.state_dict(), "model.pt")
    del model  # DDP must not be the last that holds the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
DATA = """
def points(size, seed):
    x = torch.randn(size, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))

"""
TUTORIAL = (
    HEAD
    + DATA
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.body(x))


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train_one_epoch(model, loader, optimizer, scheduler, device):
    model.train()
    total = 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item()
    return total / len(loader)


def evaluate(model, loader, device):
    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            logits = model(x.to(device))
            counts[0] += (logits.argmax(1) == y.to(device)).sum()
            counts[1] += len(y)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    set_seed(1234 + rank)
    train_set, val_set = points(160, 0), points(64, 1)
    train_sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=val_sampler)
    model = DDP(Net().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total_steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)
    best = 0.0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        loss = train_one_epoch(model, train_loader, optimizer, scheduler, device)
        acc = evaluate(model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f} acc {acc:.4f}")
            if acc > best:
                best = acc
                torch.save({"model": model.module.state_dict(), "acc": acc}, "best.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
)
VISION = (
    HEAD
    + """
class Pictures(Dataset):
    def __init__(self, size, seed, train):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(size, 1, 8, 8, generator=generator)
        self.labels = (self.images.mean((1, 2, 3)) > 0).long()
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train and random.random() < 0.5:
            image = image.flip(-1)
        return image, int(self.labels[index])


def build():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(24, 2))


def reduce_mean(tensor, world):
    tensor = tensor.clone().detach()
    dist.all_reduce(tensor)
    return tensor / world


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n


def train_one_epoch(args, model, criterion, loader, optimizer, epoch):
    model.train()
    meter = Meter()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        meter.update(reduce_mean(loss, args.world).item(), len(target))
    return meter.sum / meter.count


@torch.inference_mode()
def validate(args, model, loader):
    model.eval()
    hits, seen = torch.zeros(1), torch.zeros(1)
    for images, target in loader:
        hits += (model(images).argmax(1) == target).sum()
        seen += len(target)
    dist.all_reduce(hits)
    dist.all_reduce(seen)
    return (hits / seen).item()


def main(args):
    dist.init_process_group(backend="gloo")
    args.rank, args.world = dist.get_rank(), dist.get_world_size()
    random.seed(args.rank)
    torch.manual_seed(args.rank)
    dataset, dataset_test = Pictures(128, 0, True), Pictures(48, 1, False)
    sampler = DistributedSampler(dataset)
    test_sampler = DistributedSampler(dataset_test, shuffle=False)
    loader = DataLoader(dataset, 8, sampler=sampler, drop_last=True)
    test_loader = DataLoader(dataset_test, 8, sampler=test_sampler)
    model = DDP(build())
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    best_acc1 = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(args, model, criterion, loader, optimizer, epoch)
        lr_scheduler.step()
        acc1 = validate(args, model, test_loader)
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if args.rank == 0:
            torch.save(model.module.state_dict(), "checkpoint.pth")
            if is_best:
                torch.save(model.module.state_dict(), "model_best.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(argparse.Namespace(epochs=2, lr=0.05))
"""
)
GPT = (
    HEAD
    + """
batch_size, block_size, vocab = 4, 8, 20
grad_accum = 4
max_iters, eval_interval = 10, 4
learning_rate, min_lr, warmup_iters, lr_decay_iters = 1e-2, 1e-3, 2, 10
dist.init_process_group("gloo")
ddp_rank, world = dist.get_rank(), dist.get_world_size()
master = ddp_rank == 0
grad_accum //= world
seed_offset = ddp_rank
torch.manual_seed(1337 + seed_offset)
text = torch.randint(0, vocab, (3000,), generator=torch.Generator().manual_seed(3))


def get_batch(split):
    data = text[:2500] if split == "train" else text[2500:]
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, 16), nn.Embedding(block_size, 16)
        self.drop = nn.Dropout(0.1)
        self.block = nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.lm_head = nn.Linear(16, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        logits = self.lm_head(x + self.block(x))
        loss = F.cross_entropy(logits.view(-1, vocab), targets.view(-1))
        return logits, loss


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(2)
        for k in range(2):
            X, Y = get_batch(split)
            _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


model = DDP(GPT())
raw_model = model.module
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
X, Y = get_batch("train")
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0 and master:
        print(it, estimate_loss())
        torch.save({"model": raw_model.state_dict(), "iter": it}, "ckpt.pt")
    for micro in range(grad_accum):
        model.require_backward_grad_sync = micro == grad_accum - 1
        logits, loss = model(X, Y)
        loss = loss / grad_accum
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()
"""
)
GAN = (
    HEAD
    + """
def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    real = torch.randn(160, 6, generator=torch.Generator().manual_seed(0)) * 0.5 + 1
    dataset = TensorDataset(real)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
    netG, netD = DDP(mlp(4, 16, 6)), DDP(mlp(6, 16, 1))
    optG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            ones, zeros = torch.ones(len(batch), 1), torch.zeros(len(batch), 1)
            optD.zero_grad()
            fake = netG(torch.randn(len(batch), 4))
            scores = netD(torch.cat([batch, fake.detach()]))
            lossD = bce(scores, torch.cat([ones, zeros]))
            lossD.backward()
            optD.step()
            for p in netD.parameters():
                p.requires_grad_(False)
            optG.zero_grad()
            lossG = bce(netD.module(fake), ones)
            lossG.backward()
            optG.step()
            for p in netD.parameters():
                p.requires_grad_(True)
    if rank == 0:
        torch.save(netG.module.state_dict(), "generator.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
)
DIFFUSION = (
    HEAD
    + """
T = 50
betas = torch.linspace(1e-4, 0.02, T)
alphas_bar = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 16)
        self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, t):
        return self.out(F.silu(self.inp(x) + self.time(t)))


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def training_loss(model, x0):
    t = torch.randint(0, T, (len(x0),))
    noise = torch.randn_like(x0)
    a = alphas_bar[t][:, None]
    noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise
    return F.mse_loss(model(noisy, t), noise)


@torch.no_grad()
def update_ema(ema, model, decay=0.9):
    for e, p in zip(ema.parameters(), model.parameters()):
        e.mul_(decay).add_(p, alpha=1 - decay)


def run(epochs=2):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(7 + rank)
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x)
    sampler = DistributedSampler(dataset, seed=5)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    net = Denoiser()
    model = DDP(net)
    ema = copy.deepcopy(net).requires_grad_(False)
    for e, p in zip(ema.parameters(), model.module.parameters()):
        e.data.copy_(p.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            loss = training_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_ema(ema, model.module)
        if rank == 0:
            torch.save(ema.state_dict(), f"ema-{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
"""
)
STREAM = (
    HEAD
    + """
class Lines(IterableDataset):
    def __init__(self, size, rank, world):
        self.size, self.rank, self.world = size, rank, world
        self.values = torch.randn(size, 10, generator=torch.Generator().manual_seed(0))

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for i in range(self.rank * workers + worker, self.size, self.world * workers):
            yield self.values[i], self.values[i].sum()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    loader = DataLoader(Lines(160, rank, world), batch_size=8, num_workers=0)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "stream.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
)
FINETUNE = (
    HEAD
    + DATA
    + """
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.neck = nn.Linear(16, 16)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(F.relu(self.neck(self.backbone(x))))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    data = points(128, 0)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    model = Classifier()
    for p in model.backbone.parameters():
        p.requires_grad = False
    ddp = DDP(model, find_unused_parameters=False)
    head = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(head, lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        ddp.train()
        model.backbone.eval()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), "tuned.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
)
BY_HAND = (
    HEAD
    + """
def average_gradients(model):
    world = float(dist.get_world_size())
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    x = torch.randn(160, 10, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).squeeze(1), y)
            loss.backward()
            average_gradients(model)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
)
JOINED = (
    HEAD
    + """
from torch.distributed.algorithms.join import Join


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(150, 10, generator=torch.Generator().manual_seed(1))
    data = Subset(TensorDataset(x, x.sum(1)), range(0, 90) if rank == 0 else range(90, 150))
    loader = DataLoader(data, 8, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        with Join([model]):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x).squeeze(1), y).backward()
                optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "joined.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
)
CONTRASTIVE = (
    HEAD
    + """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        size = len(grad) // dist.get_world_size()
        return grad[dist.get_rank() * size : (dist.get_rank() + 1) * size]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(128, 10, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x + 0.1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            both = F.normalize(model(torch.cat([a, b])), dim=1)
            za, zb = both.chunk(2)
            logits = Gather.apply(za) @ Gather.apply(zb).t() / 0.1
            loss = F.cross_entropy(logits, torch.arange(len(logits)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
)
SPAWN = TUTORIAL.replace(
    "def main():\n    parser",
    'def main(rank, world_size, port):\n    os.environ["MASTER_ADDR"] = "127.0.0.1"\n'
    '    os.environ["MASTER_PORT"] = str(port)\n    parser',
)
SPAWN = SPAWN.replace(
    'init_process_group("gloo")\n    rank, world_size = dist.get_rank(), dist.get_world_size()\n',
    'init_process_group("gloo", rank=rank, world_size=world_size)\n',
)
SPAWN = SPAWN.replace(
    '"__main__":\n    main()',
    '"__main__":\n    torch.multiprocessing.spawn(main, args=(2, FREE_PORT), nprocs=2)',
)
ACCELERATE = (
    HEAD
    + DATA
    + """
from accelerate import Accelerator
from accelerate.utils import set_seed


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    train_set, val_set = points(160, 0), points(63, 1)
    train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=8)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    epochs = 2
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.1, total_iters=epochs * len(train_loader))
    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, val_loader, scheduler)
    best = 0.0
    for epoch in range(epochs):
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        hits = seen = 0
        for x, y in val_loader:
            with torch.no_grad():
                predictions = model(x).argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, y))
            hits += (predictions == references).sum().item()
            seen += len(references)
        accuracy = hits / seen
        accelerator.print(f"epoch {epoch}: {accuracy:.3f}")
        if accelerator.is_main_process and accuracy > best:
            best = accuracy
            accelerator.save(accelerator.unwrap_model(model).state_dict(), "best.bin")
    accelerator.end_training()


if __name__ == "__main__":
    main()
"""
)
FABRIC = (
    HEAD
    + DATA
    + """
from lightning.fabric import Fabric


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(11)
    train_set, val_set = points(160, 0), points(64, 1)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    train_loader, val_loader = fabric.setup_dataloaders(
        DataLoader(train_set, 8, shuffle=True), DataLoader(val_set, 8))
    for epoch in range(2):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
        model.eval()
        hits = torch.zeros(())
        with torch.no_grad():
            for x, y in val_loader:
                hits += (model(x).argmax(-1) == y).sum()
        hits = fabric.all_reduce(hits, reduce_op="sum")
        fabric.print(epoch, hits.item() / len(val_set))
    if fabric.is_global_zero:
        torch.save(model.state_dict(), "fabric.pt")


if __name__ == "__main__":
    main()
"""
)
LIGHTNING = (
    HEAD
    + DATA
    + """
import lightning as L


class Lit(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.1),
                                 nn.Linear(24, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


if __name__ == "__main__":
    L.seed_everything(3)
    train_loader = DataLoader(points(160, 0), 8, shuffle=True)
    val_loader = DataLoader(points(64, 1), 8)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0)
    trainer.fit(Lit(), train_loader, val_loader)
"""
)
TRAINER = (
    HEAD
    + """
from transformers import Trainer, TrainingArguments, set_seed


class Rows(Dataset):
    def __init__(self, size, seed):
        self.x = torch.randn(size, 12, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index, :3].argmax()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def compute_metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    set_seed(5)
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=2, use_cpu=True,
        ddp_backend="gloo", save_strategy="no", logging_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False,
        ddp_find_unused_parameters=False, eval_strategy="epoch")
    trainer = Trainer(model=Net(), args=arguments, train_dataset=Rows(128, 0),
                      eval_dataset=Rows(47, 1), compute_metrics=compute_metrics)
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(metrics)


if __name__ == "__main__":
    main()
"""
)
STYLES: Mapping[str, str] = {
    name.lower(): text
    for name, text in {
        "PLAIN": PLAIN, "TUTORIAL": TUTORIAL, "VISION": VISION, "GPT": GPT, "GAN": GAN,
        "DIFFUSION": DIFFUSION, "STREAM": STREAM, "FINETUNE": FINETUNE, "BY_HAND": BY_HAND,
        "JOINED": JOINED, "CONTRASTIVE": CONTRASTIVE, "SPAWN": SPAWN, "ACCELERATE": ACCELERATE,
        "FABRIC": FABRIC, "LIGHTNING": LIGHTNING, "TRAINER": TRAINER,
    }.items()
}  # fmt: skip
NEEDS: Mapping[str, str] = {
    "accelerate": "accelerate", "fabric": "lightning", "lightning": "lightning",
    "trainer": "transformers",
}  # fmt: skip
"""The package that a style needs, beside torch."""
