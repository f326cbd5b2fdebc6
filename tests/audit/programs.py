"""Programs that audit is tested on: those of the benchmark that its rules were tuned on, and more.

Here are edits of its style "plain", for kinds of programs and mistakes that are not among those.
`# here` stands on the line that the audit must name.
"""

from collections.abc import Sequence

from benchmarks.audit_cases import first, third
from benchmarks.audit_cases.case import Case

Edit = tuple[str, str]


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
TEST = "sampler=DistributedSampler(test, shuffle=False))\n"
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
        return iter([train[i] for i in range(rank, 320, world_size)])

loader = DataLoader(Stream(), 16, num_workers=2)
""",
    1,
)
NO_MISTAKE = ("joined", "contrastive", "accelerate", "fabric", "lightning", "trainer")
"""As it is written, any other style has a mistake below beside which nothing else may be told."""

OF_THE_FIRST = ("same-file", "scaled-by-world-size")
"""What the first lot shows in other styles, by the same records."""

ONE_RANK = "    groups = [dist.new_group([r]) for r in range(world_size)]\n"
ONE_RANK += "    model = DDP(net, process_group=groups[rank])\n"
BY_HAND: Sequence[Edit] = (
    (
        WRAP,
        "    model = net\n    for t in net.state_dict().values():\n        dist.broadcast(t, 0)\n",
    ),
    ("self.norm = nn.BatchNorm1d(32)", "self.norm = nn.LayerNorm(32)"),
)
AVERAGE = "            for p in net.parameters():\n                dist.all_reduce(p.grad)\n"
AVERAGE += "                p.grad /= world_size\n"


def plain(name: str, edits: Sequence[Edit] = (), *codes: str) -> Case:
    return Case(name, "plain", edits, codes)


HEALTHY = (
    *(c for c in first.HEALTHY if c.edits or c.style in NO_MISTAKE),
    plain("the tutorial"),
    plain("augmentation with a seed per rank", [(SAMPLER, AUGMENTED + SAMPLER)]),
    plain("a share per rank", [
        (SAMPLER, "    train = TensorDataset(*[t[rank::world_size] for t in train.tensors])\n"),
        (LOADER, "    loader = DataLoader(train, 16, shuffle=True)\n"), (SET_EPOCH, ""),
    ]),
    plain("two loaders, one batch of each in a step", [
        (LOADER, LOADER + "    extra = make_data(320, 5)\n"
         "    other = DataLoader(extra, 16, sampler=DistributedSampler(extra))\n"),
        (LOOP, "        for (x, y), (u, v) in zip(loader, other):\n"
               "            x, y = torch.cat([x, u]), torch.cat([y, v])\n"),
        (SET_EPOCH, SET_EPOCH + "        other.sampler.set_epoch(epoch)\n"),
    ]),
    plain("a weighted sampler", [
        (SAMPLER, "    sampler = torch.utils.data.WeightedRandomSampler(torch.ones(320), 160)\n"),
        (SET_EPOCH, ""),
    ]),
    plain("a teacher in train mode", [
        (OPTIMIZER, OPTIMIZER + "    teacher = Net().train()\n"),
        (LOSS, LOSS + "            with torch.no_grad():\n                goal = teacher(x)\n"
               "            loss = loss + 0.1 * (net.b.weight.sum() * 0 + goal.mean())\n"),
    ]),
    plain("two models, one after the other, and one name for their optimizers", [
        (OPTIMIZER, "    first = DDP(nn.Linear(20, 4))\n"
         "    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)\n"
         "    x, y = (t[rank::world_size] for t in train.tensors)\n"
         "    for i in range(0, 96, 16):\n        optimizer.zero_grad()\n"
         "        F.cross_entropy(first(x[i:i + 16]), y[i:i + 16]).backward()\n"
         "        optimizer.step()\n" + OPTIMIZER),
    ]),
    plain("two losses, two backwards", [
        (BACKWARD, "            loss.backward(retain_graph=True)\n"
                   "            (0.1 * net.a.weight.pow(2).mean()).backward()\n"),
        *BY_HAND, (STEP, AVERAGE + STEP),
    ]),
    plain("gradients averaged by hand, and by the loss", [
        *BY_HAND, (LOSS, LOSS.replace("\n", " / world_size\n")),
        (STEP, "            for p in net.parameters():\n                dist.all_reduce(p.grad)\n"
         + STEP),
    ]),
    plain("evaluation of a Subset, joined", [
        (TEST, "shuffle=False)\n"),
        (SAMPLER, SAMPLER + "    part = range(rank, 64, world_size)\n"
         "    test = torch.utils.data.Subset(test, part)\n"),
    ]),
    plain("a probe with an optimizer of its own, on one rank", [
        (OPTIMIZER, "    if rank == 0:\n        probe = nn.Linear(20, 4)\n"
         "        tuner = torch.optim.SGD(probe.parameters(), lr=0.1)\n"
         "        for x, y in test_loader:\n            tuner.zero_grad()\n"
         "            F.cross_entropy(probe(x), y).backward()\n            tuner.step()\n"
         + OPTIMIZER),
    ]),
    plain("an ensemble with one member on each rank", [
        (WRAP, ONE_RANK),
        ("Sampler(train)", "Sampler(train, num_replicas=1, rank=0, seed=rank)"),
    ]),
    plain("weights averaged at every fourth step", [
        (ZERO + LOSS + BACKWARD, "            optimizer.zero_grad()\n"
         "            with model.no_sync():\n"
         "                F.cross_entropy(model(x), y).backward()\n"),
        (STEP, STEP + "            count += 1\n            for p in net.parameters():\n"
                      "                if count % 4 == 0:\n"
                      "                    dist.all_reduce(p.data)\n"
                      "                    p.data /= world_size\n"),
        (EPOCHS, "    count = 0\n" + EPOCHS),
    ]),
    plain("biases of two classes, which move by opposite amounts", [
        ("nn.Linear(32, 4)", "nn.Linear(32, 2)"), ("x[:, :4].argmax(1)", "x[:, :2].argmax(1)"),
    ]),
    plain("a file per rank", [
        (SAVE, '        torch.save(net.state_dict(), f"model-{rank}.pt")\n'),
    ]),
    plain("a sharded optimizer", [
        (OPTIMIZER, "    from torch.distributed.optim import ZeroRedundancyOptimizer\n"
         "    optimizer = ZeroRedundancyOptimizer(\n"
         "        model.parameters(), torch.optim.Adam, lr=0.01)\n"),
    ]),
    plain("a loss scaler, unscaled before clipping", [
        (OPTIMIZER, OPTIMIZER + '    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)\n'),
        (BACKWARD, "            scaler.scale(loss).backward()\n"
         "            scaler.unscale_(optimizer)\n"
         "            clip_grad_norm_(model.parameters(), 1.0)\n"),
        (STEP, "            scaler.step(optimizer)\n            scaler.update()\n"),
    ]),
)  # fmt: skip
MISTAKES = (
    *(c for c in first.MISTAKES if not c.real),
    *(c for c in third.MISTAKES if c.codes[0] not in OF_THE_FIRST),
    plain("a layer replaced after the wrap", [
        (OPTIMIZER, "    net.b = nn.Linear(32, 4)  # here\n"
         "    dist.broadcast(net.b.weight.data, 0)\n    dist.broadcast(net.b.bias.data, 0)\n"
         + OPTIMIZER),
        ("DDP(net)", "DDP(net, find_unused_parameters=True)"),
    ], "gradients-not-averaged"),
    plain("changed on one rank", [
        (STEP, "            if rank == 0:\n"
               "                clip_grad_norm_(net.parameters(), 0.01)  # here\n" + STEP),
    ], "gradients-not-averaged"),
    plain("an all-reduce that leaves out vectors", [
        *BY_HAND, (STEP, AVERAGE.replace("dist.", "if p.dim() > 1: dist.").replace(
            "p.grad)", "p.grad)  # here") + STEP),
    ], "gradients-not-averaged"),
    plain("a process group of one rank", [(WRAP, ONE_RANK.replace("k])\n", "k])  # here\n"))],
          "weights-differ"),
    plain("one rank alone steps", [
        (STEP, "            if rank == 0:\n                optimizer.step()  # here\n"),
    ], "weights-differ"),
    plain("the optimizer's state loaded on one rank", [
        (OPTIMIZER, OPTIMIZER + "    if rank == 0:\n        old = Net()\n"
         "        past = torch.optim.SGD(old.parameters(), lr=0.05, momentum=0.9)\n"
         "        F.cross_entropy(old(train.tensors[0]), train.tensors[1]).backward()\n"
         "        past.step()\n        optimizer.load_state_dict(past.state_dict())  # here\n"),
    ], "weights-differ"),
    plain("frozen after the wrap", [
        (OPTIMIZER, OPTIMIZER + "    net.a.requires_grad_(False)\n"),
        (BACKWARD, "            loss.backward()  # here\n"),
        (STEP, STEP + "            break\n"), ("range(2)", "range(1)"),
        ("(model(x).argmax", "(net(x).argmax"),
    ], "gradients-not-averaged"),
    plain("a stream in every worker", [(SAMPLER + LOADER, STREAM), (SET_EPOCH, "")],
          "samples-repeated"),
    plain("a sampler for four ranks", [
        (SAMPLER, "    sampler = DistributedSampler(train, num_replicas=4, rank=rank)  # here\n"),
    ], "samples-missing"),
    plain("a share of each rank's share", [
        (SAMPLER, "    train = TensorDataset(*[t[rank::world_size] for t in train.tensors])\n"
         + SAMPLER.replace("\n", "  # here\n")),
    ], "samples-missing"),
    plain("another split on each rank", [
        (SAMPLER, "    train, _ = torch.utils.data.random_split(train, [280, 40])  # here\n"
         + SAMPLER),
    ], "samples-overlap"),
    plain("added up by hand, too", [
        (STEP, "            for p in model.parameters():\n"
               "                dist.all_reduce(p.grad)  # here\n" + STEP),
    ], "scaled-by-world-size"),
    plain("zero_grad forgotten", [(ZERO, ""), (BACKWARD, BACKWARD.replace("\n", "  # here\n"))],
          "gradients-not-zeroed"),
    plain("gradients divided by hand, too", [
        (STEP, "            for p in model.parameters():\n"
               "                p.grad.div_(world_size)  # here\n" + STEP),
    ], "divided-twice"),
    plain("a learning rate of 0", [
        (OPTIMIZER, "    groups = [{'params': net.a.parameters(), 'lr': 0.0},\n"
         "              {'params': [*net.norm.parameters(), *net.b.parameters()]}]\n"
         "    optimizer = torch.optim.SGD(groups, lr=0.05)  # here\n"),
    ], "parameter-never-moves"),
    plain("clipping before the all-reduce", [
        BY_HAND[0],
        (STEP, "            clip_grad_norm_(net.parameters(), 0.1)  # here\n" + AVERAGE + STEP),
    ], "clipped-before-all-reduce"),
    plain("a schedule that is stepped once per rank", [
        ("StepLR(optimizer, 1, 0.9)\n", "LambdaLR(optimizer, lambda s: 1 - s / total)\n"),
        ("    scheduler = ", "    total = 2 * len(loader)\n    scheduler = "),
        ("        scheduler.step()\n", ""),
        (STEP, STEP + "            for _ in range(world_size):\n"
                      "                scheduler.step()  # here\n"),
    ], "schedule-too-short"),
    plain("no_sync around backward only", [
        ("import os\n", "import os\nfrom contextlib import nullcontext\n"),
        (LOOP + ZERO + LOSS + BACKWARD + STEP, """\
        for index, (x, y) in enumerate(loader):
            is_last = index % 2 == 1
            loss = F.cross_entropy(model(x), y) / 2
            with nullcontext() if is_last else model.no_sync():
                loss.backward()  # here
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
"""),
    ], "no-sync-without-effect"),
)  # fmt: skip
