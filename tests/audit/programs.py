"""Small DDP programs in several styles, and edits that plant one mistake each.

An edit replaces a piece of a program. `# here` stands on the line that the audit must name. All
programs train two ranks on the CPU, for a few epochs of some milliseconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Edit = tuple[str, str]

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

NANO = """\
import math
import os
import torch
from contextlib import nullcontext
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
gradient_accumulation_steps = 4
vocabulary, block = 16, 8
torch.manual_seed(1337 + ddp_rank)
tokens = torch.randint(0, vocabulary, (4000,), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 24)
        self.mix = nn.Linear(24, 24)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(24, vocabulary)

    def forward(self, idx, targets):
        logits = self.head(self.drop(F.gelu(self.mix(self.embed(idx)))))
        return logits, F.cross_entropy(logits.view(-1, vocabulary), targets.view(-1))


def get_batch():
    ix = torch.randint(len(tokens) - block - 1, (6,))
    x = torch.stack([tokens[i : i + block] for i in ix])
    return x, torch.stack([tokens[i + 1 : i + 1 + block] for i in ix])


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(3)]
    model.train()
    return sum(losses) / 3


model = DDP(Block())
raw_model = model.module
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
X, Y = get_batch()
for step in range(12):
    if step % 5 == 0 and master_process:
        estimate_loss()
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if master_process:
    torch.save(raw_model.state_dict(), "ckpt.pt")
del model  # DDP must not be the last that holds the process group
destroy_process_group()
"""

ACCELERATE = """\
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(accelerator.process_index)
x = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))
train = TensorDataset(x, x[:, :4].argmax(1))
loader = DataLoader(train, 16, shuffle=True)
net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
"""

FABRIC = """\
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(fabric.global_rank)
x = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))
train = TensorDataset(x, x[:, :4].argmax(1))
net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
model, optimizer = fabric.setup(net, optimizer)
loader = fabric.setup_dataloaders(DataLoader(train, 16, shuffle=True))
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x), y))
        optimizer.step()
"""

LIGHTNING = """\
import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    x = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 16, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Lit(), loader)
"""

TRAINER = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Points(Dataset):
    def __init__(self):
        self.x = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index, :4].argmax()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


if __name__ == "__main__":
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=16, num_train_epochs=2, use_cpu=True,
        ddp_backend="gloo", save_strategy="no", logging_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False,
        ddp_find_unused_parameters=False, gradient_accumulation_steps=2,
    )
    trainer = Trainer(model=Net(), args=arguments, train_dataset=Points())
    trainer.train()
"""
STYLES: Mapping[str, str] = {
    "plain": PLAIN,
    "nano": NANO,
    "accelerate": ACCELERATE,
    "fabric": FABRIC,
    "lightning": LIGHTNING,
    "trainer": TRAINER,
}
NEEDS: Mapping[str, str] = {
    "accelerate": "accelerate",
    "fabric": "lightning_utilities",
    "lightning": "lightning_utilities",
    "trainer": "transformers",
}
"""The package that a style needs, beside torch."""


@dataclass(frozen=True, slots=True)
class Case:
    """A program, and the verdict that it must get; an empty code: it is healthy."""

    name: str
    edits: Sequence[Edit] = ()
    code: str = ""
    style: str = "plain"

    def source(self) -> str:
        """Give the program."""
        return edited(STYLES[self.style], self.edits, name=self.name)

    def line(self) -> int:
        """Give the planted line; 0 if none is marked."""
        lines = [i for i, t in enumerate(self.source().splitlines(), 1) if "# here" in t]
        return lines[0] if lines else 0


def edited(text: str, edits: Sequence[Edit], *, name: str) -> str:
    """Give a program with its edits. Raises AssertionError if one no longer fits."""
    for old, new in edits:
        assert old in text, f"{name}: {old!r} is not in the program"
        text = text.replace(old, new)
    return text


def _indented(text: str, depth: int) -> str:
    return "".join(f"{' ' * 4 * depth}{line}\n" for line in text.strip("\n").split("\n"))


SAMPLER = "    sampler = DistributedSampler(train)\n"
LOADER = "    loader = DataLoader(train, 16, sampler=sampler)\n"
EPOCHS = "    for epoch in range(2):\n"
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
WRAP = "    model = DDP(net)\n"
OPTIMIZER = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)\n"
LOOP = "        for x, y in loader:\n"
ZERO = "            optimizer.zero_grad()\n"
LOSS = "            loss = F.cross_entropy(model(x), y)\n"
BACKWARD = "            loss.backward()\n"
STEP = "            optimizer.step()\n"
SAVE = '        if rank == 0:\n            torch.save(net.state_dict(), "model.pt")\n'
REDUCE = "        dist.all_reduce(hits)\n"
EVAL = "        model.eval()\n"
TEST = "sampler=DistributedSampler(test, shuffle=False))\n"
NO_SAMPLER = [
    (SAMPLER, ""),
    (LOADER, "    loader = DataLoader(train, 16, shuffle=True)  # here\n"),
    (SET_EPOCH, ""),
]
ACCUMULATE = (
    LOOP + ZERO + LOSS + BACKWARD + STEP,
    _indented(
        """
for index, (x, y) in enumerate(loader):
    is_last = index % 2 == 1
    with nullcontext() if is_last else model.no_sync():
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
""",
        2,
    ),
)
NULLCONTEXT = ("import os\n", "import os\nfrom contextlib import nullcontext\n")
AUGMENTED = _indented(
    """
class Noisy(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        x, y = make_data_once[index]
        return x + 0.01 * torch.randn(20), y

make_data_once, train = train, Noisy()
""",
    1,
)
STREAM = _indented(
    """
class Stream(IterableDataset):
    def __iter__(self):  # here
        return iter([train[i] for i in range(START, 320, STEP)])

loader = DataLoader(Stream(), 16, num_workers=WORKERS)
""",
    1,
)


def stream(start: str, step: str, workers: int = 0) -> list[Edit]:
    """Read an iterable dataset instead of the sampler."""
    text = STREAM.replace("START", start).replace("STEP", step).replace("WORKERS", str(workers))
    return [(SAMPLER + LOADER, text), (SET_EPOCH, "")]


BY_HAND: Sequence[Edit] = (
    (
        WRAP,
        "    model = net\n    for t in net.state_dict().values():\n        dist.broadcast(t, 0)\n",
    ),
    ("self.norm = nn.BatchNorm1d(32)", "self.norm = nn.LayerNorm(32)"),
)
AVERAGE = "            for p in net.parameters():\n                dist.all_reduce(p.grad)\n"
AVERAGE += "                p.grad /= world_size\n"
HEALTHY: Sequence[Case] = (
    Case("the tutorial"),
    Case("accumulation", [NULLCONTEXT, ACCUMULATE]),
    Case("augmentation with a seed per rank", [(SAMPLER, AUGMENTED + SAMPLER)]),
    Case("a share per rank", [
        (SAMPLER, "    train = TensorDataset(*[t[rank::world_size] for t in train.tensors])\n"),
        (LOADER, "    loader = DataLoader(train, 16, shuffle=True)\n"), (SET_EPOCH, ""),
    ]),
    Case("a stream that is split over ranks", stream("rank", "world_size")),
    Case("two loaders, one batch of each in a step", [
        (LOADER, LOADER + "    extra = make_data(320, 5)\n"
         "    other = DataLoader(extra, 16, sampler=DistributedSampler(extra))\n"),
        (LOOP, "        for (x, y), (u, v) in zip(loader, other):\n"
               "            x, y = torch.cat([x, u]), torch.cat([y, v])\n"),
        (SET_EPOCH, SET_EPOCH + "        other.sampler.set_epoch(epoch)\n"),
    ]),
    Case("a weighted sampler", [
        (SAMPLER, "    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(320), 160)\n"),
        (SET_EPOCH, ""),
    ]),
    Case("a teacher in train mode", [
        (OPTIMIZER, OPTIMIZER + "    teacher = Net().train()\n"),
        (LOSS, LOSS + "            with torch.no_grad():\n                goal = teacher(x)\n"
               "            loss = loss + 0.1 * (net.b.weight.sum() * 0 + goal.mean())\n"),
    ]),
    Case("two optimizers, two models", [
        (OPTIMIZER, OPTIMIZER + "    other = DDP(nn.Linear(20, 4))\n"
         "    second = torch.optim.Adam(other.parameters(), lr=1e-3)\n"),
        (STEP, STEP + "            second.zero_grad()\n"
         "            F.cross_entropy(other(x), y).backward()\n            second.step()\n"),
    ]),
    Case("two models, one after the other, and one name for their optimizers", [
        (OPTIMIZER, "    first = DDP(nn.Linear(20, 4))\n"
         "    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)\n"
         "    x, y = (t[rank::world_size] for t in train.tensors)\n"
         "    for i in range(0, 96, 16):\n        optimizer.zero_grad()\n"
         "        F.cross_entropy(first(x[i:i + 16]), y[i:i + 16]).backward()\n"
         "        optimizer.step()\n" + OPTIMIZER),
    ]),
    Case("half a squared error, two ranks", [
        (LOSS, "            loss = 0.5 * F.mse_loss(model(x), F.one_hot(y, 4).float())\n"),
    ]),
    Case("two losses, two backwards", [
        (BACKWARD, "            loss.backward(retain_graph=True)\n"
                   "            (0.1 * net.a.weight.pow(2).mean()).backward()\n"),
        *BY_HAND, (STEP, AVERAGE + STEP),
    ]),
    Case("gradients averaged by hand, and by the loss", [
        *BY_HAND, (LOSS, LOSS.replace("\n", " / world_size\n")),
        (STEP, "            for p in net.parameters():\n                dist.all_reduce(p.grad)\n"
         + STEP),
    ]),
    Case("evaluation of a Subset, joined", [
        (TEST, "shuffle=False)\n"),
        (SAMPLER, SAMPLER + "    part = range(rank, 64, world_size)\n"
         "    test = torch.utils.data.Subset(test, part)\n"),
    ]),
    Case("clipping", [(STEP, "            clip_grad_norm_(model.parameters(), 0.5)\n" + STEP)]),
    Case("evaluation on one rank, through the module", [
        (EVAL, "        if rank:\n            continue\n" + EVAL), (REDUCE, ""),
        (TEST, "shuffle=False)\n"), ("(model(x).argmax", "(net(x).argmax"),
    ]),
    Case("a file per rank", [(SAVE, '        torch.save(net.state_dict(), f"model-{rank}.pt")\n')]),
    Case("a frozen layer", [(WRAP, "    net.a.requires_grad_(False)\n" + WRAP)]),
    Case("uneven batches with join", [
        (SAMPLER, "    mine = range(100) if rank else range(100, 320)\n"
                  "    train = torch.utils.data.Subset(train, mine)\n"),
        (LOADER, "    loader = DataLoader(train, 16, shuffle=True)\n"),
        (SET_EPOCH, ""), ("range(2)", "range(1)"),
        (LOOP + ZERO + LOSS + BACKWARD + STEP, "        with model.join():\n" + "".join(
            f"    {line}\n" for line in (LOOP + ZERO + LOSS + BACKWARD + STEP).splitlines())),
        ("self.norm = nn.BatchNorm1d(32)", "self.norm = nn.LayerNorm(32)"),
    ]),
    Case("several epochs with Join, and other numbers of steps", [
        ("import os\n", "import os\nfrom torch.distributed.algorithms.join import Join\n"),
        (SAMPLER, "    mine = range(100) if rank else range(100, 320)\n"
                  "    train = torch.utils.data.Subset(train, mine)\n"),
        (LOADER, "    loader = DataLoader(train, 16, shuffle=True)\n"), (SET_EPOCH, ""),
        (LOOP + ZERO + LOSS + BACKWARD + STEP, "        with Join([model]):\n" + "".join(
            f"    {line}\n" for line in (LOOP + ZERO + LOSS + BACKWARD + STEP).splitlines())),
        ("self.norm = nn.BatchNorm1d(32)", "self.norm = nn.LayerNorm(32)"),
    ]),
    Case("a layer that is unfrozen in mid-run", [
        (EPOCHS, "    model = DDP(net, find_unused_parameters=True)\n"
                 "    net.a.requires_grad_(False)\n"
                 "    optimizer = torch.optim.SGD(net.b.parameters(), lr=0.05)\n" + EPOCHS
         + "        if epoch == 1:\n            net.a.requires_grad_(True)\n"
           "            optimizer.add_param_group(\n"
           "                {'params': [*net.a.parameters(), *net.norm.parameters()]})\n"),
        (WRAP, ""), (OPTIMIZER, ""), ("    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, "
                                      "1, 0.9)\n", ""), ("        scheduler.step()\n", ""),
    ]),
    Case("gathered results, cut to their number", [
        ("make_data(64, 1)", "make_data(63, 1)"), ("hits = torch.zeros(())", "hits = []"),
        ("hits += (model(x).argmax(1) == y).sum()",
         "hits.append((model(x).argmax(1) == y).float())"),
        (REDUCE, "        mine = torch.cat(hits)\n"
                 "        parts = [torch.zeros_like(mine) for _ in range(world_size)]\n"
                 "        dist.all_gather(parts, mine)\n"
                 "        hits = torch.stack(parts, 1).flatten()[: len(test)].sum()\n"),
    ]),
    Case("a sharded optimizer", [
        (OPTIMIZER, "    from torch.distributed.optim import ZeroRedundancyOptimizer\n"
         "    optimizer = ZeroRedundancyOptimizer(\n"
         "        model.parameters(), torch.optim.Adam, lr=0.01)\n"),
    ]),
    Case("a loss scaler, unscaled before clipping", [
        (OPTIMIZER, OPTIMIZER + '    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)\n'),
        (BACKWARD, "            scaler.scale(loss).backward()\n"
         "            scaler.unscale_(optimizer)\n"
         "            clip_grad_norm_(model.parameters(), 1.0)\n"),
        (STEP, "            scaler.step(optimizer)\n            scaler.update()\n"),
    ]),
    Case("nanoGPT", style="nano"),
    Case("Accelerate", style="accelerate"),
    Case("Fabric", style="fabric"),
    Case("Lightning", style="lightning"),
    Case("Trainer", style="trainer"),
)  # fmt: skip

MISTAKES: Sequence[Case] = (
    Case("bypass", [("(model(x), y)\n", "(model.module(x), y)  # here\n")],
         "gradients-not-averaged"),
    Case("no_sync around all", [
        (LOSS + BACKWARD, "            with model.no_sync():  # here\n"
         "                F.cross_entropy(model(x), y).backward()\n"),
    ], "gradients-not-averaged"),
    Case("a layer replaced after the wrap", [
        (OPTIMIZER, "    net.b = nn.Linear(32, 4)  # here\n"
         "    dist.broadcast(net.b.weight.data, 0)\n    dist.broadcast(net.b.bias.data, 0)\n"
         + OPTIMIZER),
        ("DDP(net)", "DDP(net, find_unused_parameters=True)"),
    ], "gradients-not-averaged"),
    Case("no wrap", [
        (WRAP, BY_HAND[0][1].replace("model = net\n", "model = net  # here\n")),
    ], "gradients-not-averaged"),
    Case("changed on one rank", [
        (STEP, "            if rank == 0:\n"
               "                clip_grad_norm_(net.parameters(), 0.01)  # here\n" + STEP),
    ], "gradients-not-averaged"),
    Case("weights loaded on one rank", [
        (OPTIMIZER, OPTIMIZER + "    if rank == 0:\n"
         "        net.load_state_dict(Net().state_dict())  # here\n"),
    ], "weights-differ"),
    Case("another learning rate on each rank", [
        ("StepLR(optimizer, 1, 0.9)",
         "ReduceLROnPlateau(optimizer, patience=0, threshold=5 * rank)"),
        ("        scheduler.step()\n", "        scheduler.step(1.0 - epoch * 0.1)  # here\n"),
        ("range(2)", "range(4)"),
    ], "learning-rates-differ"),
    Case("statistics not broadcast", [
        ("DDP(net)\n", "DDP(net, broadcast_buffers=False)  # here\n"),
    ], "buffers-differ"),
    Case("frozen after the wrap", [
        (OPTIMIZER, OPTIMIZER + "    net.a.requires_grad_(False)\n"),
        (BACKWARD, "            loss.backward()  # here\n"),
        (STEP, STEP + "            break\n"), ("range(2)", "range(1)"),
        ("(model(x).argmax", "(net(x).argmax"),
    ], "gradients-not-averaged"),
    Case("a head replaced after the optimizer was made", [
        (OPTIMIZER, ""),
        (WRAP, OPTIMIZER.replace("model", "net").replace("\n", "  # here\n")
         + "    net.b = nn.Linear(32, 4)\n" + WRAP),
    ], "parameter-not-in-optimizer"),
    Case("gradients added up by hand", [
        *BY_HAND, (STEP, "            for p in net.parameters():\n"
                   "                dist.all_reduce(p.grad)  # here\n" + STEP),
    ], "scaled-by-world-size"),
    Case("no sampler, equal seeds", [("manual_seed(rank)", "manual_seed(0)"), *NO_SAMPLER],
         "same-samples"),
    Case("no sampler, a seed per rank", NO_SAMPLER, "samples-overlap"),
    Case("a stream on every rank", stream("0", "1"), "same-samples"),
    Case("a stream in every worker", stream("rank", "world_size", 2), "samples-repeated"),
    Case("a sampler for four ranks", [
        (SAMPLER, "    sampler = DistributedSampler(train, num_replicas=4, rank=rank)  # here\n"),
    ], "samples-missing"),
    Case("set_epoch forgotten", [(SET_EPOCH, ""), (EPOCHS, EPOCHS.replace("\n", "  # here\n"))],
         "same-order"),
    Case("zero_grad forgotten", [(ZERO, ""), (BACKWARD, BACKWARD.replace("\n", "  # here\n"))],
         "gradients-not-zeroed"),
    Case("zero_grad before each batch", [
        NULLCONTEXT, (ACCUMULATE[0], ACCUMULATE[1].replace(
            "    with null", "    optimizer.zero_grad()  # here\n            with null")),
    ], "accumulation-lost"),
    Case("accumulation without division", [
        NULLCONTEXT, (ACCUMULATE[0], ACCUMULATE[1].replace(", y) / 2", ", y)").replace(
            "loss.backward()\n", "loss.backward()  # here\n")),
    ], "accumulation-not-divided"),
    Case("gradients divided by hand, too", [
        (STEP, "            for p in model.parameters():\n"
               "                p.grad.div_(world_size)  # here\n" + STEP),
    ], "divided-twice"),
    Case("multiplied by the world size", [
        (BACKWARD, "            (loss * dist.get_world_size()).backward()  # here\n"),
    ], "scaled-by-world-size"),
    Case("a part of the model in the optimizer", [
        (OPTIMIZER, "    optimizer = torch.optim.SGD(net.a.parameters(), lr=0.05)  # here\n"),
    ], "parameter-not-in-optimizer"),
    Case("a learning rate of 0", [
        (OPTIMIZER, "    groups = [{'params': net.a.parameters(), 'lr': 0.0},\n"
         "              {'params': [*net.norm.parameters(), *net.b.parameters()]}]\n"
         "    optimizer = torch.optim.SGD(groups, lr=0.05)  # here\n"),
    ], "parameter-never-moves"),
    Case("a detach too many", [
        ("F.relu(self.norm(self.a(x)))", "F.relu(self.norm(self.a(x))).detach()"),
        ("detach()))\n", "detach()))  # here\n"),
        ("DDP(net)", "DDP(net, find_unused_parameters=True)"),
    ], "parameter-never-moves"),
    Case("clipping before unscale", [
        (OPTIMIZER, OPTIMIZER + '    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)\n'),
        (BACKWARD, "            scaler.scale(loss).backward()\n"
         "            clip_grad_norm_(model.parameters(), 1.0)  # here\n"),
        (STEP, "            scaler.step(optimizer)\n            scaler.update()\n"),
    ], "clipped-before-unscale"),
    Case("clipping before the all-reduce", [
        BY_HAND[0],
        (STEP, "            clip_grad_norm_(net.parameters(), 0.1)  # here\n" + AVERAGE + STEP),
    ], "clipped-before-all-reduce"),
    Case("equal dropout masks", [("manual_seed(rank)\n", "manual_seed(7)  # here\n")],
         "same-dropout"),
    Case("equal augmentations", [
        (SAMPLER, AUGMENTED + SAMPLER), ("manual_seed(rank)\n", "manual_seed(7)  # here\n"),
        ("nn.Dropout(0.2)", "nn.Identity()"),
    ], "same-augmentation"),
    Case("evaluation in train mode", [
        (EVAL, ""), ("(model(x).argmax(1) == y).sum()\n",
                     "(model(x).argmax(1) == y).sum()  # here\n"),
    ], "evaluation-in-train-mode"),
    Case("evaluation not joined", [
        (REDUCE, ""), ("            for x, y in test_loader:\n",
                       "            for x, y in test_loader:  # here\n"),
    ], "evaluation-not-joined"),
    Case("evaluation of one rank's share, on that rank alone", [
        (EVAL, "        if rank:\n            continue\n" + EVAL), (REDUCE, ""),
        ("(model(x).argmax", "(net(x).argmax"),
        ("            for x, y in test_loader:\n",
         "            for x, y in test_loader:  # here\n"),
    ], "evaluation-not-joined"),
    Case("train() before all epochs only", [
        ("        model.train()\n", ""), (EPOCHS, "    model.train()\n" + EPOCHS),
        (EVAL, EVAL.replace("\n", "  # here\n")),
    ], "train-mode-lost"),
    Case("a schedule for the undivided data", [
        ("StepLR(optimizer, 1, 0.9)\n", "CosineAnnealingLR(optimizer, 2 * 20)  # here\n"),
        ("        scheduler.step()\n", ""), (STEP, STEP + "            scheduler.step()\n"),
    ], "schedule-too-long"),
    Case("a schedule that is stepped once per rank", [
        ("StepLR(optimizer, 1, 0.9)\n", "LambdaLR(optimizer, lambda s: 1 - s / total)\n"),
        ("    scheduler = ", "    total = 2 * len(loader)\n    scheduler = "),
        ("        scheduler.step()\n", ""),
        (STEP, STEP + "            for _ in range(world_size):\n"
                      "                scheduler.step()  # here\n"),
    ], "schedule-too-short"),
    Case("equal noise", [
        ("manual_seed(rank)\n", "manual_seed(7)  # here\n"), ("nn.Dropout(0.2)", "nn.Identity()"),
        (LOSS, LOSS.replace("model(x)", "model(x + 0.1 * torch.randn_like(x))")),
    ], "same-noise"),
    Case("evaluation padded", [
        ("make_data(64, 1)", "make_data(63, 1)"),
        (TEST, TEST.replace("\n", "  # here\n")),
    ], "evaluation-padded"),
    Case("one file", [(SAVE, '        torch.save(net.state_dict(), "model.pt")  # here\n')],
         "same-file"),
    Case("no_sync around backward only", [
        NULLCONTEXT, (ACCUMULATE[0], ACCUMULATE[1].replace(
            "            with nullcontext() if is_last else model.no_sync():\n"
            "                loss = F.cross_entropy(model(x), y) / 2\n"
            "                loss.backward()\n",
            "            loss = F.cross_entropy(model(x), y) / 2\n"
            "            with nullcontext() if is_last else model.no_sync():\n"
            "                loss.backward()  # here\n")),
    ], "no-sync-without-effect"),
    Case("nanoGPT with one seed", [
        ("manual_seed(1337 + ddp_rank)\n", "manual_seed(1337)  # here\n"),
        ("step % 5 == 0 and master_process", "step % 5 == 0"),
    ], "same-samples", "nano"),
    Case("nanoGPT through raw_model", [
        ("logits, loss = model(X, Y)\n", "logits, loss = raw_model(X, Y)  # here\n"),
    ], "gradients-not-averaged", "nano"),
    Case("nanoGPT evaluated in train mode", [
        ("    model.eval()\n    losses = [model(*get_batch())[1].item() for _ in range(3)]\n",
         "    losses = [model(*get_batch())[1].item() for _ in range(3)]  # here\n"),
    ], "evaluation-in-train-mode", "nano"),
    Case("Accelerate without the loader", [
        ("model, optimizer, loader = accelerator.prepare(net, optimizer, loader)",
         "model, optimizer = accelerator.prepare(net, optimizer)"),
        ("manual_seed(accelerator.process_index)", "manual_seed(0)"),
        ("DataLoader(train, 16, shuffle=True)", "DataLoader(train, 16, shuffle=True)  # here"),
    ], "same-samples", "accelerate"),
    Case("Accelerate clips before it averages", [
        ("            if accelerator.sync_gradients:\n    ", ""),
        ("accelerator.clip_grad_norm_(model.parameters(), 1.0)",
         "accelerator.clip_grad_norm_(model.parameters(), 1.0)  # here"),
    ], "clipped-before-all-reduce", "accelerate"),
    Case("Fabric without its loader", [
        ("fabric.setup_dataloaders(DataLoader(train, 16, shuffle=True))",
         "DataLoader(train, 16)  # here"),
    ], "same-samples", "fabric"),
    Case("Fabric without zero_grad", [
        ("        optimizer.zero_grad()\n", ""),
        ("        fabric.backward(F.cross_entropy(model(x), y))\n",
         "        fabric.backward(F.cross_entropy(model(x), y))  # here\n"),
    ], "gradients-not-zeroed", "fabric"),
    Case("Lightning without its sampler", [
        ("max_epochs=2", "use_distributed_sampler=False, max_epochs=2"),
        ("16, shuffle=True)", "16)  # here"),
    ], "same-samples", "lightning"),
    Case("Lightning with a part in the optimizer", [
        ("torch.optim.Adam(self.parameters(), lr=1e-3)",
         "torch.optim.Adam(self.net[3].parameters(), lr=1e-3)  # here"),
    ], "parameter-not-in-optimizer", "lightning"),
    Case("Trainer that writes on all ranks", [
        ("    trainer.train()\n",
         '    trainer.train()\n    torch.save(trainer.model.state_dict(), "m.pt")  # here\n'),
    ], "same-file", "trainer"),
)  # fmt: skip
"""Each with one mistake."""
