"""The first lot: the rules of audit were tuned on it."""

from benchmarks.audit_cases.case import EACH_RANK_EVALUATES, FINDS_UNUSED, HERE, UNEVEN_DATA, Case

HEALTHY = (
    *(Case("as written", style) for style in (
        "tutorial", "vision", "gpt", "gan", "diffusion", "stream", "finetune", "by_hand", "joined",
        "contrastive", "spawn", "accelerate", "fabric", "lightning", "trainer")),
    Case("a layer is unfrozen in the second epoch", "finetune", [
        FINDS_UNUSED,
        ("for p in model.backbone.parameters():\n        p.requires_grad = False\n    ddp",
         "pass\n    ddp"),
        ("    for epoch in range(3):\n",
         "    for p in model.backbone.parameters():\n        p.requires_grad_(False)\n"
         "    for epoch in range(3):\n        if epoch == 1:\n"
         "            for p in model.backbone.parameters():\n"
         "                p.requires_grad_(True)\n"
         "            optimizer.add_param_group({'params': [*model.backbone.parameters()]})\n"),
        ("head = [p for p in model.parameters() if p.requires_grad]",
         "head = [*model.neck.parameters(), *model.fc.parameters()]"),
    ]),
    Case("a head is replaced, and all is wrapped again", "finetune", [
        ("    for epoch in range(3):\n",
         "    for epoch in range(3):\n        if epoch == 1:\n"
         "            del ddp\n            model.fc = nn.Linear(16, 3)\n"
         "            ddp = DDP(model)\n"
         "            optimizer = torch.optim.AdamW(\n"
         "                [p for p in model.parameters() if p.requires_grad], lr=1e-3)\n"),
    ]),
    Case("accumulation under no_sync", "tutorial", [
        ("        optimizer.zero_grad()\n        loss = F.cross_entropy(model(x), y)\n"
         "        loss.backward()\n        optimizer.step()\n        scheduler.step()\n",
         "        steps += 1\n        if steps % 2:\n            with model.no_sync():\n"
         "                loss = F.cross_entropy(model(x), y)\n"
         "                (loss / 2).backward()\n            continue\n"
         "        loss = F.cross_entropy(model(x), y)\n        (loss / 2).backward()\n"
         "        optimizer.step()\n        optimizer.zero_grad()\n        scheduler.step()\n"),
        ("    total = 0.0\n", "    total, steps = 0.0, 0\n"),
        ("args.epochs * len(train_loader)", "args.epochs * len(train_loader) // 2"),
    ]),
    Case("a schedule of epochs", "tutorial", [
        ("        scheduler.step()\n", ""), ("T_max=total_steps", "T_max=args.epochs"),
        ("        acc = evaluate", "        scheduler.step()\n        acc = evaluate"),
    ]),
    Case("validation on rank 0, of the whole set, through the module", "tutorial", [
        ("        acc = evaluate(model, val_loader, device)\n        if rank == 0:\n",
         "        if rank == 0:\n            acc = evaluate(model.module, val_loader, device)\n"),
        EACH_RANK_EVALUATES,
        ("sampler=val_sampler", "shuffle=False"),
    ]),
    Case("gathered predictions, cut to the size of the set", "tutorial", [
        UNEVEN_DATA,
        ("    counts = torch.zeros(2, device=device)\n", "    hits = []\n"),
        ("            counts[0] += (logits.argmax(1) == y.to(device)).sum()\n"
         "            counts[1] += len(y)\n    dist.all_reduce(counts)\n"
         "    return (counts[0] / counts[1]).item()",
         "            hits.append((logits.argmax(1) == y.to(device)).float())\n"
         "    mine = torch.cat(hits)\n"
         "    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]\n"
         "    dist.all_gather(parts, mine)\n"
         "    whole = torch.stack(parts, 1).flatten()[: len(loader.dataset)]\n"
         "    return whole.mean().item()"),
    ]),
    Case("seeds are equal for the weights, and others afterwards", "diffusion", [
        ("seed_everything(7 + rank)", "seed_everything(7)"),
        ("    model = DDP(net)\n", "    model = DDP(net)\n    torch.manual_seed(1000 + rank)\n"),
    ]),
    Case("a random decision that all ranks share", "vision", [
        ("        output = model(images)\n",
         "        if shared.random() < 0.5:\n            images = F.avg_pool2d(images, 2)\n"
         "        output = model(images)\n"),
        ("    meter = Meter()\n    for i", "    meter, shared = Meter(), random.Random(epoch)\n"
         "    for i"),
    ]),
    Case("a loss of two parts, one half as heavy", "stream", [
        ("loss = F.mse_loss(model(x).squeeze(1), y)",
         "loss = 0.5 * F.mse_loss(model(x).squeeze(1), y)"),
    ]),
    Case("the loss is averaged for the log only", "tutorial", [
        ("        total += loss.item()\n",
         "        logged = loss.detach().clone()\n        dist.all_reduce(logged)\n"
         "        total += logged.item() / dist.get_world_size()\n"),
    ]),
    Case("a sampler by hand", "vision", [
        ("def build():", "class EachNth(torch.utils.data.Sampler):\n"
         "    def __init__(self, size, rank, world):\n"
         "        self.size, self.rank, self.world, self.epoch = size, rank, world, 0\n\n"
         "    def set_epoch(self, epoch):\n        self.epoch = epoch\n\n"
         "    def __len__(self):\n        return self.size // self.world\n\n"
         "    def __iter__(self):\n"
         "        order = torch.randperm(self.size, "
         "generator=torch.Generator().manual_seed(self.epoch))\n"
         "        return iter(order[self.rank :: self.world].tolist())\n\n\ndef build():"),
        ("sampler = DistributedSampler(dataset)\n",
         "sampler = EachNth(len(dataset), args.rank, args.world)\n"),
    ]),
    Case("Join with DDP's own join()", "joined", [("Join([model])", "model.join()")]),
    Case("accumulate()", "accelerate", [
        ("Accelerator(cpu=True)", "Accelerator(cpu=True, gradient_accumulation_steps=2)"),
        ("            loss = F.cross_entropy(model(x), y)\n            accelerator.backward(loss)\n"
         "            accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"
         "            optimizer.step()\n            scheduler.step()\n"
         "            optimizer.zero_grad()\n",
         "            with accelerator.accumulate(model):\n"
         "                loss = F.cross_entropy(model(x), y)\n"
         "                accelerator.backward(loss)\n"
         "                if accelerator.sync_gradients:\n"
         "                    accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"
         "                optimizer.step()\n                scheduler.step()\n"
         "                optimizer.zero_grad()\n"),
        ("total_iters=epochs * len(train_loader)", "total_iters=epochs * len(train_loader) // 2"),
    ]),
)  # fmt: skip
MISTAKES = (
    Case("the inner module is called", "tutorial", [
        ("F.cross_entropy(model(x), y)\n        loss.b",
         "F.cross_entropy(model.module(x), y)" + HERE + "        loss.b"),
    ], ["gradients-not-averaged"], "not averaged"),
    Case("raw_model in the loop", "gpt", [
        ("        logits, loss = model(X, Y)\n",
         "        logits, loss = raw_model(X, Y)" + HERE),
    ], ["gradients-not-averaged"], "not averaged"),
    Case("require_backward_grad_sync stays off", "gpt", [
        ("micro == grad_accum - 1\n", "micro == grad_accum" + HERE),
    ], ["gradients-not-averaged"], "not averaged"),
    Case("one of two networks is not wrapped", "gan", [
        ("netG, netD = DDP(mlp(4, 16, 6)), DDP(mlp(6, 16, 1))\n",
         "netG, netD = mlp(4, 16, 6), DDP(mlp(6, 16, 1))" + HERE
         + "    for p in netG.parameters():\n        dist.broadcast(p.data, 0)\n"),
        ("netG.module.state_dict", "netG.state_dict"),
    ], ["gradients-not-averaged"], "not averaged"),
    Case("no sampler", "vision", [
        ("loader = DataLoader(dataset, 8, sampler=sampler, drop_last=True)\n",
         "loader = DataLoader(dataset, 8, shuffle=True, drop_last=True)" + HERE),
    ], ["samples-overlap", "same-samples"], "samples"),
    Case("a stream that no rank divides", "stream", [
        ("    def __iter__(self):\n", "    def __iter__(self):" + HERE),
        ("range(self.rank * workers + worker, self.size, self.world * workers)",
         "range(worker, self.size, workers)"),
    ], ["same-samples"], "samples"),
    Case("batches drawn with one seed", "gpt", [
        ("torch.manual_seed(1337 + seed_offset)\n", "torch.manual_seed(1337)" + HERE),
        ("it % eval_interval == 0 and master", "it % eval_interval == 0"),
        ("        torch.save", "        if master: torch.save"),
    ], ["same-samples"], "samples"),
    Case("the loader is not prepared", "accelerate", [
        ("train_loader = DataLoader(train_set, batch_size=8, shuffle=True)\n",
         "train_loader = DataLoader(train_set, batch_size=8, shuffle=True)" + HERE),
        ("model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(\n"
         "        model, optimizer, train_loader, val_loader, scheduler)",
         "model, optimizer, val_loader, scheduler = accelerator.prepare(" + HERE[:-1] +
         "\n        model, optimizer, val_loader, scheduler)"),
    ], ["same-samples", "samples-overlap"], "samples"),
    Case("set_epoch is missing", "tutorial", [
        ("    for epoch in range(args.epochs):\n        train_sampler.set_epoch(epoch)\n",
         "    for epoch in range(args.epochs):" + HERE),
    ], ["same-order"], "order of epochs"),
    Case("the loss is averaged before backward", "tutorial", [
        ("        loss.backward()\n",
         "        dist.all_reduce(loss)\n        loss = loss / dist.get_world_size()" + HERE
         + "        loss.backward()\n"),
    ], ["divided-twice"], "scale of the loss"),
    Case("a helper averages the loss in place", "vision", [
        ("    tensor = tensor.clone().detach()\n    dist.all_reduce(tensor)\n"
         "    return tensor / world\n",
         "    dist.all_reduce(tensor)\n    tensor = tensor / world" + HERE
         + "    return tensor\n"),
        ("        optimizer.zero_grad()\n        loss.backward()\n",
         "        optimizer.zero_grad()\n        loss = reduce_mean(loss, args.world)" + HERE
         + "        loss.backward()\n"),
        ("reduce_mean(loss, args.world).item()", "loss.item()"),
    ], ["divided-twice"], "scale of the loss"),
    Case("an all-reduce with a backward of its own, not divided", "stream", [
        ("loss = F.mse_loss(model(x).squeeze(1), y)\n",
         "loss = F.mse_loss(model(x).squeeze(1), y)\n"
         "            loss = torch.distributed.nn.all_reduce(loss)" + HERE),
        ("import torch.distributed as dist\n",
         "import torch.distributed as dist\nimport torch.distributed.nn\n"),
    ], ["scaled-by-world-size"], "scale of the loss"),
    Case("the loss is multiplied by the world size", "fabric", [
        ("loss = F.cross_entropy(model(x), y)\n",
         "loss = F.cross_entropy(model(x), y) * fabric.world_size" + HERE),
    ], ["scaled-by-world-size"], "scale of the loss"),
    Case("gradients are added up by hand", "by_hand", [
        ("            p.grad /= world\n", ""),
        ("            dist.all_reduce(p.grad)\n", "            dist.all_reduce(p.grad)" + HERE),
    ], ["scaled-by-world-size"], "scale of the loss"),
    Case("accumulation without a division", "gpt", [
        ("        loss = loss / grad_accum\n", ""),
        ("        loss.backward()\n", "        loss.backward()" + HERE),
    ], ["accumulation-not-divided"], "accumulation"),
    Case("zero_grad in each micro-step", "gpt", [
        ("    for micro in range(grad_accum):\n",
         "    for micro in range(grad_accum):\n        optimizer.zero_grad()" + HERE),
    ], ["accumulation-lost"], "accumulation"),
    Case("gather instead of gather_for_metrics", "accelerate", [
        ("accelerator.gather_for_metrics((predictions, y))\n",
         "accelerator.gather((predictions, y))" + HERE),
    ], ["evaluation-padded"], "metric of padded data"),
    Case("gathered predictions with the padding", "tutorial", [
        UNEVEN_DATA,
        ("    counts = torch.zeros(2, device=device)\n", "    hits = []\n"),
        ("            counts[0] += (logits.argmax(1) == y.to(device)).sum()\n"
         "            counts[1] += len(y)\n    dist.all_reduce(counts)\n"
         "    return (counts[0] / counts[1]).item()",
         "            hits.append((logits.argmax(1) == y.to(device)).float())\n"
         "    mine = torch.cat(hits)\n"
         "    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]\n"
         "    dist.all_gather(parts, mine)" + HERE
         + "    return torch.cat(parts).mean().item()"),
        ("    val_sampler = DistributedSampler(val_set, shuffle=False)\n",
         "    val_sampler = DistributedSampler(val_set, shuffle=False)" + HERE),
    ], ["evaluation-padded"], "metric of padded data"),
    Case("train() is called once only", "tutorial", [
        ("    model.train()\n    total", "    total"),
        ("    best = 0.0\n", "    best = 0.0\n    model.train()\n"),
        ("    model.eval()\n", "    model.eval()" + HERE),
        ("        loss = train_one_epoch(", "        loss = train_one_epoch(" + HERE
         + "            "),
    ], ["train-mode-lost"], "train mode not restored"),
    Case("estimate_loss leaves the model in eval mode", "gpt", [
        ("    model.train()\n    return out", "    return out"),
        ("    model.eval()\n", "    model.eval()" + HERE),
        ("it % eval_interval == 0 and master", "it % eval_interval == 1"),
        ("        torch.save", "        if master: torch.save"),
    ], ["train-mode-lost"], "train mode not restored"),
    Case("train() is called before the loop", "accelerate", [
        ("        model.train()\n", ""), ("    best = 0.0\n", "    best = 0.0\n"
         "    model.train()\n"),
        ("        model.eval()\n", "        model.eval()" + HERE),
    ], ["train-mode-lost"], "train mode not restored"),
    Case("evaluation without eval()", "tutorial", [
        ("    model.eval()\n    counts", "    counts"),
        ("            logits = model(x.to(device))\n",
         "            logits = model(x.to(device))" + HERE),
        ("        for x, y in loader:\n            logits",
         "        for x, y in loader:" + HERE + "            logits"),
        ("def evaluate(model, loader, device):\n", "def evaluate(model, loader, device):" + HERE),
    ], ["evaluation-in-train-mode"], "evaluation in train mode"),
    Case("a schedule for the undivided data", "tutorial", [
        ("    total_steps = args.epochs * len(train_loader)\n",
         "    total_steps = args.epochs * (len(train_set) // args.batch_size)" + HERE),
        ("T_max=total_steps)\n", "T_max=total_steps)" + HERE),
    ], ["schedule-too-long"], "schedule"),
    Case("a linear schedule of the prepared loader", "accelerate", [
        ("    scheduler = torch.optim.lr_scheduler.LinearLR(\n"
         "        optimizer, 1.0, 0.1, total_iters=epochs * len(train_loader))\n"
         "    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(\n"
         "        model, optimizer, train_loader, val_loader, scheduler)\n",
         "    model, optimizer, train_loader, val_loader = accelerator.prepare(\n"
         "        model, optimizer, train_loader, val_loader)\n"
         "    scheduler = torch.optim.lr_scheduler.LinearLR(" + HERE
         + "        optimizer, 1.0, 0.1, total_iters=epochs * len(train_loader))" + HERE
         + "    scheduler = accelerator.prepare(scheduler)\n"),
    ], ["schedule-too-short"], "schedule"),
    Case("rank 0's share picks the best", "tutorial", [
        EACH_RANK_EVALUATES,
        ("            counts[1] += len(y)\n", "            counts[1] += len(y)" + HERE),
        ("        for x, y in loader:\n            logits",
         "        for x, y in loader:" + HERE + "            logits"),
    ], ["evaluation-not-joined"], "metric of one rank's share"),
    Case("rank 0 alone evaluates its share", "tutorial", [
        ("        acc = evaluate(model, val_loader, device)\n        if rank == 0:\n",
         "        if rank == 0:\n"
         "            acc = evaluate(model.module, val_loader, device)" + HERE),
        EACH_RANK_EVALUATES,
        ("        for x, y in loader:\n            logits",
         "        for x, y in loader:" + HERE + "            logits"),
        ("    val_sampler = DistributedSampler(val_set, shuffle=False)\n",
         "    val_sampler = DistributedSampler(val_set, shuffle=False)" + HERE),
    ], ["evaluation-not-joined"], "metric of one rank's share"),
    Case("equal noise", "diffusion", [
        ("seed_everything(7 + rank)\n", "seed_everything(7)" + HERE),
    ], ["same-noise"], "equal random numbers"),
    Case("equal latent vectors", "gan", [
        ("torch.manual_seed(100 + rank)\n", "torch.manual_seed(100)" + HERE),
    ], ["same-noise"], "equal random numbers"),
    Case("equal flips", "vision", [
        ("    random.seed(args.rank)\n    torch.manual_seed(args.rank)\n",
         "    random.seed(0)" + HERE + "    torch.manual_seed(0)" + HERE),
    ], ["same-augmentation"], "equal random numbers"),
    Case("equal masks", "tutorial", [
        ("set_seed(1234 + rank)\n", "set_seed(1234)" + HERE),
        ("    torch.manual_seed(seed)\n", "    torch.manual_seed(seed)" + HERE),
    ], ["same-dropout"], "equal random numbers"),
    Case("rank 0 loads weights after the wrap", "finetune", [
        ("    head = [", "    if rank == 0:\n"
         "        model.load_state_dict(Classifier().state_dict())" + HERE + "    head = ["),
    ], ["weights-differ"], "weights"),
    Case("clipped before unscale_", "vision", [
        ("        loss.backward()\n        nn.utils.clip_grad_norm_(model.parameters(), 5.0)\n"
         "        optimizer.step()\n",
         "        scaler.scale(loss).backward()\n"
         "        nn.utils.clip_grad_norm_(model.parameters(), 5.0)" + HERE
         + "        scaler.step(optimizer)\n        scaler.update()\n"),
        ("    meter = Meter()\n    for",
         "    meter = Meter()\n    scaler = torch.amp.GradScaler('cpu', init_scale=512.0)\n"
         "    for"),
    ], ["clipped-before-unscale"], "clipping"),
    Case("a detach too many", "finetune", [
        ("        return self.fc(F.relu(self.neck(self.backbone(x))))",
         "        h = F.relu(self.neck(self.backbone(x))).detach()" + HERE
         + "        return self.fc(h)"),
        FINDS_UNUSED,
    ], ["parameter-never-moves"], "parameters"),
    Case("the optimizer knows only the head", "finetune", [
        ("    head = [p for p in model.parameters() if p.requires_grad]\n",
         "    head = [*model.fc.parameters()]" + HERE),
        ("optimizer = torch.optim.AdamW(head, lr=1e-3)\n",
         "optimizer = torch.optim.AdamW(head, lr=1e-3)" + HERE),
    ], ["parameter-not-in-optimizer"], "parameters"),
    Case("all ranks save", "gan", [
        ('    if rank == 0:\n        torch.save(netG.module.state_dict(), "generator.pt")\n',
         '    torch.save(netG.module.state_dict(), "generator.pt")' + HERE),
    ], ["same-file"], "files"),
    Case("another learning rate on each rank", "stream", [
        ("    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)\n",
         "    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * (rank + 1))" + HERE),
    ], ["learning-rates-differ"], "learning rates"),
    Case("buffers are not broadcast", "vision", [
        ("model = DDP(build())\n", "model = DDP(build(), broadcast_buffers=False)" + HERE),
    ], ["buffers-differ"], "buffers"),
    Case("a sum is taken on one rank only", "spawn", [
        ("    dist.all_reduce(counts)\n",
         "    if dist.get_rank() == 0:\n        dist.all_reduce(counts)" + HERE),
        ('        dist.barrier()\n', ''),
    ], ["collectives-differ", "hang"], "collectives", real=True),
)  # fmt: skip
